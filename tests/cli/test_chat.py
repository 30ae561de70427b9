"""The verb `chat`, with a model of this machine and with a real one."""

import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

import truestep
from tests.models.sections import small
from tests.real_model import smollm2  # noqa: F401  a fixture
from truestep.cli.chat import HELP, chat
from truestep.data.tokenizer import bytes_tokenizer
from truestep.errors import UserError
from truestep.models.build import build_model, init_weights
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model
from truestep.rollout.directory import end_ids, open_model

app = typer.Typer()
app.command()(chat)
GREEDY = ("--temperature", "0", "--max-new-tokens", "5", "--device", "cpu")


def run(*arguments: str | Path, typed: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=typed)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, bytes, and a template whose turns end with the end of the document."""
    folder = tmp_path_factory.mktemp("chat")
    section = small().model_copy(update={"vocab_size": 257, "max_context": 256})
    module = build_model(section, 257).to_empty(device="cpu")
    init_weights(module, 0)
    source = "{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}a{% endif %}"
    bytes_tokenizer().with_chat_template(source).save(folder / "tokenizer")
    tensors = dict(module.named_parameters())
    save_hf(folder / "model", tensors, section, tokenizer_dir=folder / "tokenizer", generation={"eos_token_id": [7, 9]})
    return folder / "model"


def test_messages_are_turns_of_one_conversation(model: Path):
    output = run(model, "--message", "one", "--message", "two", "--system", "be kind", *GREEDY)
    talk = truestep.chat(model, "be kind", temperature=0.0, max_new_tokens=5, device="cpu")
    assert output == f"{talk.say('one')}\n{talk.say('two')}\n"
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 2]


def test_what_is_typed_is_answered_until_quit(model: Path):
    alone = run(model, "--message", "one", *GREEDY)
    kind = run(model, "--message", "one", "--system", "kind", *GREEDY)
    assert alone != kind
    typed = "one\n/reset\none\n/help\n\n/system kind\none\n/reset\none\n/system\none\n/quit\none\n"
    assert run(model, *GREEDY, typed=typed) == alone * 2 + HELP + "\n" + kind * 2 + alone


def test_stops_at_what_the_settings_and_the_template_say(model: Path):
    assert open_model(model).stop_ids == {7, 9, 256}


def test_ends_of_turns(tmp_path: Path):
    plain = bytes_tokenizer()
    assert end_ids(plain) == [256]
    broken = plain.with_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert end_ids(broken) == [256], "turns that have no end add none"


def test_refusals(model: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"the conversation has \d+ tokens, but the model takes 256"):
        run(model, "--message", "x" * 300, *GREEDY)
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        run(tmp_path, "--message", "x")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no chat template; take a model that was trained on conversations"):
        run(bare, "--message", "x")
    (bare / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(UserError, match="names eos_token_id = 'two', which is no token id"):
        open_model(bare)


def test_an_adapter_changes_answers(model: Path, tmp_path: Path):
    """Written by hand in PEFT's layout; it speaks for itself in `sample`, too."""
    section, random = small(), torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    sizes = {"lora_A": (2, section.num_heads * section.resolved(37).head_dim), "lora_B": (section.hidden_size, 2)}
    tensors = {f"{name}.{key}.weight": torch.randn(size, generator=random) for key, size in sizes.items()}
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": r".*layers\.0\.self_attn\.o_proj"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    adapter = ("--adapter", tmp_path / "adapter")
    assert run(model, "--message", "one", *GREEDY, *adapter) != run(model, "--message", "one", *GREEDY)
    options = {"temperature": 0.0, "max_new_tokens": 5, "device": "cpu"}
    alone, adapted = (truestep.sample(model, ["one"], adapter=one, **options) for one in (None, adapter[1]))
    assert alone != adapted


@pytest.mark.slow
def test_a_real_model_answers(smollm2: Path):  # noqa: F811
    output = run(smollm2, "--message", "What is the capital of France?", "--message", "And of Italy?", *GREEDY[:2])
    assert output == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"


@pytest.mark.slow
def test_logits_of_a_real_model_are_those_of_transformers(smollm2: Path):  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "Name three colours, please."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        ours = load_model(smollm2)(ids)
        theirs = AutoModelForCausalLM.from_pretrained(smollm2, attn_implementation="eager")(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
