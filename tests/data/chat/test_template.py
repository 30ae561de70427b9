"""Templates render, and become ids, as with Hugging Face's apply_chat_template; a saved tokenizer keeps its own."""

from datetime import date

import pytest
from transformers import AutoTokenizer

from tests.data.chat.talks import CALLS, TALK, TEMPLATES, TOOLS, byte_ids, merged_ids, saved, sentence_pieces
from truestep.data.chat.encoding import TemplateEncoder
from truestep.data.chat.template import ChatTemplate, template_source
from truestep.data.chat.units import RowError
from truestep.data.sample import make_tokenizer
from truestep.data.tokenizer import FILES, Tokenizer, bytes_tokenizer, load_tokenizer
from truestep.errors import DataError
from truestep.recipe.data import TokenizerSection

CASES = [
    (byte_ids, "chatml", TALK, None),
    (byte_ids, "chatml", TALK, TOOLS),
    (byte_ids, "chatml", CALLS, TOOLS),
    (merged_ids, "chatml", TALK, None),
    (merged_ids, "thinks", TALK[1:], None),
    (sentence_pieces, "inst", TALK, None),
]


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    assert tokenizer.chat_template is not None
    return ChatTemplate(tokenizer.chat_template, tokenizer.template_variables, date.today())


@pytest.mark.parametrize("make,name,messages,tools", CASES)
def test_text_and_ids_are_those_of_transformers(make, name, messages, tools, tmp_path):
    tokenizer = make(name)
    theirs = AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path / "t"))
    ours, encoder = template_of(tokenizer), TemplateEncoder(tokenizer)
    for count in range(1, len(messages) + 1):
        for prompt in (False, True):
            some = messages[:count]
            asked = {"tools": tools, "add_generation_prompt": prompt}
            text = ours.render(encoder.guard(some), encoder.guard(tools), generation_prompt=prompt)
            assert text == theirs.apply_chat_template(some, tokenize=False, **asked)
            ids = theirs.apply_chat_template(some, tokenize=True, return_dict=False, **asked)
            assert encoder.encode([text])[0].tolist() == list(ids)


def test_the_language_is_that_of_transformers(tmp_path):
    """Loop controls, white space of blocks, raise_exception, strftime_now, bos_token."""
    tokenizer = Tokenizer(
        byte_ids(None).spec,
        "<|endoftext|>",
        config={"chat_template": TEMPLATES["rules"], "bos_token": "<|im_start|>"},
    )
    theirs = AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path / "t"))
    ours = template_of(tokenizer)
    for prompt in (False, True):
        text = ours.render(TALK, generation_prompt=prompt)
        assert text == theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)
    assert date.today().strftime("%d %b %Y") in text
    with pytest.raises(RowError, match=r"^the chat template refuses it: Conversations begin with the user; change"):
        ours.render(TALK[2:])


def test_today_is_what_the_recipe_says_so_that_builds_repeat():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, date(2024, 7, 26))
    assert template.render([]) == "2024-07-26"


def test_templates_are_in_a_sandbox():
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(RowError, match="the chat template"):
            ChatTemplate(source, {}, date(2026, 1, 1)).render([])


def test_a_template_that_is_no_jinja_is_refused_with_its_line():
    with pytest.raises(DataError, match=r"^the chat template is no Jinja: line 2: .*; correct it"):
        ChatTemplate("a\n{% for %}", {}, date(2026, 1, 1))


def test_a_saved_tokenizer_keeps_its_template_in_both_places(tmp_path):
    made = byte_ids("chatml")
    saved(made, tmp_path / "t")
    assert (tmp_path / "t" / "chat_template.jinja").read_text() == template_source("chatml")
    again = load_tokenizer(tmp_path / "t")
    assert (again.chat_template, again.fingerprint) == (made.chat_template, made.fingerprint)
    (tmp_path / "t" / "chat_template.jinja").write_text("other")
    assert load_tokenizer(tmp_path / "t").chat_template == "other"  # as in transformers, the file wins
    assert load_tokenizer(tmp_path / "t").fingerprint != made.fingerprint


def test_a_template_changes_the_fingerprint_only_where_there_is_one():
    plain = bytes_tokenizer()
    assert plain.fingerprint == bytes_tokenizer().fingerprint != plain.with_chat_template("x").fingerprint


def test_the_default_is_taken_of_several_templates(tmp_path):
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    tokenizer = Tokenizer(bytes_tokenizer().spec, "<|endoftext|>", config={"chat_template": several})
    assert tokenizer.chat_template == "plain"


# [tokenizer]


def test_special_tokens_and_chatml_by_recipe(tmp_path):
    section = TokenizerSection(kind="bytes", special=["<|im_start|>", "<|im_end|>"], chat_template="chatml")
    tokenizer = make_tokenizer(section, [], tmp_path)
    assert tokenizer.special == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert tokenizer.chat_template == template_source("chatml") and tokenizer.vocab_size == 259
    assert tokenizer.encode("<|im_end|>").tolist() == list(b"<|im_end|>")
    with pytest.raises(DataError, match=r"has no special token <\|im_start\|>, which chatml needs; name it in"):
        make_tokenizer(TokenizerSection(kind="bytes", chat_template="chatml"), [], tmp_path)
    with pytest.raises(DataError, match=r"^tokenizer.chat_template .*absent cannot be read"):
        make_tokenizer(TokenizerSection(kind="bytes", chat_template=str(tmp_path / "absent")), [], tmp_path)


def test_the_tokenizer_of_the_start_comes_with_its_template(tmp_path):
    made = merged_ids("chatml")
    folder = saved(made, tmp_path / "model")
    found = make_tokenizer(TokenizerSection(kind="start"), [], tmp_path, start=folder)
    assert found.fingerprint == made.fingerprint
    (tmp_path / "own.jinja").write_text("own")
    own = TokenizerSection(kind="start", chat_template=str(tmp_path / "own.jinja"))
    assert make_tokenizer(own, [], tmp_path, start=folder).chat_template == "own"


def test_files_that_are_fetched_include_the_template():
    assert "chat_template.jinja" in FILES


def test_special_tokens_of_a_trained_vocabulary_come_after_the_end_of_document():
    made = merged_ids("chatml")
    assert made.special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<s>": 3}
    assert not {1, 2, 3} & set(made.encode("<|im_start|><s> <|im_end|>").tolist())
