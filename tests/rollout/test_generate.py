"""Generation: greedy as `transformers` does it, padding without effect, sampling by seed, the end of a document."""

import math
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from tests.models.families import VOCAB, tiny
from truestep.errors import ModelError
from truestep.models.load import load_model
from truestep.numerics.counter import uniform
from truestep.rollout.generate import choose, generate, generate_ids, stream_ids

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]


class Letters:
    """Ids are alphabet positions; 2 ends a document."""

    eod_id = 2

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 60 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + 60) for i in ids)


@pytest.fixture(params=["llama", "mistral", "gemma2", "gemma3", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    theirs = tiny(request.param)
    theirs.save_pretrained(tmp_path / "model")
    return load_model(tmp_path / "model"), theirs


def test_c11_greedy_is_transformers_greedy(pair):
    """A left-padded batch of unlike lengths gives what each prompt gives alone."""
    ours, theirs = pair
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
    found = generate_ids(ours, PROMPTS, 12, stop_ids=[2])
    for prompt, new in zip(PROMPTS, found):
        wanted = theirs.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        assert new == wanted[: wanted.index(2)] if 2 in wanted else new == wanted


def test_the_cache_changes_nothing(pair):
    ours, _ = pair
    found = generate_ids(ours, PROMPTS, 10)
    for prompt, new in zip(PROMPTS, found):
        row = list(prompt)
        for token in new:
            assert ours(torch.tensor([row]))[0, -1].argmax() == token
            row.append(token)


@pytest.fixture
def model(tmp_path: Path):
    tiny("llama").save_pretrained(tmp_path / "model")
    return load_model(tmp_path / "model")


def test_samples_depend_on_seed_and_place_only(model):
    def draw(prompts, seed):
        return generate_ids(model, prompts, 8, temperature=1.0, top_p=0.9, seed=seed)

    first = draw(PROMPTS, 1)
    assert draw(PROMPTS, 1) == first and draw(PROMPTS[:2], 1) == first[:2]
    assert draw(PROMPTS, 2) != first
    state = torch.get_rng_state()
    draw(PROMPTS, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_stops_at_the_end_of_the_document(model):
    free = generate_ids(model, PROMPTS, 12)
    stop = free[0][4]
    for wanted, found in zip(free, generate_ids(model, PROMPTS, 12, stop_ids=[stop])):
        assert found == (wanted[: wanted.index(stop)] if stop in wanted else wanted)


def test_a_stream_gives_the_same_ids_one_by_one(model):
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 4}
    (free,) = generate_ids(model, PROMPTS[:1], 12, **drawn)
    stream = stream_ids(model, PROMPTS[0], 12, stop_ids=[free[5]], **drawn)
    assert next(stream) == free[0] and not model.training
    assert [free[0], *stream] == free[: free.index(free[5])]
    model.train()
    stream = stream_ids(model, PROMPTS[0], 12)
    next(stream)
    stream.close()
    assert model.training, "whoever stops early leaves the module as it was"


def test_beyond_the_context_is_refused(model):
    assert len(generate_ids(model, PROMPTS, 57)[0]) == 57
    with pytest.raises(ModelError, match="a prompt of 7 tokens and 58 new ones exceed the model's context of 64"):
        generate_ids(model, PROMPTS, 58)


def test_texts_in_and_out(model):
    found = generate(model, Letters(), ["ABC", "", "Q"], 5)
    assert found == generate(model, Letters(), ["ABC", "", "Q"], 5)
    assert found[1] == Letters().decode(generate_ids(model, [[2]], 5, stop_ids=[2])[0])
    assert generate(model, Letters(), [], 5) == []


def test_training_flags_come_back(model):
    model.train()
    model.blocks[0].eval()
    before = [m.training for m in model.modules()]
    generate_ids(model, PROMPTS, 2)
    assert [m.training for m in model.modules()] == before
    with pytest.raises(IndexError):
        generate_ids(model, [[VOCAB + 5]], 2)
    assert [m.training for m in model.modules()] == before


def test_choose_follows_the_distribution():
    logits_BV = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)]).expand(20_000, 4)
    draws_B = uniform(1, 0, 20_000)
    shares = torch.bincount(choose(logits_BV, 1.0, 1.0, draws_B), minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.012, rtol=0)
    nucleus = torch.bincount(choose(logits_BV, 1.0, 0.75, draws_B), minlength=4) / 20_000
    torch.testing.assert_close(nucleus, torch.tensor([0.625, 0.375, 0, 0]), atol=0.012, rtol=0)
    warm = torch.bincount(choose(logits_BV, 0.5, 1.0, draws_B), minlength=4) / 20_000
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(warm, squares / squares.sum(), atol=0.012, rtol=0)
    assert (choose(logits_BV, 1.0, 1e-9, draws_B) == 0).all() and (choose(logits_BV, 0.0, 1.0, draws_B) == 0).all()
    ends = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    assert choose(logits_BV[:2], 1.0, 1.0, ends).tolist() == [0, 3]
