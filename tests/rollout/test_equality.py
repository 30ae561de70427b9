"""Greedy generation gives the tokens of `transformers.generate`: 100 prompts of unlike lengths in one batch."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from tests.models.families import VOCAB, tiny
from truestep.models.load import load_model
from truestep.rollout.generate import generate_ids

FAMILIES = ["llama-llama3", "mistral", "qwen2-window", "qwen3", "olmo2", "gemma2", "gemma3"]
FAMILIES += ["mixtral-window", "qwen3-moe", "deepseek"]
NEW = 24


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest + 1, (count,), generator=random).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in lengths]


def theirs_of(model, rows: list[list[int]], stop: int) -> list[list[int]]:
    """What `generate` adds to every row, in one batch padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=stop, pad_token_id=0)
    found = model.generate(ids, attention_mask=real, generation_config=settings)[:, longest:].tolist()
    return [row[: row.index(stop)] if stop in row else row for row in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_prompts(family: str, tmp_path: Path):
    theirs = tiny(family)
    theirs.save_pretrained(tmp_path / "model")
    ours, rows = load_model(tmp_path / "model"), prompts(100)
    free = generate_ids(ours, rows, NEW)
    stop = free[0][5]  # a token that comes up, so that rows end at places of their own
    wanted = theirs_of(theirs, rows, stop)
    assert len({len(row) for row in wanted}) > 3 and len({tuple(row) for row in wanted}) > 50
    assert generate_ids(ours, rows, NEW, stop_ids=[stop]) == wanted
