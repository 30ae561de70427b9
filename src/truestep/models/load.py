"""A model directory as a module, ready to run."""

from pathlib import Path

import torch
from torch import nn

from truestep.errors import ModelError
from truestep.models.build import build_model
from truestep.models.decoder import Decoder
from truestep.models.foreign import ForeignModel
from truestep.models.hf import cast_as_stored, load_hf, read_json, read_section
from truestep.recipe.model import ModelSection

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    directory: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    own_module: str | None = None,
) -> Decoder | ForeignModel:
    """The whole model on one device, in `dtype` or that of its files. A directory that names a user's own module is
    loaded only if the caller names the same module: a download must not choose code to run."""
    section = read_section(directory)
    require_own_module(section, own_module, directory)
    model = build_model(section, section.vocab_size).to(dtype or stored_dtype(directory))
    model = model.to_empty(device=device) if isinstance(model, Decoder) else model.to(device)
    load_hf(directory, tensors_of(model))
    cast_as_stored(directory, model)
    return model


def require_own_module(section: ModelSection, own_module: str | None, where: Path) -> None:
    """Refuse a section that came with files and names code that the user did not name."""
    if section.module not in (None, own_module):
        raise ModelError(
            f"{where} needs the code of {section.module}; if you trust it, name that module yourself "
            f"(model.module in a recipe, --module on the command line)."
        )


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype that config.json names; float32 where it names none."""
    config = read_json(directory / "config.json")
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ModelError(f"{directory / 'config.json'} has dtype = {name!r}, which is not supported; use {known}.")
    return _DTYPES[name]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model directory holds of a module: parameters (a tied one once) and persistent buffers, by name."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return dict(model.named_parameters()) | buffers
