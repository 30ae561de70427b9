"""A plain DCP checkpoint of another trainer becomes a model directory."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from truestep.cli import verbs
from truestep.errors import UserError
from truestep.models.load import load_model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> tuple[LlamaForCausalLM, Path, Path]:
    """Their model, a DCP directory with it under a prefix, and a model directory of the same architecture."""
    folder = tmp_path_factory.mktemp("dcp")
    sizes = {"vocab_size": 65, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    torch.manual_seed(0)
    model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    other.save_pretrained(folder / "like")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"app": {"model": model.state_dict(), "optim": {"step": torch.ones(())}, "epoch": 3}}
        dcp.save(state, checkpoint_id=str(folder / "checkpoint"), no_dist=True)
    return model, folder / "checkpoint", folder / "like"


def test_logits_equal_theirs(theirs, tmp_path):
    model, checkpoint, like = theirs
    target = verbs.export(checkpoint, tmp_path / "imported", like=like)
    tokens = torch.arange(20)[None]
    ours = load_model(target)(tokens)
    assert torch.allclose(ours, model(tokens).logits, atol=1e-5)
    again = LlamaForCausalLM.from_pretrained(target)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_without_an_architecture_or_with_another_one(theirs, tmp_path):
    _, checkpoint, like = theirs
    with pytest.raises(UserError, match="--like"):
        verbs.export(checkpoint, tmp_path / "a")
    with pytest.raises(UserError, match="--like is for"):
        verbs.export(like, tmp_path / "b", like=like)
    deeper = LlamaForCausalLM(LlamaConfig.from_pretrained(like, num_hidden_layers=3))
    deeper.save_pretrained(tmp_path / "deeper")
    with pytest.raises(UserError, match=r"model\.layers\.2"):
        verbs.export(checkpoint, tmp_path / "c", like=tmp_path / "deeper")
    assert not (tmp_path / "a").exists() and not (tmp_path / "c").exists()
