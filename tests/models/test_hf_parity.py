"""Logits equal to `transformers` on tiny random models of each family, in both directions."""

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


def ours(directory: Path) -> Decoder:
    model = Decoder(read_section(directory))
    load_hf(directory, dict(model.named_parameters()))
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

        save_hf(tmp_path / "ours", dict(model.named_parameters()), model.section, shard_bytes=20_000)
        again, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), info
        assert again.dtype == torch.float32
        assert torch.equal(again.eval()(tokens_BT).logits, theirs(tokens_BT).logits)
        assert torch.equal(ours(tmp_path / "ours")(tokens_BT), model(tokens_BT))


def test_section_survives_the_configuration(name: str):
    config = json.loads(json.dumps(CONFIGS[name]().to_dict() | {"architectures": [type(tiny(name)).__name__]}))
    section = section_from_config(config)
    written = config_from_section(section)
    assert section_from_config(written) == section
    del written["rope_parameters"]  # what transformers 4 wrote
    assert section_from_config(written) == section
