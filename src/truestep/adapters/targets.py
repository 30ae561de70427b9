"""Which weights of a model get adapters: by what they are for, or by patterns of their names."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import get_args

from truestep.errors import UserError
from truestep.numerics.low_rank import Group, Site

GROUPS: tuple[str, ...] = get_args(Group)


def chosen(sites: Sequence[Site], targets: Sequence[str]) -> list[Site]:
    """The sites that some target names: a group, or a pattern (as of file names) of the weight's name, which may be
    that of its module. UserError for a target that names nothing, with what there is."""
    for target in targets:
        if not any(_names(target, site) for site in sites):
            raise UserError(f"lora.targets names {target!r}, {_reason(target, sites)}; the model has {_there(sites)}.")
    return [site for site in sites if any(_names(target, site) for target in targets)]


def _names(target: str, site: Site) -> bool:
    if target in GROUPS:
        return site.group == target
    return fnmatchcase(site.weight, target) or fnmatchcase(site.weight.removesuffix(".weight"), target)


def _reason(target: str, sites: Sequence[Site]) -> str:
    if target == "head" and any(site.group == "embeddings" for site in sites):
        return "but its head is the tied table of the embeddings, or has no vocabulary (write embeddings to adapt both)"
    return "of which it has none" if target in GROUPS else "which matches no weight"


def _there(sites: Sequence[Site]) -> str:
    """Groups, and names with the numbers of blocks left out."""
    groups = [group for group in GROUPS if any(site.group == group for site in sites)]
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", site.weight) for site in sites)
    return f"{', '.join(groups)}, and the weights {', '.join(names)}"
