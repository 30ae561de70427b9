"""A data source of your own: anything that gives the same documents every time, in the same order."""

from collections.abc import Iterator
from random import Random

from truestep.data.sources.base import Document


class Sums:
    """`count` sums, written out: 17 + 25 = 42."""

    def __init__(self, count: int = 2000, largest: int = 99, seed: int = 0):
        self.count, self.largest, self.seed = count, largest, seed

    def documents(self) -> Iterator[Document]:
        random = Random(self.seed)
        for number in range(self.count):
            a, b = random.randint(0, self.largest), random.randint(0, self.largest)
            yield Document(text=f"{a} + {b} = {a + b}\n", ids=None, origin=f"sum {number}")
