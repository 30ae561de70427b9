"""A wrong import path is one sentence that names the path, what is missing, and the remedy."""

import json

import pytest

from truestep.errors import UserError
from truestep.imports import is_import_path, load_object


def test_finds_functions_and_nested_names():
    assert load_object("json:dumps", "loss") is json.dumps
    assert load_object("json:JSONDecoder.decode", "loss") is json.JSONDecoder.decode
    assert is_import_path("a.b:c") and not is_import_path("cross-entropy")


@pytest.mark.parametrize(
    "path, says",
    [
        ("json", 'write "package.module:name"'),
        (":x", 'write "package.module:name"'),
        ("json:", 'write "package.module:name"'),
        ("no_such_package.part:Loss", "there is no module 'no_such_package'"),
        ("json:no_such_name", "has no 'no_such_name'"),
    ],
)
def test_wrong_paths_are_one_sentence(path: str, says: str):
    with pytest.raises(UserError, match="loss") as error:
        load_object(path, "loss")
    assert says in str(error.value) and repr(path) in str(error.value) and "\n" not in str(error.value)


def test_error_inside_the_users_module_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise ValueError('of my own')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="ValueError: of my own"):
        load_object("broken_module:Loss", "loss")
