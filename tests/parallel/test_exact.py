"""Exact reduction: the same bits at every degree and division of the same microbatches, and nothing else passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import tiny
from tests.pool import Pool
from truestep.losses.cross_entropy import CrossEntropy
from truestep.models.build import init_weights
from truestep.models.decoder import Decoder
from truestep.numerics.batch import Batch
from truestep.numerics.digest import state_digest
from truestep.numerics.head import HeadInput
from truestep.numerics.uses import as_use
from truestep.optim.clip import clip_coefficient
from truestep.parallel.exact import Exact, Outcome
from truestep.parallel.exact_bucket import Route
from truestep.parallel.exact_shards import StageBucket, shard_exactly
from truestep.parallel.probe import NormProbe

STEPS = 5
EXTRA = {"attention_bias": True, "hidden_size": 36, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 50}
"""Nothing here divides by the number of ranks: biases, and shards that are padded or of odd length."""


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as pool:
        yield pool


@dataclass
class Setting:
    """One division of the work: mesh (dp_replicate, dp_shard), rows of a microbatch, how FSDP2's gradients are taken."""

    replicate: int = 1
    shard: int = 1
    tied: bool = True
    once_a_step: bool = False
    precision: str = "float32"
    reverse: bool = False


@dataclass
class Trace:
    """What a run of some steps leaves, the same on all ranks if all is well."""

    losses: list[float]
    norms: list[float]
    gradients: list[str]
    weights: str
    exponents: list[int]
    troubles: list[str]
    tries: list[int]


class Run:
    """A model under exact reduction, and its optimizer."""

    def __init__(self, setting: Setting):
        self.setting, self.probe = setting, NormProbe()
        with torch.device("meta"):
            self.model = Decoder(tiny.section(tie_embeddings=setting.tied, **EXTRA))
        if setting.precision == "float64":
            self.model.double()
        names = [name for name, _ in self.model.named_parameters()]
        several = dist.get_world_size() > 1
        self.exact = Exact(
            names, device=torch.device("cpu"), control=dist.group.WORLD if several else None, probe=self.probe
        )
        self.stages: list[StageBucket] = []
        if setting.shard > 1:
            self._shard()
        else:
            self._whole(dist.group.WORLD if several else None)
        init_weights(self.model, seed=3)
        self.sink = self.exact.sink("embed.weight") if setting.tied else None
        self.locals = [plain(p) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW([nn.Parameter(p) for p in self.locals], lr=1e-2, foreach=True)

    def _whole(self, group: dist.ProcessGroup | None) -> None:
        self.model.to_empty(device="cpu")
        route = Route((group,), dist.get_rank() == 0) if group else Route()
        self.exact.watch(dict(self.model.named_parameters()), lambda name: route)

    def _shard(self) -> None:
        sizes = (self.setting.replicate, self.setting.shard)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        hybrid = self.setting.replicate > 1
        small = {p for p in self.model.parameters() if p.ndim < 2}
        fsdp = partial(fully_shard, mesh=mesh if hybrid else mesh["shard"], ignored_params=small)
        for block in self.model.blocks:
            fsdp(block)
        fsdp(self.model, reshard_after_forward=False)
        self.model.to_empty(device="cpu")
        replicas = mesh["replicate"].get_group()
        route = Route((replicas,), replicas.rank() == 0) if hybrid else Route()
        buckets = shard_exactly(self.exact, self.model, lambda name: route, once_a_step=self.setting.once_a_step)
        self.stages = [bucket for bucket in buckets if isinstance(bucket, StageBucket)]
        everywhere = Route((dist.group.WORLD,), dist.get_rank() == 0)
        left = {name: p for name, p in self.model.named_parameters() if p.ndim < 2}
        self.exact.watch(left, lambda name: everywhere)

    def step(self, batch: Batch) -> tuple[Outcome, list[str], str]:
        """Compute until it fits, update; the outcome, what went wrong before it, digest of the gradients."""
        mine = tiny.share(batch, dist.get_rank(), dist.get_world_size(), size=2)
        if self.setting.reverse:
            mine.reverse()
        troubles = []
        while True:
            with self.exact.step():
                sums = [self.microbatch(part, batch.num_targets) for part in mine]
            outcome = self.exact.finish([sums])
            if not outcome.redo:
                break
            troubles.append(outcome.trouble)
        named = dict(self.model.named_parameters())
        digest = state_digest({name: p.grad for name, p in named.items()}) if outcome.norm < torch.inf else ""
        if outcome.norm < torch.inf:
            coefficient = clip_coefficient(torch.tensor(outcome.norm, dtype=torch.float64), 0.5).item()
            for param, mirror in zip(self.model.parameters(), self.optimizer.param_groups[0]["params"]):
                mirror.data, mirror.grad = plain(param), plain(param.grad) * coefficient
            self.optimizer.step()
        for param in self.model.parameters():
            param.grad = None
        return outcome, troubles, digest

    def microbatch(self, batch: Batch, num_targets: int) -> float:
        def head(out: HeadInput) -> torch.Tensor:
            used = replace(out, weight_VD=as_use(out.weight_VD, self.sink)) if self.sink else out
            return CrossEntropy(z_loss=1e-3, chunk_tokens=7)(used, batch).sum

        if self.stages:
            self.model.set_requires_gradient_sync(False)
        total = self.model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, head=head)
        (total / num_targets).backward()
        for stage in self.stages:
            stage.sweep()
        self.probe.next_microbatch()
        return total.item()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def train(rank: int, world: int, setting: Setting, steps: int = STEPS, prepare: Callable[[Run], None] | None = None):
    run = Run(setting)
    if prepare:
        prepare(run)
    results = [run.step(batch) for batch in tiny.rows(steps)]
    return Trace(
        losses=[outcome.sums[0] for outcome, _, _ in results],
        norms=[outcome.norm for outcome, _, _ in results],
        gradients=[digest for _, _, digest in results],
        weights=state_digest(dict(run.model.named_parameters())),
        exponents=run.exact.exponents.tolist(),
        troubles=[trouble for _, troubles, _ in results for trouble in troubles],
        tries=[len(troubles) + 1 for _, troubles, _ in results],
    )


DIVISIONS = {
    "replicate2": Setting(replicate=2),
    "replicate3": Setting(replicate=3),
    "shard2": Setting(shard=2),
    "shard3": Setting(shard=3),
    "shard4": Setting(shard=4),
    "hsdp2x2": Setting(replicate=2, shard=2),
    "other order": Setting(reverse=True),
    "stage2": Setting(shard=2, once_a_step=True),
    "stage2x2": Setting(replicate=2, shard=2, once_a_step=True),
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def one(request, pool) -> tuple[bool, Trace]:
    """One process, as all others are to be."""
    return request.param, pool.run(train, 1, Setting(tied=request.param))[0]


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_bits_know_nothing_of_ranks(pool, one, division):
    tied, expected = one
    setting = replace(DIVISIONS[division], tied=tied)
    world = setting.replicate * setting.shard
    for trace in pool.run(train, world, setting):
        assert trace == expected


def test_a_run_is_what_it_seems(one):
    """The losses fall, every step counts, the first step alone is computed twice."""
    _, trace = one
    assert trace.losses[-1] < trace.losses[0]
    assert len(set(trace.gradients)) == STEPS
    assert all(norm > 0 for norm in trace.norms)
    assert trace.tries == [2, 1, 1, 1, 1] and trace.troubles == ["overflow"]
