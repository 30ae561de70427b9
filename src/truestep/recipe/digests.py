"""Three digests of a recipe: *what* it computes, *where* it runs, and what may change the last *bits*."""

import hashlib
import json
from typing import Any

from truestep.recipe.paths import items, join
from truestep.recipe.recipe import Recipe
from truestep.recipe.section import Digest, Section, digest_of

Fields = dict[str, Any]


def what_fields(recipe: Recipe) -> Fields:
    """Path → value (JSON) of the fields that say what is computed: model, data, stages, gates, seed. A resume needs
    them unchanged."""
    return _fields(recipe)["what"]


def where_fields(recipe: Recipe) -> Fields:
    """The same of the fields that say where and how it runs. They may change."""
    return _fields(recipe)["where"]


def bits_fields(recipe: Recipe) -> Fields:
    """The same of the fields that may change the last bits of results. A resume says so when they change."""
    return _fields(recipe)["bits"]


def digest(fields: Fields) -> str:
    """SHA-256 (hex) over the canonical JSON of the fields."""
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON that is the same for equal values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def what(recipe: Recipe) -> str:
    """The fingerprint that checkpoints, models and cards carry."""
    return digest(what_fields(recipe))


def where(recipe: Recipe) -> str:
    """The digest of the *where* fields."""
    return digest(where_fields(recipe))


def bits(recipe: Recipe) -> str:
    """The digest of the *bits* fields."""
    return digest(bits_fields(recipe))


def short(hex_digest: str) -> str:
    """A digest as it is shown: its first 16 figures."""
    return hex_digest[:16]


def changed(old: Fields, new: Fields) -> list[str]:
    """The fields that differ, each as "path: old → new"."""
    paths = [*old, *(path for path in new if path not in old)]
    shown = {path: (_shown(old, path), _shown(new, path)) for path in paths}
    return [f"{path}: {before} → {after}" for path, (before, after) in shown.items() if before != after]


def _shown(fields: Fields, path: str) -> str:
    return json.dumps(fields[path], ensure_ascii=False, sort_keys=True, default=str) if path in fields else "(absent)"


def _fields(recipe: Recipe) -> dict[Digest, Fields]:
    out: dict[Digest, Fields] = {"what": {}, "where": {}, "bits": {}}
    _collect(recipe, "", "where", out)
    return out


def _collect(section: Section, path: str, inherited: Digest, out: dict[Digest, Fields]) -> None:
    for name, value in section:
        kind = digest_of(type(section).model_fields[name]) or inherited
        below = items(value)
        if isinstance(value, list) and below:
            out[kind][join(path, name)] = [str(key) for key, _ in below]  # their order is part of what they are
        if not below:
            out[kind][join(path, name)] = json.loads(canonical(value))
        for key, item in below:
            _collect(item, join(path, name) if key is None else join(join(path, name), key), kind, out)
