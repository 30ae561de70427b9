"""The harness catches what it is for: each known bug, put into the real code, must show."""

import re

import pytest

from tests.parallel.compositions import parse
from tests.parallel.harness import check
from tests.parallel.mutations import MUTATIONS
from tests.pool import RankError

LINES = sorted({mutation.line for mutation in MUTATIONS.values()})


def tried(pool, folder, line, mutation=""):
    one = parse(f"{line} documents=True")
    return check(pool, one, folder, steps=2, elsewhere=one.on(), mutation=mutation).faults()


@pytest.mark.parametrize("line", LINES)
def test_the_code_as_it_is_has_no_fault(pool, tmp_path, line):
    assert not tried(pool, tmp_path, line)


@pytest.mark.parametrize("name", MUTATIONS)
def test_caught(pool, tmp_path, name):
    mutation = MUTATIONS[name]
    try:
        faults = tried(pool, tmp_path, mutation.line, name)
    except RankError as error:
        assert mutation.refusal and re.search(mutation.refusal, str(error).splitlines()[-1]), error
        faults = [str(error).splitlines()[-1]]
    print(f"{name}: {'; '.join(faults)}")
    assert faults, f"nothing shows that {name}"
