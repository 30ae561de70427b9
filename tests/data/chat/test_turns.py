"""Loss masks are proven by rendering prefixes (C08, C10; section 4 of the evidence, properties 2 to 4, 6, 9)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chat.talks import (
    CALLS,
    TALK,
    TEMPLATES,
    TOOLS,
    byte_ids,
    merged_ids,
    only,
    pieces,
    rendered,
    section,
    sentence_pieces,
    targets,
)
from truestep.data.chat.chat import chat_of
from truestep.data.chat.turns import Conversation
from truestep.data.samples import EARLIER, LAST, RowError
from truestep.errors import DataError

SIMPLE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
HEADERLESS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def turn(body: str) -> str:
    """A template that marks the assistant's turns, written as `body`."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + body
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + PROMPT
    )


def test_roles_of_a_conversation_token_for_token():
    tokenizer = byte_ids("chatml")
    assert pieces(only(rendered({"messages": TALK}, tokenizer)), tokenizer) == [
        (0, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi  there<|im_end|>\n<|im_start|>assistant\n"),
        (EARLIER, "Hello, wörld 🙂<|im_end|>"),
        (0, "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"),
        (LAST, "4<|im_end|>"),
        (0, "\n"),
    ]


WORDS = st.text("ab \n<é#|", min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.sampled_from(["chatml", "inst", "thinks"]))
def test_properties_2_4_9_spans_are_exact(pairs, name):
    """Each answer of the assistant is the target of one sample, whole, with the token that ends it and without its
    header; and what a model is asked with is the sample up to there."""
    tokenizer = byte_ids(name)
    messages = []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        samples = [one for (one,) in rendered({"messages": messages}, tokenizer)]
    except RowError as error:
        assert error.reason == "not a continuation"
        return
    found = [text for sample in samples for text in targets(sample, tokenizer)]
    made = {
        "chatml": [answer + "<|im_end|>" for _, answer in pairs],
        "inst": [" " + answer + "<|endoftext|>" for _, answer in pairs],
        "thinks": ["<think></think>" + answer + "<|im_end|>" for _, answer in pairs],
    }
    assert found == made[name]
    assert len(samples) == (len(pairs) if name == "thinks" else 1)  # a fork for every turn that is rewritten
    roles = np.concatenate([sample.roles for sample in samples])
    assert (roles == LAST).sum() == len(tokenizer.encode(made[name][-1].rsplit("<|", 1)[0])) + 1
    assert all(sample.roles[0] == 0 and sample.roles.any() for sample in samples)


def test_prefixes_are_those_that_a_model_is_asked_with():
    tokenizer = merged_ids("chatml")
    sample = only(rendered({"messages": TALK}, tokenizer))
    (first, last) = np.flatnonzero(np.diff((sample.roles > 0).astype(int)) == 1) + 1
    for count, stop in ((2, first), (4, last)):
        asked = _conversation(tokenizer, TALK).prompt(count)
        assert np.array_equal(sample.ids[:stop], asked)


def _conversation(tokenizer, messages) -> Conversation:
    return chat_of(tokenizer, section()).conversation(messages)


def test_a_template_that_rewrites_earlier_turns_forks():
    """Property 9: each turn as a model makes it, in a sample that ends with it; the earlier one with its reasoning."""
    tokenizer = byte_ids("thinks")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "b", "reasoning_content": "s"},
    ]
    earlier, last = (unit[0] for unit in rendered({"messages": messages}, tokenizer))
    assert pieces(earlier, tokenizer)[1:] == [(EARLIER, "<think>r</think>a<|im_end|>"), (0, "\n")]
    whole = tokenizer.decode(last.ids)
    assert "<think>r" not in whole and targets(last, tokenizer) == ["<think>s</think>b<|im_end|>"]


def test_tool_calls_and_results():
    tokenizer = byte_ids("chatml")
    sample = only(rendered({"messages": CALLS, "tools": TOOLS}, tokenizer))
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "ü": "<b>"}}</tool_call>'
    assert targets(sample, tokenizer) == [f"Let me see.\n{call}<|im_end|>", "4.<|im_end|>"]
    assert '"description": "Adds <two> numbers & says so: é"' in tokenizer.decode(sample.ids)


def test_c08_pad_and_eos_may_be_one_token():
    """Targets come from spans, so the token that ends a turn is one even where it pads too, and others are none."""
    tokenizer = byte_ids("inst")
    messages = [{"role": "user", "content": "<|endoftext|>"}, {"role": "assistant", "content": "a"}]
    sample = only(rendered({"messages": messages}, tokenizer))
    assert sample.ids[-1] == tokenizer.eod_id and sample.roles[-1] == LAST
    assert (sample.ids == tokenizer.eod_id).sum() == 1


def test_property_6_exactly_one_bos():
    tokenizer = sentence_pieces("inst")
    sample = only(rendered({"messages": TALK}, tokenizer))
    assert (sample.ids == 1).sum() == 1 and sample.ids[0] == 1
    with pytest.raises(DataError, match="begins with the same special token twice; take one"):
        rendered({"messages": SIMPLE}, byte_ids("<|im_start|><|im_start|>" + HEADERLESS + PROMPT))


def test_c10_a_template_without_marks_is_no_matter():
    assert "generation %}" not in TEMPLATES["inst"]
    assert targets(only(rendered({"messages": SIMPLE}, byte_ids("inst"))), byte_ids()) == [" a<|endoftext|>"]


def test_c10_rows_without_a_target_are_refused():
    tokenizer = byte_ids("chatml")
    for messages in (SIMPLE[:1], [SIMPLE[0], SIMPLE[1] | {"weight": 0}]):
        with pytest.raises(RowError, match=r"^has no message of the assistant with loss") as error:
            rendered({"messages": messages}, tokenizer)
        assert error.value.reason == "no target"


def test_turns_of_weight_0_have_no_loss():
    tokenizer = byte_ids("chatml")
    messages = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:4], TALK[4] | {"weight": 1}]
    sample = only(rendered({"messages": messages}, tokenizer))
    assert targets(sample, tokenizer) == ["4<|im_end|>"]
    assert tokenizer.decode(sample.ids).count("Hello") == 1


# templates that cannot be learned from


@pytest.mark.parametrize(
    "template,says",
    [
        (HEADERLESS, "has no generation prompt .*; add {% if add_generation_prompt %}"),
        (HEADERLESS + "<|im_start|>assistant\n", "the generation prompt after every answer, asked or not"),
        (PROMPT + "{% for m in messages %}{{ m.role }}{% endfor %}", "does not write what the assistant says"),
    ],
)
def test_a_template_without_a_generation_prompt_is_refused_whatever_the_row(template, says):
    with pytest.raises(DataError, match=says) as error:
        rendered({"messages": SIMPLE}, byte_ids(template))
    assert not isinstance(error.value, RowError)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match=r"has no chat template; set tokenizer.chat_template to chatml or a file"):
        rendered({"messages": SIMPLE}, byte_ids(None))


def test_a_turn_that_nothing_ends_is_refused():
    endless = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}" + PROMPT
    with pytest.raises(RowError, match=r"ends message 1 of the assistant with no special token, .* such as eos_token"):
        rendered({"messages": SIMPLE}, byte_ids(endless))


def test_an_answer_that_joins_with_its_header_is_refused():
    tokenizer = merged_ids("chatml")
    messages = [SIMPLE[0], {"role": "assistant", "content": "\n\nHello"}]
    assert len(tokenizer.encode("\n\n")) == 1
    with pytest.raises(RowError, match=r"^message 1 of the assistant does not go on from the tokens") as error:
        rendered({"messages": messages}, tokenizer)
    assert error.value.reason == "not a continuation"


def test_what_a_template_would_leave_out_is_refused():
    tokenizer = byte_ids("inst")
    thought = SIMPLE[1] | {"reasoning_content": "r"}
    with pytest.raises(RowError, match=r"^has reasoning_content, but the chat template does not write it"):
        rendered({"messages": [SIMPLE[0], thought]}, tokenizer)
    with pytest.raises(RowError, match=r"^has tools, but the chat template does not write them"):
        rendered({"messages": SIMPLE, "tools": TOOLS}, tokenizer)
    with pytest.raises(RowError, match=r"^has tool calls, but the chat template does not write them"):
        rendered({"messages": CALLS}, tokenizer)


def test_fields_go_by_the_names_that_the_template_reads():
    thinking = turn("<|im_start|>assistant\n{{ m.thinking }}|{{ m.content }}<|im_end|>\n")
    tokenizer = byte_ids(thinking)
    row = {"messages": [SIMPLE[0], SIMPLE[1] | {"reasoning_content": "why"}]}
    assert targets(only(rendered(row, tokenizer)), tokenizer) == ["why|a<|im_end|>"]
    null = turn(
        "<|im_start|>assistant\n{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>\n"
    )
    call = {"role": "assistant", "content": "", "tool_calls": CALLS[1]["tool_calls"]}
    assert targets(only(rendered({"messages": [SIMPLE[0], call]}, byte_ids(null))), byte_ids()) == ["add<|im_end|>"]


# the template's own marks


@pytest.mark.parametrize(
    "body",
    [
        "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
        "<|im_start|>assistant\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n",
        "{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endgeneration %}",
    ],
)
def test_marks_that_agree(body):
    tokenizer = byte_ids(turn(body))
    sample = only(rendered({"messages": TALK}, tokenizer))
    assert targets(sample, tokenizer) == ["Hello, wörld 🙂<|im_end|>", "4<|im_end|>"]


def test_marks_that_disagree_are_refused():
    short = turn(
        "<|im_start|>assistant\n{% generation %}{{ m.content[:1] }}{% endgeneration %}{{ m.content[1:] }}<|im_end|>\n"
    )
    with pytest.raises(RowError, match=r"marks leave out a part of message 2 of the assistant"):
        rendered({"messages": TALK}, byte_ids(short))
    wide = (
        "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% endfor %}" + PROMPT
    )
    with pytest.raises(
        RowError, match=r"marks hold what comes before message 2 .*; correct the marks, or take them out"
    ):
        rendered({"messages": TALK}, byte_ids(wide))
    stripped = turn(
        "<|im_start|>assistant\n{% set x %}{% generation %} {{ m.content }}{% endgeneration %}{% endset %}"
        "{{ x | trim }}<|im_end|>\n"
    )
    with pytest.raises(DataError, match="changes the text between its"):
        rendered({"messages": TALK}, byte_ids(stripped))
