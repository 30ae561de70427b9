"""Quantised models answer in the engines that people serve them with, as they answer here."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_post
from tests.quant.engines import ask
from truestep.cli import verbs
from truestep.data.sample import make_tokenizer
from truestep.data.tokenizer import load_tokenizer
from truestep.models.build import build_model, init_weights
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model, tensors_of
from truestep.recipe.data import DataSection, TokenizerSection
from truestep.recipe.model import ModelSection
from truestep.rollout.generate import generate_ids

pytestmark = pytest.mark.slow

NEW = 12
TOLERANCE = 0.05
TEXTS = ["The loss of a stage", "recipe = 12345, a long-forgotten\n  word", "Ünïcode — and 3.14"]
GGUF = {"Q8_0": {"scheme": "int8"}, "Q4_0": {"group": 32}, "Q4_1": {"group": 32, "symmetric": False}}
VLLM: dict[str, dict[str, Any]] = {
    "int4": {"group": 32},
    "int4 asymmetric": {"group": 32, "symmetric": False},
}
"""What vLLM's CPU build has kernels for, in bfloat16: 8-bit weights alone it multiplies on GPUs only."""

LLAMA = """
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = given["file"], 256, 1, 1
server = xllamacpp.Server(params)
ask = {"n_predict": given["new"], "temperature": 0, "top_k": 1, "cache_prompt": False}
answer = [server.handle_completions({"prompt": text, **ask}) for text in given["texts"]]
answer = [[one["usage"]["prompt_tokens"], one["choices"][0]["text"]] for one in answer]
"""
ENGINE = """
from vllm import LLM, SamplingParams
engine = LLM(model=given["directory"], dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=4,
             skip_tokenizer_init=True)
params = SamplingParams(temperature=0, max_tokens=given["new"], detokenize=False, logprobs=0, ignore_eos=True)
found = engine.generate([{"prompt_token_ids": ids} for ids in given["prompts"]], params)
answer = [[list(one.outputs[0].token_ids), [next(iter(step.values())).logprob for step in one.outputs[0].logprobs]]
          for one in found]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("engines")
    text = made / "text.txt"
    text.write_text(Path(__file__).with_name("test_stage.py").read_text() + " ".join(TEXTS))
    data = [DataSection(source="text", path=str(text))]
    section = TokenizerSection(kind="train-bpe", vocab_size=384, special=small_post.SPECIAL, chat_template="chatml")
    tokenizer = make_tokenizer(section, data, made / "cache")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
    for family in ("llama", "qwen3"):
        model_section = ModelSection(**sizes, family=family, max_context=256).resolved(tokenizer.vocab_size)
        model = build_model(model_section, tokenizer.vocab_size).to_empty(device="cpu")
        init_weights(model, 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(5 if name.startswith("blocks") and parameter.ndim == 2 else 1)
        eod = tokenizer.eod_id
        ids = {"eos_token_id": eod, "bos_token_id": eod, "pad_token_id": eod}
        save_hf(made / family, tensors_of(model), model_section, generation=ids)
        tokenizer.save(made / family)
    return made


def quantised(folder: Path, family: str, name: str, settings: dict[str, Any]) -> Path:
    body = small_post.recipe(folder, "quantise", f"{family}-{name.replace(' ', '-').lower()}", quantise=settings)
    body["stages"][0]["start"] = str(folder / family)
    body["tokenizer"] = {"kind": "file", "path": str(folder / family)}
    return verbs.run(body).directory / "models" / "tuned"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", GGUF)
def test_gguf_answers_in_llama_cpp(kind, family, folder):
    """The same tokens of the text, and the same greedy text; llama.cpp rounds inputs to 8 bits and keeps keys in
    float16, so that a close call may fall otherwise: most of the text must be the same."""
    directory = quantised(folder, family, kind, GGUF[kind] | {"format": "gguf"})
    found = ask("llama", LLAMA, {"file": str(directory / "model.gguf"), "texts": TEXTS, "new": NEW})
    tokenizer, model = load_tokenizer(directory), load_model(directory)
    prompts = [[int(id) for id in tokenizer.encode(text)] for text in TEXTS]
    assert [count for count, _ in found] == [len(ids) for ids in prompts]
    ours = generate_ids(model, prompts, NEW, {tokenizer.eod_id})
    same = [_shared(tokenizer.decode(row), text) for row, (_, text) in zip(ours, found)]
    assert sum(same) / len(same) > 0.5, (same, found)


def _shared(ours: str, theirs: str) -> float:
    """Length of the common beginning, as a share."""
    length = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return length / max(len(ours), len(theirs), 1)


@pytest.mark.parametrize("name", VLLM)
def test_compressed_tensors_answer_in_vllm(name, folder):
    """Its greedy tokens are the likeliest here, with the same log-probabilities, to 0.05: its kernels are bfloat16."""
    directory = quantised(folder, "llama", name, VLLM[name])
    tokenizer, model = load_tokenizer(directory), load_model(directory)
    prompts = [[int(id) for id in tokenizer.encode(text)] for text in TEXTS]
    found = ask("vllm", ENGINE, {"directory": str(directory), "prompts": prompts, "new": NEW})
    for prompt, (tokens, logprobs) in zip(prompts, found):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logp = model(ids)[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        for step, (token, theirs) in enumerate(zip(tokens, logprobs)):
            assert math.isclose(float(logp[step, token]), theirs, abs_tol=TOLERANCE), (
                step,
                float(logp[step, token]),
                theirs,
            )
            assert float(logp[step].max()) - float(logp[step, token]) < TOLERANCE
