"""Chat data with known answers, made from the standard library of the Python that runs it: questions about functions,
sums, words to turn around. recipes/assistant.toml and recipes/lora.toml train on it; a template for data of your own.

Nothing is stored: the answers are read from the library's source text when the data is built (its licence is PSF-2.0).

    python recipes/assistant_data.py Pairs     shows some rows
"""

import ast
import hashlib
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from truestep.data.sources.base import Document

SYSTEM = "You answer questions about Python."
HELD_OUT = 16
"""One subject in so many is never trained on."""
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
Part = Literal["train", "heldout"]


@dataclass(frozen=True)
class Function:
    """A documented function or class of the library. `arguments` is None for classes."""

    module: str
    name: str
    summary: str
    arguments: str | None


@dataclass(frozen=True)
class Exchange:
    """A question and its answer. `wrong` is an answer that is known to be worse. What is held out is the `subject`."""

    subject: str
    question: str
    answer: str
    wrong: str


class Conversations:
    """`count` conversations of one to three exchanges, as rows of the format "messages"."""

    def __init__(self, count: int = 2000, part: Part = "train", seed: int = 0):
        self.count, self.part, self.seed = count, part, seed

    def documents(self) -> Iterator[Document]:
        random = Random(f"{self.seed} {self.part}")
        for number, exchanges in enumerate(_conversations(random, self.part, self.count)):
            messages = [{"role": "system", "content": SYSTEM}] if random.random() < 0.3 else []
            for exchange in exchanges:
                messages += _messages(exchange.question, exchange.answer)
            yield _document(number, {"messages": messages})


class Pairs:
    """`count` questions, after up to two exchanges, with the right answer and a wrong one: rows of the format
    "preference"."""

    def __init__(self, count: int = 1000, part: Part = "train", seed: int = 1):
        self.count, self.part, self.seed = count, part, seed

    def documents(self) -> Iterator[Document]:
        random = Random(f"{self.seed} {self.part}")
        for number, (*before, last) in enumerate(_conversations(random, self.part, self.count)):
            messages = [message for one in before for message in _messages(one.question, one.answer)]
            question, chosen = _messages(last.question, last.answer)
            rejected = _messages(last.question, last.wrong)[1]
            yield _document(number, {"prompt": [*messages, question], "chosen": [chosen], "rejected": [rejected]})


def _document(number: int, row: dict[str, Any]) -> Document:
    return Document(text=None, ids=None, origin=f"row {number}", row=row)


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _conversations(random: Random, part: Part, count: int) -> Iterator[list[Exchange]]:
    for _ in range(count):
        yield [exchange(random, part) for _ in range(random.choice((1, 1, 1, 2, 3)))]


def exchange(random: Random, part: Part) -> Exchange:
    """A question of any kind whose subject belongs to the part."""
    while True:
        kind = random.choice((purpose, purpose, signature, home, total, total, turned))
        made = kind(random)
        if made is not None and part_of(made.subject) == part and made.wrong != made.answer:
            return made


def part_of(subject: str) -> Part:
    """By a hash, so that a subject is on the same side in every data set."""
    return "heldout" if hashlib.sha256(subject.encode()).digest()[0] % HELD_OUT == 0 else "train"


def purpose(random: Random) -> Exchange:
    """What a function is for; wrong is what another one is for, or a sentence that breaks off."""
    one, other = random.sample(functions(), 2)
    name = f"{one.module}.{one.name}"
    question = random.choice((f"What does {name} do?", f"Explain {name} in one sentence.", f"What is {name} for?"))
    words = one.summary.split()
    wrong = random.choice((other.summary, " ".join(words[: len(words) // 2])))
    return Exchange(name, question, one.summary, wrong)


def signature(random: Random) -> Exchange | None:
    """How a function is called; wrong lacks an argument."""
    one = random.choice(functions())
    if one.arguments is None or not 4 <= len(one.arguments) <= 60:
        return None
    name, arguments = f"{one.module}.{one.name}", one.arguments.split(", ")
    fewer = arguments.copy()
    fewer.pop(random.randrange(len(fewer)))
    answer, wrong = (f"{name}({', '.join(some)})" for some in (arguments, fewer))
    return Exchange(name, f"Write the signature of {name}.", answer, wrong)


def home(random: Random) -> Exchange | None:
    """The module of a name; wrong is another module."""
    one, other = random.sample(functions(), 2)
    if len(homes()[one.name]) > 1:
        return None
    answer, wrong = (f"{one.name} is in the module {f.module}." for f in (one, other))
    return Exchange(f"{one.module}.{one.name}", f"Which module has {one.name}?", answer, wrong)


def total(random: Random) -> Exchange:
    """A sum of small numbers; wrong is close to it."""
    a, b = random.randint(0, 20), random.randint(0, 20)
    off = random.choice((-2, -1, 1, 2, 10))
    return Exchange(f"{a} + {b}", f"What is {a} + {b}?", f"{a} + {b} = {a + b}", f"{a} + {b} = {abs(a + b + off)}")


def turned(random: Random) -> Exchange:
    """A word from its end to its beginning; wrong has two letters swapped."""
    word = random.choice(words())
    letters = list(reversed(word))
    place = random.randrange(len(letters) - 1)
    letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return Exchange(word, f"Spell {word} backwards.", word[::-1], "".join(letters))


@cache
def functions() -> list[Function]:
    """Public documented functions and classes, in the order of their modules' names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
        if parts and not _SKIPPED & set(parts) and not any(part.startswith("_") or "-" in part for part in parts):
            found += _functions(path, ".".join(parts))
    return found


def _functions(path: Path, module: str) -> Iterator[Function]:
    with tokenize.open(path) as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            summary = _first_sentence(ast.get_docstring(node) or "")
            if 15 <= len(summary) <= 160:
                arguments = None if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
                yield Function(module, node.name, summary, arguments)


def _first_sentence(docstring: str) -> str:
    words = docstring.split("\n\n")[0].split()
    ends = [place for place, word in enumerate(words) if word.endswith(".")]
    return " ".join(words[: ends[0] + 1] if ends else words)


@cache
def homes() -> dict[str, set[str]]:
    """The modules that have a name."""
    found: dict[str, set[str]] = {}
    for one in functions():
        found.setdefault(one.name, set()).add(one.module)
    return found


@cache
def words() -> list[str]:
    """Short words of lower-case letters that names are made of."""
    found = {word for one in functions() for word in one.name.split("_")}
    return sorted(word for word in found if word.isalpha() and word.islower() and 3 <= len(word) <= 6)


def main() -> None:
    kinds = {kind.__name__: kind for kind in (Conversations, Pairs)}
    for document in islice(kinds[sys.argv[1]]().documents(), 5):
        print(json.dumps(document.row, ensure_ascii=False))


if __name__ == "__main__":
    main()
