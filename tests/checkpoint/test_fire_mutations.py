"""Each safety check is there for a reason: without it, a test fails."""

import pytest

from tests.checkpoint.mutations import MUTATIONS, fails

CHECKS = {mutation.check.__name__: mutation.check for mutation in MUTATIONS.values()}
SAMPLE = [
    "a file is not synced",
    "synced before all is written",
    "the folder of a new name is not synced",
    "create overwrites",
    "no look for fences after a commit",
    "commits are read before the fence is there",
    "blocks are not compared",
    "coverage is not checked",
    "objects are not looked at before the commit",
]


def _caught(tmp_path, name):
    mutation = MUTATIONS[name]
    said = fails(mutation.check, tmp_path / "mutated", mutation)
    print(f"{name}: {mutation.check.__name__}: {said.splitlines()[0][:150] if said else 'nothing'}")
    assert said, f"nothing shows that {name}"


@pytest.mark.parametrize("name", SAMPLE)
def test_caught(tmp_path, name):
    _caught(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in SAMPLE])
def test_the_others_are_caught_too(tmp_path, name):
    _caught(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_code_as_it_is_has_no_fault(tmp_path, check):
    assert not fails(CHECKS[check], tmp_path / "as it is")
