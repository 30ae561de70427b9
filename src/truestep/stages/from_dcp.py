"""A model out of a plain torch.distributed.checkpoint directory that another trainer wrote."""

from pathlib import Path

import torch
from torch import nn

from truestep.checkpoint.dcp_import import import_dcp, names
from truestep.errors import CheckpointError
from truestep.models.build import build_model, init_weights
from truestep.models.hf import read_section
from truestep.models.hf_names import hf_name
from truestep.models.load import tensors_of
from truestep.recipe.model import ModelSection


def is_dcp(folder: Path) -> bool:
    return (folder / ".metadata").is_file()


def model_from_dcp(folder: Path, like: Path) -> tuple[nn.Module, ModelSection]:
    """The model of a DCP directory with the architecture of the model directory `like`, whole, on the CPU.

    Tensors are looked for by their Hugging Face names or by ours, behind any one prefix ("model.", "app.model."), and
    all of them must be there; optimizer state and whatever else the directory holds is left.
    """
    section = read_section(like)
    stored = {name: entry for name, entry in names(folder).items() if entry is not None}
    model = build_model(section, section.vocab_size)
    ours = list(tensors_of(model))
    found = _match(folder, list(stored), {name: (hf_name(name, section), name) for name in ours})
    dtype = getattr(torch, stored[found[ours[0]]][1])
    model = model.to(dtype).to_empty(device="cpu")
    init_weights(model, 0)  # buffers that a checkpoint does not hold
    wanted = tensors_of(model)
    import_dcp(folder, {found[name]: tensor.detach() for name, tensor in wanted.items()})
    return model, section


def _match(folder: Path, stored: list[str], wanted: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Our names to stored names: of all prefixes and both ways of naming, the one under which every tensor is there."""
    known, missing = set(stored), ""
    for way in range(2):
        probe = next(iter(wanted.values()))[way]
        for prefix in sorted({name.removesuffix(probe) for name in stored if name.endswith(probe)}, key=len):
            named = {ours: prefix + both[way] for ours, both in wanted.items()}
            absent = [name for name in named.values() if name not in known]
            if not absent:
                return named
            missing = missing or absent[0]
    raise CheckpointError(
        f"{folder}: does not hold the tensors of this architecture (looked for {missing or probe}; it holds "
        f"{', '.join(stored[:3])}, ...); name a model directory of the same architecture with --like"
    )
