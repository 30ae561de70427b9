"""A small part of the matrix of silent corruption; benchmarks/sdc.py has all of it."""

import pytest

from tests.pool import Pool
from tests.train import sdc, sdc_matrix


@pytest.fixture(scope="module")
def pool():
    with Pool(3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("name", "count"), [("exact fsdp 3", 12), ("ddp 3", 12), pytest.param("fsdp 3", 120, marks=pytest.mark.slow)]
)
def test_effective_flips_are_found_and_nobody_is_named_wrongly(pool, name, count):
    flips = sdc_matrix.plan(count, 3, seed=7)
    found = pool.run(sdc_matrix.outcomes, 3, sdc.SETTINGS[name], flips, sdc.ALL, 3, timeout_s=600)
    assert found[0] == found[1] == found[2]
    real = [one for one in found[0] if one.effective]
    assert len(real) > count / 2
    missed = [one.flip for one in real if one.after is None]
    assert not [flip for flip in missed if flip.site != "collective"], sdc_matrix.table(found[0])
    assert not [one for one in found[0] if one.wrongly_named], sdc_matrix.table(found[0])
    assert all(one.located and one.after == 0 for one in real if one.after is not None), sdc_matrix.table(found[0])


@pytest.mark.parametrize("name", ["ddp 3", "exact fsdp 3"])
def test_clean_steps_have_no_alarm(pool, name):
    assert pool.run(sdc_matrix.clean, 3, sdc.SETTINGS[name], sdc.ALL, 3, 3) == [0, 0, 0]
