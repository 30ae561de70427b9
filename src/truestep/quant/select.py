"""Which weights of a model are quantised: linear maps inside blocks. Everything else stays as it is, and is named."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from truestep.errors import ModelError
from truestep.numerics.quantised.scheme import NV_BLOCK, Scheme
from truestep.numerics.roles import Role

_WHY = {
    Role.EMBEDDING: "a table",
    Role.HEAD: "the head",
    Role.ROUTER: "a router",
    Role.NORM: "a normalisation",
    Role.BIAS: "an offset",
}
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Maps of one input that engines lay together, with one outer scale."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of ours: its role (None: a buffer), the names of its tensors in files, their shape."""

    name: str
    role: Role | None
    theirs: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Names in files: `quantised` in order, and `kept`, each with the reason."""

    quantised: tuple[str, ...]
    kept: Mapping[str, str]

    @property
    def kept_maps(self) -> list[str]:
        """Modules among the kept that could be taken for linear maps to quantise."""
        reasons = (_WHY[Role.HEAD], _WHY[Role.ROUTER])
        names = [name for name, why in self.kept.items() if why in reasons or why.startswith("keep")]
        return sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))


def choose(weights: Sequence[Weight], keep: Iterable[str], scheme: Scheme) -> Choice:
    """ModelError for a pattern that matches nothing, a model without a map to quantise, or a width that groups do not
    divide, which the layout has no place for."""
    quantised: list[str] = []
    kept: dict[str, str] = {}
    unused = dict.fromkeys(keep)
    for weight in weights:
        pattern = next((one for one in keep if _matches(weight, one)), None)
        for one in [one for one in unused if _matches(weight, one)]:
            del unused[one]
        if weight.role is Role.MATRIX and pattern is None:
            _check_width(weight, scheme)
            quantised += weight.theirs
        else:
            why = _WHY.get(weight.role, "no linear map") if weight.role is not None else "a buffer"
            kept |= dict.fromkeys(weight.theirs, why if weight.role is not Role.MATRIX else f"keep = {pattern!r}")
    if unused:
        raise ModelError(f"quantise.keep has {next(iter(unused))!r}, which no parameter is called; correct the pattern")
    if not quantised:
        raise ModelError("no weight of the model would be quantised, since `keep` matches all maps; shorten it")
    return Choice(tuple(quantised), kept)


def fused(name: str) -> tuple[str, ...]:
    """Names of the weights that an engine lays together with this one, itself among them."""
    stem, leaf, kind = name.rsplit(".", 2)
    return next((tuple(f"{stem}.{one}.{kind}" for one in maps) for maps in _FUSED if leaf in maps), (name,))


def _matches(weight: Weight, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (weight.name, *weight.theirs))


def _check_width(weight: Weight, scheme: Scheme) -> None:
    width = weight.shape[-1]
    if scheme.fits(width):
        return
    remedy = f"keep it as it is (keep = [{weight.name!r}])"
    if scheme.kind == "int":
        divisor = next(size for size in range(scheme.group, 0, -1) if width % size == 0)
        remedy = f"set quantise.group to {divisor}, or -1, or {remedy}"
    raise ModelError(
        f"{weight.theirs[0]} has {width} inputs, which groups of {scheme.group or NV_BLOCK} do not divide, and the "
        f"format has no place for a rest; {remedy}"
    )
