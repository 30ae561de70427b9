"""HTML pages from templates, each put in place whole."""

from pathlib import Path
from typing import Any

import jinja2

from truestep.files import publish, writing


def page(template: str, **values: Any) -> str:
    """The text of a page; a value that the template asks for and does not get is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("truestep.dashboard", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**values)


def put(out: Path, text: str) -> Path:
    """Write a page to `out`; nothing half-written. StorageError: it cannot be written."""
    with writing(out, "choose another place with --out"):
        publish(out, text.encode("utf-8", "replace"))
    return out
