"""What a weight in few bits is, and how the compressed-tensors layout says so in `config.json`."""

from dataclasses import dataclass
from typing import Any, Literal

from truestep.errors import ModelError

Inputs = Literal["high", "token", "tensor", "blocks"]
METHOD = "compressed-tensors"
FORMATS = {"int": "pack-quantized", "fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}
NV_BLOCK = 16

_IGNORED = {"observer", "observer_kwargs", "actorder", "block_structure", "scale_dtype", "zp_dtype"}
"""Keys of the layout that tell how scales were found, or repeat what the kind says."""
_FLOAT8 = "torch.float8_e4m3fn"


@dataclass(frozen=True)
class Scheme:
    """Codes of `bits` (int: with a zero point unless `symmetric`; fp8: e4m3; nvfp4: e2m1), a scale for each `group`
    neighbours of a row (0: for the whole row). `inputs` of the product: high (as they come), cast by a scale of each
    token, by one fixed scale, or as nvfp4 with a fixed outer scale."""

    kind: Literal["int", "fp8", "nvfp4"]
    bits: int
    group: int = 0
    symmetric: bool = True
    inputs: Inputs = "high"
    act_order: bool = False

    @property
    def layout(self) -> str:
        """The layout's name of how codes lie in files."""
        return FORMATS[self.kind]

    @property
    def lowest(self) -> int:
        """The least integer code; the largest is -lowest - 1."""
        return -(1 << (self.bits - 1))

    def fits(self, inputs: int) -> bool:
        """Whether groups divide rows of so many inputs, as the layout wants it."""
        return not self.group or inputs % self.group == 0


def to_config(scheme: Scheme, kept: list[str]) -> dict[str, Any]:
    """`quantization_config`. `kept`: modules that are linear maps but stay as they are."""
    group = {"targets": ["Linear"], "weights": _weights(scheme), "input_activations": _inputs(scheme)}
    group |= {"output_activations": None, "format": scheme.layout}
    return {
        "quant_method": METHOD,
        "format": scheme.layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": kept,
        "config_groups": {"group_0": group},
    }


def from_config(config: dict[str, Any], where: str) -> Scheme:
    """The scheme of a `quantization_config`; ModelError for one that we would not obey."""

    def refuse(what: str, value: Any) -> ModelError:
        return ModelError(
            f"{where} has {what} = {value!r} in quantization_config, which is not supported; take the model as it was "
            f"before it was quantised."
        )

    if config.get("quant_method") != METHOD:
        raise refuse("quant_method", config.get("quant_method"))
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise refuse("config_groups", config.get("config_groups"))
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            raise refuse(key, config[key])
    given = groups[0].get("weights") or {}
    scheme = _scheme(given, groups[0].get("input_activations"))
    if scheme is None or config.get("format") != scheme.layout or groups[0].get("output_activations"):
        raise refuse("config_groups.weights", given)
    return scheme


def _scheme(weights: dict[str, Any], inputs: dict[str, Any] | None) -> Scheme | None:
    """The scheme that would be written just so, if there is one."""
    cast: Inputs = "high"
    if inputs is not None:
        cast = "token" if inputs.get("dynamic") is True else "blocks" if inputs.get("dynamic") == "local" else "tensor"
    bits, group = weights.get("num_bits", 8), weights.get("group_size") or 0
    kind = "int" if weights.get("type") == "int" else "fp8" if bits == 8 else "nvfp4"
    ordered = weights.get("actorder") in ("weight", "static")
    found = Scheme(kind, bits, max(group, 0), bool(weights.get("symmetric", True)), cast, ordered)
    return found if _same(_weights(found), weights) and _same(_inputs(found), inputs) else None


def _same(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> bool:
    def plain(args: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in args.items() if key not in _IGNORED and value is not None}

    return plain(ours or {}) == plain(theirs or {})


def _weights(scheme: Scheme) -> dict[str, Any]:
    args = _args(scheme.bits, scheme.kind != "int", "group" if scheme.group else "channel", False)
    args |= {"symmetric": scheme.symmetric, "group_size": scheme.group or None}
    if scheme.kind == "nvfp4":
        args |= {"strategy": "tensor_group", "scale_dtype": _FLOAT8, "zp_dtype": _FLOAT8}
    return args | ({"actorder": "weight"} if scheme.act_order else {})


def _inputs(scheme: Scheme) -> dict[str, Any] | None:
    match scheme.inputs:
        case "high":
            return None
        case "token":
            return _args(8, True, "token", True)
        case "tensor":
            return _args(8, True, "tensor", False)
        case "blocks":
            args = _args(4, True, "tensor_group", "local") | {"group_size": NV_BLOCK}
            return args | {"scale_dtype": _FLOAT8, "zp_dtype": _FLOAT8}


def _args(bits: int, floats: bool, strategy: str, dynamic: bool | str) -> dict[str, Any]:
    kind = "float" if floats else "int"
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic}
