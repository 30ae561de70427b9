"""A model directory and an adapter made into one directory, tensor after tensor."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from truestep.adapters.merge import Merged, combined
from truestep.adapters.peft import Factors, read_adapter
from truestep.errors import ModelError
from truestep.models.build import build_model
from truestep.models.decoder import Decoder
from truestep.models.hf import load_hf, read_generation, read_section
from truestep.models.hf_pieces import hf_pieces
from truestep.models.hf_save import save_stored
from truestep.models.load import stored_dtype, tensors_of
from truestep.models.roles import SCORE
from truestep.numerics.blockwise import Kind, rounded
from truestep.numerics.digest import digest_of, tensor_digest
from truestep.recipe.model import ModelSection
from truestep.rollout.adapted import read_factors


class Merging:
    """The tensors of the merged model by Hugging Face's names, one at a time; afterwards what was made: `merged`, the
    `digest` of all of them and their bytes in the files. `whole`: weights that the adapter brings, by their modules.
    `held`: how the adapter's training held the weights of linear maps, which is what is merged."""

    def __init__(
        self,
        source: Path,
        section: ModelSection,
        factors: Mapping[str, Factors],
        whole: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        held: str = "full",
    ):
        self.held = held
        self.source, self.section, self.dtype = source, section, dtype
        self.factors, self.whole = factors, whole
        self.merged = Merged()
        self.num_bytes = 0
        self._digests: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Of the tensors that have been gone through, by our names."""
        return digest_of(self._digests)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = build_model(self.section, self.section.vocab_size)
        assert isinstance(model, Decoder)
        named, parameters = tensors_of(model), dict(model.named_parameters())
        sites = {site.weight: site for site in model.sites()}
        for name, like in named.items():
            tensor = torch.empty(like.shape, dtype=like.dtype)
            if name == SCORE and "score" in self.whole:
                tensor.copy_(self.whole["score"])
            else:
                load_hf(self.source, {name: tensor}, list(named))
            site = sites.get(name)
            if self.held != "full" and site is not None and site.group in ("attention", "mlp"):
                tensor = rounded(tensor, cast("Kind", self.held))
            if site is not None and site.path in self.factors:
                table = site.kind == "table"
                tensor = self.merged.add(name, tensor, self.factors[site.path], self.dtype, table=table)
            elif tensor.is_floating_point() and name in parameters:
                tensor = tensor.to(self.dtype)
            self._digests[name] = tensor_digest(tensor)
            for theirs, piece in hf_pieces({name: tensor}, self.section).items():
                yield theirs, piece.local


def merge(source: Path, adapters: Mapping[Path, float], out: Path, dtype: torch.dtype | None = None) -> Merging:
    """Write the model of `source` with the changes of some adapters, each times its factor, to the new directory `out`,
    in `dtype` or that of the source's files; sums are made in fp32. A head that an adapter brings becomes the model's.
    """
    section, stored = read_section(source), {str(path): read_adapter(path) for path in adapters}
    if any("score" in (one.config.get("modules_to_save") or ()) for one in stored.values()):
        section = section.model_copy(update={"scores": True})
    model = build_model(section, section.vocab_size)
    if not isinstance(model, Decoder):
        raise ModelError(f"{source} is a module of your own, which takes no adapters.")
    read = {name: read_factors(model, section, source, one) for name, one in stored.items()}
    whole = {name: weight for _, brought in read.values() for name, weight in brought.items()}
    factors = combined(
        {name: found for name, (found, _) in read.items()}, {str(path): factor for path, factor in adapters.items()}
    )
    return write(source, section, factors, whole, out, dtype or stored_dtype(source), source, read_generation(source))


def write(
    source: Path,
    section: ModelSection,
    factors: Mapping[str, Factors],
    whole: Mapping[str, torch.Tensor],
    out: Path,
    dtype: torch.dtype,
    tokenizer_dir: Path | None,
    generation: Mapping[str, Any],
    held: str = "full",
) -> Merging:
    """See Merging; to the new directory `out`."""
    merging = Merging(source, section, factors, whole, dtype, held)
    options = {"tokenizer_dir": tokenizer_dir, "generation": generation}
    merging.num_bytes = save_stored(out, merging, section, dtype=dtype, config={}, **options)
    return merging


def words(merging: Merging) -> str:
    """What merging lost, for people."""
    name, lost = merging.merged.worst
    kind = str(merging.dtype).removeprefix("torch.")
    return (
        f"merged {len(merging.merged.lost)} weights in float32, written in {kind}: rounding took "
        f"{merging.merged.error:.2e} of the adapter's change, at most {lost:.2e} ({name})"
    )
