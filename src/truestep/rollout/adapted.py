"""Stored adapters put beside the weights of a model that runs on one device."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from truestep.adapters.add import put
from truestep.adapters.peft import Factors, Stored, factors_of, read_adapter
from truestep.adapters.switch import choose
from truestep.errors import ModelError
from truestep.models.decoder import Decoder
from truestep.models.foreign import ForeignModel
from truestep.models.hf_names import hf_parts
from truestep.models.roles import SCORE
from truestep.numerics.digest import files_digest
from truestep.recipe.model import ModelSection


def load_adapters(model: Decoder | ForeignModel, base: Path, adapters: Mapping[str, Path]) -> None:
    """Put stored adapters beside the weights of a model that was loaded from the directory `base`, by names of the
    caller's; all are in use at once (`adapters.switch.choose` says which, `off` none). ModelError for an adapter that
    does not fit to the last tensor, or was trained beside other weights."""
    if not isinstance(model, Decoder):
        raise ModelError(f"{base} is a module of your own, which takes no adapters.")
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    for name, directory in adapters.items():
        factors, whole = read_factors(model, model.section, base, read_adapter(directory))
        sites = [site for site in model.sites() if site.path in factors]
        put(sites, name, {path: one.shape for path, one in factors.items()}, str(device))
        for site in sites:
            assert site.adapted is not None
            adapter = site.adapted[name].to(dtype)
            with torch.no_grad():
                adapter.get_parameter("a").copy_(factors[site.path].a)
                adapter.get_parameter("b").copy_(factors[site.path].b)
            adapter.requires_grad_(False)
        if (head := whole.get("score")) is not None:
            with torch.no_grad():
                model.get_parameter(SCORE).copy_(head)
    choose(dict.fromkeys(adapters, 1.0), model)


def read_factors(
    model: Decoder, section: ModelSection, base: Path, stored: Stored
) -> tuple[dict[str, Factors], dict[str, torch.Tensor]]:
    """See `factors_of`; of an adapter that says which weights it belongs to, those of `base` must be these."""
    if stored.base is not None and stored.base != (found := files_digest(base)):
        raise ModelError(
            f"the adapter in {stored.directory} was trained beside weights of digest {stored.base}, but those in "
            f"{base} are {found}; give the model that it was trained beside."
        )
    tied = section.tie_embeddings and not section.scores
    return factors_of(stored, model.sites(), partial(hf_parts, section=section), tied)
