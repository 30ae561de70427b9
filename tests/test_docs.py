"""README, guide and notebook: recipes load, commands exist, tables are up to date, links and names resolve."""

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import typer
from typer.main import get_command

import truestep
from truestep.cli.register import verbs
from truestep.recipe.load import load

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "LOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
FENCE = re.compile(r"^```(\w[\w ]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(language: str) -> list:
    """All fenced blocks of a language, as parameters named by page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[2], id=f"{named(page)}:{line}"))
    return found


def commands() -> list:
    """Every command line that calls truestep: lines of `sh` blocks, and those of `console` blocks after the prompt."""
    lines = [(block.id, line) for block in blocks("sh") for line in block.values[0].splitlines()]
    for block in blocks("console"):
        lines += [(block.id, line[2:]) for line in block.values[0].splitlines() if line.startswith("$ ")]
    found = []
    for where, line in lines:
        words = shlex.split(line, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        if "truestep" in words:
            found.append(pytest.param(words[words.index("truestep") + 1 :], id=f"{where} {line[:60]}"))
    return found


@pytest.fixture(scope="module")
def command_line():
    app = typer.Typer()
    verbs(app)
    return get_command(app)


def parsed(command, words: list[str]) -> Iterator:
    """The contexts of a command line from the outermost verb inwards, parsed and not run."""
    context = command.make_context("truestep", list(words))
    yield context
    while hasattr(context.command, "resolve_command"):
        name, inner, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = inner.make_context(name, rest, parent=context)
        yield context


@pytest.mark.parametrize("words", commands())
def test_commands_use_verbs_and_options_that_exist(command_line, words):
    *_, context = parsed(command_line, words)
    given = context.params
    recipe = given.get("recipe")
    if recipe and (ROOT / recipe).exists():
        load(ROOT / recipe, given.get("set") or given.get("overrides") or [])


@pytest.mark.parametrize("words", [["ruin", "a.toml"], ["run", "a.toml", "--sett", "b=1"], ["data", "bild", "a.toml"]])
def test_a_wrong_command_would_be_found(command_line, words):
    with pytest.raises(Exception, match=r"No such (command|option)"):
        list(parsed(command_line, words))


@pytest.mark.parametrize("text", blocks("toml"))
def test_recipes_in_pages_are_sound(text):
    load(text)


@pytest.mark.parametrize("text", blocks("toml fragment"))
def test_fragments_have_fields_that_exist(text):
    """A fragment completes a whole recipe: whatever it says must be a field."""
    with pytest.raises(Exception) as caught:
        load(text)
    assert "is not a field" not in str(caught.value) and "is not TOML" not in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=named)
def test_recipes_of_the_folder_are_sound(path):
    load(path)


def test_the_recipe_in_the_readme_is_the_file():
    assert (ROOT / "recipes" / "first.toml").read_text() in [block.values[0] for block in blocks("toml")]


def test_code_that_names_a_file_is_that_file():
    pattern = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    found = [(path, code) for page in PAGES for path, code in pattern.findall(page.read_text())]
    assert found
    for path, code in found:
        assert code == (ROOT / path).read_text(), path


@pytest.mark.parametrize("code", blocks("python"))
def test_code_in_pages_compiles_and_imports_what_exists(code):
    check_code(code)


def check_code(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("truestep"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "truestep":
            assert node.attr in truestep.__all__, ast.unparse(node)


def test_tables_of_fields_are_up_to_date():
    spec = importlib.util.spec_from_file_location("fields", ROOT / "docs" / "fields.py")
    assert spec and spec.loader
    fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    text = fields.PAGE.read_text()
    assert fields.page_with(text, fields.tables()) == text, "run python docs/fields.py"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_named_files_resolve(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target
    for name in re.findall(r"`((?:tests|recipes|examples|benchmarks|src|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def code_cells() -> list[str]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_compiles_and_names_what_exists():
    for code in code_cells():
        check_code(code)


def test_the_recipe_of_the_notebook_is_sound():
    names: dict = {}
    exec(code_cells()[0], names)
    load(names["recipe"])
    names["folder"].rmdir()


@pytest.mark.slow
def test_the_notebook_runs():
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    said = "".join(str(out) for cell in notebook.cells for out in cell.get("outputs", []))
    assert "finished" in said and "iframe" in said
