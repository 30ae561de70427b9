"""Types in words, for the comments of a resolved recipe and for messages."""

from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from truestep.recipe.section import Section, members
from truestep.recipe.units import Unit

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def type_words(annotation: Any, rules: tuple[Any, ...] = ()) -> str:
    """For example: whole number > 0, or "auto"."""
    return " or ".join(_one(kind, own) for kind, own in members(annotation, rules))


def field_words(info: FieldInfo) -> str:
    """The type of a field and its rules."""
    return type_words(info.annotation, tuple(info.metadata))


def _one(kind: Any, rules: tuple[Any, ...]) -> str:
    return _name(kind, rules) + "".join(f" {bound}" for bound in map(_bound, rules) if bound)


def _name(kind: Any, rules: tuple[Any, ...]) -> str:
    unit = next((rule for rule in rules if isinstance(rule, Unit)), None)
    origin, args = get_origin(kind), get_args(kind)
    if unit is not None:
        return f"{unit.name} such as {unit.example}"
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in args)
    if origin is tuple:
        return f"list of {len(args)} x {type_words(args[0])}"
    if origin is list:
        section = isinstance(args[0], type) and issubclass(args[0], Section)
        return "list of tables" if section else f"list of {type_words(args[0])}"
    return _WORDS.get(kind, "table")


def _bound(rule: Any) -> str:
    match rule:
        case Gt(gt=bound):
            return f"> {bound}"
        case Ge(ge=bound):
            return f">= {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
        case Le(le=bound):
            return f"<= {bound}"
        case MinLen():
            return "(not empty)"
        case _:
            return ""
