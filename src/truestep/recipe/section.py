"""The base of every recipe section: unknown fields are errors, help text lives with the field, each field has a digest class."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Digest = Literal["what", "where", "bits"]


class Section(BaseModel):
    """Frozen, strict about names. A subclass sets `default_digest`; a field may override it through `field(digest=...)`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def field(default: Any = ..., help: str = "", *, digest: Digest | None = None, **rules: Any) -> Any:
    """A pydantic field with its help text and, where it differs from its section's, the digest it belongs to."""
    extra = {"digest": digest} if digest else None
    if isinstance(default, list | dict):
        value = default
        return Field(default_factory=lambda: type(value)(value), description=help, json_schema_extra=extra, **rules)
    return Field(default, description=help, json_schema_extra=extra, **rules)
