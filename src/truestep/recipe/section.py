"""The base of recipe sections: unknown fields are errors, help lives with the field, each field has a digest class."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from truestep.recipe.units import read_number

Digest = Literal["what", "where", "bits"]


class Section(BaseModel):
    """Frozen, strict about names. A field belongs to the digest that `field(digest=...)` names, else its section's."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """One reading of numbers everywhere: "1e3" is 1000, `true` is not 1, "0123" is refused (it could be octal)."""
        field_info = cls.model_fields[str(info.field_name)]
        if any(isinstance(m, BeforeValidator) for m in field_info.metadata):
            return value  # a unit type reads its own values
        kinds = [kind for kind, _ in members(field_info.annotation)]
        return read_number(value, whole=float not in kinds) if int in kinds or float in kinds else value


def members(annotation: Any, rules: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a type, None left out, each with what Annotated says about it."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return members(inner, (*rules, *more))
    if get_origin(annotation) in (Union, UnionType):
        return [member for part in get_args(annotation) for member in members(part, rules)]
    return [] if annotation is NoneType else [(annotation, rules)]


def field(default: Any = ..., help: str = "", *, digest: Digest | None = None, **rules: Any) -> Any:
    """A pydantic field with its help text and, where it differs from its section's, the digest it belongs to."""
    extra: Any = {"digest": digest} if digest else None
    if isinstance(default, list | dict):
        return Field(default_factory=default.copy, description=help, json_schema_extra=extra, **rules)
    return Field(default, description=help, json_schema_extra=extra, **rules)


def digest_of(info: FieldInfo) -> Digest | None:
    """The digest class that a field names itself; None means its section's."""
    extra: Any = info.json_schema_extra
    return extra.get("digest") if isinstance(extra, dict) else None
