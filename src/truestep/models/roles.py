"""Roles of parameters from the modules that hold them, for the decoder and for a user's own module alike."""

from torch import nn

from truestep.models.moe import Experts
from truestep.models.router import Router
from truestep.numerics.low_rank import LowRank
from truestep.numerics.roles import Role

SCORE = "score.weight"
"""Name of a reward model's head, one row."""

_NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def infer_roles(model: nn.Module, vocab_size: int) -> dict[str, Role]:
    """Role of every parameter by its name in `named_parameters()`: a tied weight stands once, under its first name.

    Tables are known by nn.Embedding; the head is a linear map to `vocab_size` outputs whose weight is not a table's;
    normalisations are torch's own or classes called ...Norm; other one-dimensional parameters are offsets."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    roles: dict[str, Role] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                roles[f"{prefix}.{name}" if prefix else name] = _role(module, name, parameter, tables, vocab_size)
    return roles


def _role(module: nn.Module, name: str, parameter: nn.Parameter, tables: set[int], vocab_size: int) -> Role:
    if id(parameter) in tables:
        return Role.EMBEDDING
    if parameter.ndim < 2:
        is_norm = isinstance(module, _NORM_TYPES) or type(module).__name__.lower().endswith("norm")
        return Role.NORM if is_norm and name != "bias" else Role.BIAS
    if isinstance(module, Router):
        return Role.ROUTER
    if isinstance(module, Experts | LowRank):
        return Role.MATRIX
    if isinstance(module, nn.Linear) and parameter.ndim == 2:
        return Role.HEAD if module.out_features == vocab_size else Role.MATRIX
    return Role.OTHER
