"""Each axis by itself and the usual compositions, against one process; and the harness, which must be able to fail."""

import math

import pytest
import torch

from tests.parallel import oracle
from tests.parallel.compositions import parse
from tests.parallel.harness import Found, check, compare, errors, ranks_train, same_bits

ROWS = "rows=7 size=2 documents=True bias=all"
CASES = {
    "one process": "",
    "FSDP": "dp_shard=4",
    "DDP": "dp_replicate=3 tie=True",
    "HSDP": "dp_replicate=2 dp_shard=2 tie=True",
    "tensor": "tp=2 tie=True vocab=37 inner=22 z_loss=True softcap=True",
    "more tensor ranks than key heads": "tp=4 kv_heads=1 qk_norm=full",
    "FSDP x tensor": "dp_shard=2 tp=2 qk_norm=head placement=sandwich offset=True",
    "pipeline": "pp=2 tie=True window=5",
    "DP x TP x PP": "dp_shard=2 tp=2 pp=2 tie=True z_loss=True",
    "context": "cp=2 window=5",
    "DP x CP x TP": "dp_shard=2 cp=2 tp=2 qk_norm=full tie=True",
    "experts": "dp_shard=2 ep=2 moe=mixtral",
    "DP x EP x TP": "dp_shard=2 ep=4 tp=2 moe=deepseek mla=queries",
    "HSDP x PP x EP": "dp_replicate=2 dp_shard=2 pp=2 ep=2 moe=qwen3 tie=True",
}


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(pool, tmp_path, name, precision):
    one = parse(f"{CASES[name]} {ROWS} precision={precision}")
    report = check(pool, one, tmp_path, steps=10, elsewhere=one.on(dp_shard=3))
    assert not report.faults(), f"{one.line()!r}: {'; '.join(report.faults())}"


def test_a_wrong_number_is_found(pool):
    """The harness itself: one gradient element, a factor, a missing name, a loss, a norm, a weight, and no number."""
    one = parse("dp_shard=2")
    wanted = list(oracle.train(one, 2))
    found = pool.run(ranks_train, 2, one, [0, 0], "", "")[0]
    assert not compare(one, found, wanted).faults()

    def changed(**fields) -> list[str]:
        return compare(one, Found(**{**vars(found), **fields}), wanted).faults()

    name = "blocks.0.mlp.up.weight"
    off = found.gradients[name].clone()
    off[3, 2] += 2e-10 * off.abs().max()
    assert (
        "first step: blocks.0.mlp.up.weight is off by 2 times" in changed(gradients={**found.gradients, name: off})[0]
    )
    assert changed(gradients={n: g * 2 for n, g in found.gradients.items()})
    assert changed(gradients={n: g for n, g in found.gradients.items() if n != name})
    assert changed(gradients={**found.gradients, name: torch.full_like(off, math.nan)})
    assert changed(losses=[found.losses[0] * (1 + 1e-9), found.losses[1]])
    assert changed(nlls=[found.nlls[0], math.nan])
    assert changed(norms=[found.norms[0] * 2, found.norms[1]])
    assert changed(weights={n: w + 1e-7 for n, w in found.weights.items()})


def test_errors_are_relative_to_the_tensors_largest_element():
    a, b = {"x": torch.tensor([1.0, 100.0])}, {"x": torch.tensor([1.5, 100.0])}
    assert errors(a, b) == {"x": 0.005}
    assert errors({"x": torch.zeros(2)}, {"x": torch.zeros(2)}) == {"x": 0.0}
    assert errors({"x": torch.ones(2)}, {"x": torch.ones(3)}) == {"x (another shape, or missing)": math.inf}


def test_same_bits_tells_minus_zero_from_zero():
    assert same_bits({"x": torch.zeros(2)}, {"x": torch.zeros(2)})
    assert not same_bits({"x": torch.zeros(2)}, {"x": -torch.zeros(2)})
    assert not same_bits({"x": torch.zeros(2)}, {"x": torch.zeros(2).double()})
