"""Objects of the user's own package, found by import path "package.module:name". Torch-free by itself."""

import importlib
from pathlib import Path
from typing import Any

from truestep.errors import UserError


def is_import_path(text: str) -> bool:
    """A kind with a colon names an object of the user's own; anything else is a name in one of our registries."""
    return ":" in text


def source_code(path: str) -> bytes:
    """The file of the module at "package.module:name", which changes when the code does; empty where there is none."""
    file = importlib.import_module(path.partition(":")[0]).__file__
    return Path(file).read_bytes() if file else b""


def load_object(path: str, kind: str) -> Any:
    """The object at "package.module:name" (dots after the colon go into attributes). `kind` says what it should be
    ("loss", "optimizer", ...) in the sentence of the UserError that a wrong path raises. An exception raised by the
    user's module itself while it is imported is passed on in that sentence, and as the cause."""
    module_name, _, names = path.partition(":")
    if not module_name or not names:
        raise UserError(f'{kind} {path!r} is not an import path; write "package.module:name".')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{kind} {path!r} cannot be imported: there is no module {error.name!r}; "
            f"install its package, or put its folder on PYTHONPATH."
        ) from error
    except Exception as error:
        raise UserError(
            f"{kind} {path!r} cannot be imported: module {module_name!r} raised {type(error).__name__}: {error}; "
            f"repair the module so that `import {module_name}` works."
        ) from error
    found: Any = module
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = ", ".join(sorted(n for n in dir(found) if not n.startswith("_"))[:8]) or "nothing public"
            raise UserError(
                f"{kind} {path!r} cannot be imported: {module_name!r} has no {names!r} (it has {known}); "
                f"correct the name after the colon."
            ) from None
    return found
