"""Logits and gradients equal to `transformers` on tiny random models of each family, in both directions."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.families import CONFIGS, VOCAB, tiny
from truestep.models.decoder import Decoder
from truestep.models.hf import load_hf, read_section
from truestep.models.hf_config import config_from_section, section_from_config
from truestep.models.hf_save import save_hf
from truestep.models.load import tensors_of


def ours(directory: Path) -> Decoder:
    model = Decoder(read_section(directory))
    load_hf(directory, tensors_of(model))
    return model


@pytest.fixture(params=sorted(CONFIGS))
def name(request) -> str:
    return request.param


def test_logits_equal_both_ways(name: str, tmp_path: Path):
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    model = ours(tmp_path / "theirs")
    tokens_BT = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT), theirs(tokens_BT).logits, atol=1e-5, rtol=1e-5)

        save_hf(tmp_path / "ours", tensors_of(model), model.section, shard_bytes=20_000)
        again, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), info
        assert again.dtype == torch.float32
        assert torch.equal(again.eval()(tokens_BT).logits, theirs(tokens_BT).logits)
        assert torch.equal(ours(tmp_path / "ours")(tokens_BT), model(tokens_BT))


def test_gradients_equal(name: str, tmp_path: Path):
    """Of every parameter. Those of `transformers` are written in the place of its weights, and read back as ours."""
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    tokens_BT = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    model(tokens_BT).logsumexp(-1).mean().backward()
    theirs(tokens_BT).logits.logsumexp(-1).mean().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = dict(ours(tmp_path / "gradients").named_parameters())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[parameter_name].detach(), atol=1e-6, rtol=1e-4, msg=parameter_name
        )


def test_section_survives_the_configuration(name: str):
    config = json.loads(json.dumps(CONFIGS[name]().to_dict() | {"architectures": [type(tiny(name)).__name__]}))
    section = section_from_config(config)
    written = config_from_section(section)
    assert section_from_config(written) == section
    del written["rope_parameters"]  # what transformers 4 wrote
    assert section_from_config(written) == section
