"""Exact reduction: the same bits at every degree and division of the same microbatches, and nothing else passes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import tiny
from tests.pool import Pool, RankError
from truestep.losses.cross_entropy import CrossEntropy
from truestep.models.build import init_weights
from truestep.models.decoder import Decoder
from truestep.numerics.batch import Batch
from truestep.numerics.digest import state_digest
from truestep.numerics.head import HeadInput
from truestep.numerics.pieces import piece_of, stream_whole
from truestep.numerics.uses import as_use
from truestep.optim.clip import clip_coefficient
from truestep.parallel.exact import TRIES, Exact, Outcome
from truestep.parallel.exact_bucket import Route, Slot
from truestep.parallel.exact_model import reduce_exactly
from truestep.parallel.exact_shards import shard_exactly
from truestep.parallel.probe import GradientProbe
from truestep.recipe.machine import Mesh, Pipeline

STEPS = 5
EXTRA = {"attention_bias": True, "hidden_size": 36, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 50}
"""Nothing here divides by the number of ranks: shards are padded, and some are of odd length."""


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as pool:
        yield pool


@dataclass
class Setting:
    """One division of the same work. `upset`: the step before which a scale is made far too fine. `flip`: the number of
    the collective in which rank 0 is given a wrong bit. `lone`: FSDP2 over replicas alone, as with experts."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    once_a_step: bool = False
    lone: bool = False
    reverse: bool = False
    tied: bool = True
    precision: str = "float32"
    upset: int = -1
    flip: int = -1
    change: Callable[["Run"], None] | None = None

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.pipeline


@dataclass
class Trace:
    """What a run of some steps leaves: the same on all ranks, and at every division."""

    losses: list[float]
    norms: list[float]
    gradients: list[str]
    weights: str
    exponents: list[int]
    troubles: list[list[str]]


class Run:
    """A model under exact reduction, and its optimizer."""

    def __init__(self, setting: Setting):
        self.setting, self.probe = setting, GradientProbe()
        with torch.device("meta"):
            self.model = Decoder(tiny.section(tie_embeddings=setting.tied, **EXTRA))
        if setting.precision == "float64":
            self.model.double()
        self.names = [name for name, _ in self.model.named_parameters()]
        self.world = dist.group.WORLD if dist.get_world_size() > 1 else None
        self.exact = Exact(self.names, device=torch.device("cpu"), control=self.world, probe=self.probe)
        self._place()
        init_weights(self.model, 3, {name: piece_of(p) for name, p in self.named().items()})
        self.sink = self.exact.sink("embed.weight") if setting.tied and setting.pipeline == 1 else None
        self.mirrors = {name: nn.Parameter(local(p)) for name, p in self.named().items()}
        # fused AdamW rounds the last few elements of a tensor otherwise than the rest, so its bits depend on the cut
        self.optimizer = torch.optim.AdamW(self.mirrors.values(), lr=1e-2, foreach=True)
        if setting.change:
            setting.change(self)

    def _place(self) -> None:
        if self.setting.shard > 1 or self.setting.lone:
            return self._shard()
        if self.setting.pipeline > 1:
            return self._cut()
        self.model.to_empty(device="cpu")
        route = Route((self.world,), dist.get_rank() == 0) if self.world else Route()
        self.exact.watch(dict(self.model.named_parameters()), lambda name: route)

    def _shard(self) -> None:
        """FSDP2 (HSDP) as truestep applies it: vectors are left out of it."""
        sizes, hybrid = (self.setting.replicate, self.setting.shard), self.setting.replicate > 1
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        small = {p for p in self.model.parameters() if p.ndim < 2}
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh if hybrid else mesh["shard"], ignored_params=small)
        self.model.to_empty(device="cpu")
        replicas = mesh["replicate"].get_group()
        route = Route((replicas,), replicas.rank() == 0) if hybrid else Route()
        shard_exactly(self.exact, self.model, lambda name: route, once_a_step=self.setting.once_a_step)
        assert self.world is not None
        everywhere = Route((self.world,), dist.get_rank() == 0)
        self.exact.watch({name: p for name, p in self.named().items() if p.ndim < 2}, lambda name: everywhere)

    def _cut(self) -> None:
        """Two stages by hand. A tied table exists on both, and its integers are added up over them."""
        first = dist.get_rank() == 0
        self.model.keep(range(1) if first else range(1, 2), first=first, last=not first)
        self.model.to_empty(device="cpu")
        assert self.world is not None
        tie = Route((self.world,), first)
        route = {"embed.weight": tie} if self.setting.tied else {}
        self.exact.watch(self.named(), lambda name: route.get(name, Route()))

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the whole model."""
        return {name.replace("head_mirror", "embed.weight"): p for name, p in self.model.named_parameters()}

    def owned(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named().items() if p is not getattr(self.model, "head_mirror", None)}

    def step(self, batch: Batch) -> tuple[Outcome, list[str], str]:
        """Compute until it fits, and update. Returns the end, what went wrong before, the digest of the gradients."""
        data_size = self.setting.replicate * self.setting.shard
        mine = tiny.share(batch, dist.get_rank() % data_size, data_size, size=2)
        if self.setting.reverse:
            mine.reverse()
        troubles = []
        while True:
            with self.exact.step():
                sums = [self.microbatch(part, batch.num_targets) for part in mine]
            outcome = self.exact.finish([[value for value in sums if value is not None]])
            if not outcome.redo:
                break
            troubles.append(outcome.trouble)
        if outcome.trouble:
            return outcome, troubles, outcome.trouble
        grads = {name: p.grad for name, p in self.owned().items() if p.grad is not None}
        assert grads.keys() == self.owned().keys()
        digest = state_digest(grads)
        coefficient = clip_coefficient(torch.tensor(outcome.norm, dtype=torch.float64), 0.5).item()
        for name, param in self.named().items():
            mirror = self.mirrors[name]
            mirror.data, mirror.grad = local(param), local(param.grad) * coefficient
            param.grad = None
        self.optimizer.step()
        return outcome, troubles, digest

    def microbatch(self, batch: Batch, num_targets: int) -> float | None:
        """Forward and backward; the loss sum where this rank has it."""

        def head(out: HeadInput) -> torch.Tensor:
            used = replace(out, weight_VD=as_use(out.weight_VD, self.sink)) if self.sink else out
            return CrossEntropy(z_loss=1e-3, chunk_tokens=7)(used, batch).sum

        rest = (batch.positions_BT, batch.documents_BT)
        if self.setting.pipeline > 1:
            return self._through_the_pipeline(batch, head, num_targets)
        if self.setting.once_a_step:
            self.model.set_requires_gradient_sync(False)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.setting.precision == "bfloat16"):
            total = self.model(batch.tokens_BT, *rest, head=head)
        (total / num_targets).backward()
        self.exact.sweep()
        self.probe.next_microbatch()
        return total.item()

    def _through_the_pipeline(self, batch: Batch, head: Any, num_targets: int) -> float | None:
        rest = (batch.positions_BT, batch.documents_BT)
        if dist.get_rank() == 0:
            out_BTD = self.model(batch.tokens_BT, *rest)
            dist.send(out_BTD.detach(), 1)
            grad_BTD = torch.empty_like(out_BTD)
            dist.recv(grad_BTD, 1)
            out_BTD.backward(grad_BTD)
            return None
        x_BTD = torch.empty(*batch.tokens_BT.shape, EXTRA["hidden_size"], requires_grad=True)
        dist.recv(x_BTD.detach(), 0)
        total = self.model(x_BTD, *rest, head=head)
        (total / num_targets).backward()
        assert x_BTD.grad is not None
        dist.send(x_BTD.grad, 0)
        return total.item()

    def upset(self) -> None:
        self.exact.exponents[self.names.index("blocks.0.mlp.down.weight")] += 30

    def save(self) -> dict[str, torch.Tensor]:
        """Weights, moments and scales, whole."""
        state: dict[str, Any] = {name: p.detach() for name, p in self.named().items()}
        for name, p in self.named().items():
            for key, value in self.optimizer.state[self.mirrors[name]].items():
                state[f"{name}.{key}"] = replace(piece_of(p), local=value) if value.ndim else value
        state |= self.exact.state_tensors()
        return {name: whole.clone() for name, whole in stream_whole(state) if whole is not None}

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, p in self.named().items():
            region = piece_of(p).region
            piece_of(p).local.copy_(state[name][region])
            mirror = self.mirrors[name]
            kept = {key: state[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimizer.state[mirror] = {
                key: value[region].clone() if value.ndim else value.clone() for key, value in kept.items()
            }
        self.exact.exponents.copy_(state["exact.exponents"])


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return piece_of(tensor).local


class Flip:
    """Stands before the collectives of exact reductions and damages one of them on rank 0."""

    def __init__(self, at: int):
        self.at, self.count = at, 0
        self.kept = dist.all_to_all_single, dist.all_reduce

    def __enter__(self):
        exchange, add_up = self.kept
        dist.all_to_all_single = lambda out, *args, **kwargs: self._after(exchange(out, *args, **kwargs), out)
        dist.all_reduce = lambda out, *args, **kwargs: self._after(add_up(out, *args, **kwargs), out, kwargs.get("op"))
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.all_reduce = self.kept

    def _after(self, result: Any, out: torch.Tensor, op: Any = None) -> Any:
        if op is None:  # not an agreement between ranks
            if self.count == self.at and dist.get_rank() == 0:
                flat = out.view(-1).view(torch.uint8)
                flat[len(flat) // 2] ^= 4
            self.count += 1
        return result


def train(rank: int, world: int, setting: Setting, steps: int = STEPS) -> Trace:
    run = Run(setting)
    results = []
    with Flip(setting.flip):
        for number, batch in enumerate(tiny.rows(steps)):
            if number == setting.upset:
                run.upset()
            results.append(run.step(batch))
    return trace_of(run, results)


def trace_of(run: Run, results: list[tuple[Outcome, list[str], str]]) -> Trace:
    return Trace(
        losses=[outcome.sums[0] for outcome, _, _ in results],
        norms=[outcome.norm for outcome, _, _ in results],
        gradients=[digest for _, _, digest in results],
        weights=state_digest(run.owned()),
        exponents=run.exact.exponents.tolist(),
        troubles=[troubles for _, troubles, _ in results],
    )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def one(request, pool) -> tuple[bool, Trace]:
    """One process, as all others are to be."""
    return request.param, pool.run(train, 1, Setting(tied=request.param))[0]


DIVISIONS = {
    "replicate2": Setting(replicate=2),
    "replicate3": Setting(replicate=3),
    "shard2": Setting(shard=2),
    "shard3": Setting(shard=3),
    "shard4": Setting(shard=4),
    "hsdp2x2": Setting(replicate=2, shard=2),
    "reverse": Setting(reverse=True),
    "stage2": Setting(shard=2, once_a_step=True),
    "lone2": Setting(replicate=2, lone=True),
    "stage2x2": Setting(replicate=2, shard=2, once_a_step=True),
    "pipeline2": Setting(pipeline=2),
}


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_bits_know_nothing_of_ranks(pool, one, division):
    tied, expected = one
    setting = replace(DIVISIONS[division], tied=tied)
    for trace in pool.run(train, setting.world, setting):
        assert trace == expected


def test_a_run_is_what_it_seems(one):
    """Losses fall, every step counts, the first one alone is computed twice."""
    _, trace = one
    assert trace.losses[-1] < trace.losses[0]
    assert len(set(trace.gradients)) == STEPS
    assert all(0 < norm < torch.inf for norm in trace.norms)
    assert trace.troubles == [["overflow"], [], [], [], []]


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_other_precisions(pool, precision):
    setting = Setting(precision=precision)
    expected = pool.run(train, 1, setting, 2)[0]
    assert pool.run(train, 2, replace(setting, shard=2), 2) == [expected] * 2
    assert pool.run(train, 2, replace(setting, replicate=2), 2) == [expected] * 2


def test_the_gradient_is_that_of_plain_autograd(pool):
    """Up to the rounding of 2^-37 of the largest."""
    exact, plain = pool.run(both_gradients, 1)[0]
    for name, gradient in plain.items():
        assert (exact[name] - gradient).abs().max() <= gradient.abs().max() * 1e-9, name


def both_gradients(rank: int, world: int) -> tuple[dict, dict]:
    run = Run(Setting(precision="float64"))
    batch = tiny.rows()[0]
    for _ in range(2):
        with run.exact.step():
            total = run.microbatch(batch, batch.num_targets)
        outcome = run.exact.finish([[total or 0.0]])
    exact = {name: local(p.grad).clone() for name, p in run.named().items()}
    for p in run.named().values():
        p.grad = None
    run.sink = None
    run.microbatch(batch, batch.num_targets)
    plain = {name: local(p.grad) for name, p in run.named().items()}
    norm = torch.cat([g.flatten() for g in exact.values()]).norm().item()
    assert outcome.norm == pytest.approx(norm, rel=1e-12)
    return exact, plain


def sum_in_floats(run: Run) -> None:
    """The mistake that exact reduction is there to prevent: a sum over ranks before anything is rounded."""
    add = run.exact.scales.add
    run.exact.scales.add = lambda slot, total_N, x_RN: add(slot, total_N, x_RN.sum(0, keepdim=True))


def accumulate_in_floats(run: Run) -> None:
    """The same over microbatches: what is rounded is a sum."""
    sums: dict[str, torch.Tensor] = {}
    begin, add = run.exact.scales.begin, run.exact.scales.add

    def begin_anew(exponents: list[int]) -> None:
        sums.clear()
        begin(exponents)

    def add_sum(slot: Slot, total_N: torch.Tensor, x_RN: torch.Tensor) -> None:
        sums[slot.name] = sums.get(slot.name, 0) + x_RN
        add(slot, total_N.zero_(), sums[slot.name])

    run.exact.scales.begin, run.exact.scales.add = begin_anew, add_sum


def tie_in_floats(run: Run) -> None:
    """Both uses of the tied table summed by autograd."""
    run.sink = None


@pytest.mark.parametrize(
    "setting",
    [Setting(shard=4, change=sum_in_floats), Setting(change=accumulate_in_floats), Setting(change=tie_in_floats)],
    ids=lambda setting: setting.change.__name__,
)
def test_a_sum_in_floating_point_shows(pool, setting):
    expected = pool.run(train, 1, Setting(), 1)[0]
    trace = pool.run(train, setting.world, setting, 1)[0]
    assert trace.losses == expected.losses
    assert trace.gradients != expected.gradients


@pytest.mark.parametrize("division", ["replicate2", "shard2", "hsdp2x2", "stage2", "pipeline2"])
def test_an_overflow_is_computed_again_and_leaves_no_trace(pool, division):
    expected = pool.run(train, 1, Setting(upset=2), 4)[0]
    assert expected.troubles == [["overflow"], [], ["overflow"], []]
    assert expected.gradients[:2] == pool.run(train, 1, Setting(), 2)[0].gradients
    setting = replace(DIVISIONS[division], upset=2)
    assert pool.run(train, setting.world, setting, 4) == [expected] * setting.world


@pytest.mark.parametrize("division", ["replicate2", "shard2", "hsdp2x2", "stage2", "pipeline2"])
@pytest.mark.parametrize("event", [0, 1, 4])
def test_a_damaged_collective_is_seen_and_repeated(pool, division, event):
    """Whichever collective it is, the step is computed again, and its bits are what they would have been."""
    setting = replace(DIVISIONS[division], flip=event)
    expected = pool.run(train, 1, Setting(), 4)[0]
    for trace in pool.run(train, setting.world, setting, 4):
        assert [name for names in trace.troubles for name in names].count("damaged") == 1
        assert replace(trace, troubles=expected.troubles) == expected


def spoil(run: Run) -> None:
    """On the last rank, a gradient that is no number."""
    if dist.get_rank() == dist.get_world_size() - 1:
        run.model.blocks[1].mlp.register_full_backward_hook(lambda module, given, out: (given[0] * torch.nan,))


@pytest.mark.parametrize("division", ["replicate2", "shard2", "hsdp2x2", "pipeline2"])
def test_what_is_not_finite_ends_the_step_everywhere(pool, division):
    setting = replace(DIVISIONS[division], change=spoil)
    for trace in pool.run(train, setting.world, setting, 1):
        assert trace.gradients == ["not finite"] and trace.norms == [torch.inf]
        assert trace.losses == pool.run(train, 1, Setting(), 1)[0].losses
        assert trace.troubles == [[]]


def insist(run: Run) -> None:
    """A scale that never fits."""
    run.exact._set = lambda exponents: run.exact.exponents.fill_(100)


def test_a_step_is_not_repeated_for_ever(pool):
    trace = pool.run(train, 1, Setting(change=insist), 1)[0]
    assert trace.troubles == [["overflow"] * (TRIES - 1)]
    assert trace.gradients == ["overflow"] and trace.norms == [torch.inf]


@pytest.mark.parametrize("before, after", [("one", "shard2"), ("shard3", "hsdp2x2"), ("hsdp2x2", "one")])
def test_resumed_on_another_mesh_from_saved_scales(pool, before, after):
    expected = pool.run(train, 1, Setting())[0]
    settings = {"one": Setting(), **DIVISIONS}
    state = pool.run(save_after, settings[before].world, settings[before], 3)[0]
    for trace in pool.run(resume, settings[after].world, settings[after], state, 3):
        assert trace.losses == expected.losses[3:]
        assert trace.gradients == expected.gradients[3:]
        assert (trace.weights, trace.exponents) == (expected.weights, expected.exponents)
        assert trace.troubles == [[], []]


def save_after(rank: int, world: int, setting: Setting, steps: int) -> dict[str, torch.Tensor]:
    run = Run(setting)
    for batch in tiny.rows(steps):
        run.step(batch)
    return run.save()


def resume(rank: int, world: int, setting: Setting, state: dict[str, torch.Tensor], start: int) -> Trace:
    run = Run(setting)
    run.load(state)
    return trace_of(run, [run.step(batch) for batch in tiny.rows(STEPS)[start:]])


def test_shard_norms_are_noted_for_every_microbatch(pool):
    for division, mine in (("replicate2", 3), ("shard2", 3), ("hsdp2x2", 2), ("stage2", 3)):
        setting = DIVISIONS[division]
        assert all(count == mine and low > 0 for count, low in pool.run(probed, setting.world, setting)), division


def probed(rank: int, world: int, setting: Setting) -> tuple[int, float]:
    run, batch = Run(setting), tiny.rows()[0]
    mine = tiny.share(batch, rank, world, size=2)
    with run.exact.step():
        for part in mine:
            run.microbatch(part, batch.num_targets)
    norms = run.probe.take()
    return len(norms), max(norms)


def skip_a_block(rank: int, world: int) -> None:
    run, batch = Run(Setting(shard=2)), tiny.rows()[0]
    with run.exact.step():
        run.model.blocks[0].attention.forward = lambda x_BTD, given: x_BTD
        run.microbatch(batch, batch.num_targets)


def leave_the_step(rank: int, world: int) -> None:
    run, batch = Run(Setting(shard=2)), tiny.rows()[0]
    run.microbatch(batch, batch.num_targets)


@pytest.mark.parametrize(
    "task, words", [(skip_a_block, "gradients of only some of blocks.0"), (leave_the_step, "step")]
)
def test_what_would_pass_the_reduction_by_is_refused(pool, task, words):
    with pytest.raises(RankError, match=words):
        pool.run(task, 2)


MESHES = {
    "tp": ({"tp": 2}, [{"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}, {"tp": 2, "pp": 2}]),
    "cp": ({"cp": 2}, [{"cp": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2}]),
    "pp": ({}, [{"pp": 2}, {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}, {"pp": 3}]),
}


@pytest.mark.parametrize("axis", MESHES)
def test_data_axes_and_pipelines_change_no_bit_beside_others(pool, axis):
    """Tensor and context parallelism have bits of their own; what is partial over them is completed in integers."""
    alone, wider = MESHES[axis]
    expected = pool.run(on_a_mesh, math.prod(alone.values()), alone)[0]
    assert expected[1] > 0
    for mesh in wider:
        world = math.prod(mesh.values())
        assert pool.run(on_a_mesh, world, mesh) == [expected] * world, mesh


SCHEDULES = ["gpipe", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shard", [1, 2])
def test_schedules_change_no_bit(pool, schedule, shard):
    expected = pool.run(on_a_mesh, 1, {})[0]
    mesh = {"pp": 2, "dp_shard": shard}
    assert pool.run(on_a_mesh, 2 * shard, mesh, schedule) == [expected] * 2 * shard


def on_a_mesh(rank: int, world: int, mesh: dict[str, int], schedule: str = "1f1b") -> tuple[str, float, list[float]]:
    """A model as truestep makes it parallel; digest of its gradients, norm, loss."""
    with torch.device("meta"):
        model = Decoder(tiny.section(tie_embeddings=True, num_layers=4))
    names = [name for name, _ in model.named_parameters()]
    job = tiny.job(rank, world)
    sizes = {"dp_replicate": 1, "dp_shard": 1} | mesh
    training = tiny.state(job, mesh=Mesh(**sizes), model=model, pipeline=Pipeline(schedule=schedule))
    parallel = training.parallel
    exact = reduce_exactly(parallel, names, job.control, tied="embed.weight", once_a_step="pp" in mesh)
    sink = exact.sink("embed.weight") if "pp" not in mesh else None

    def loss_of(batch: Batch) -> Any:
        def head(out: HeadInput) -> tuple[torch.Tensor, dict]:
            used = replace(out, weight_VD=as_use(out.weight_VD, sink)) if sink else out
            return training.loss(used, batch).sum, {}

        return head

    if parallel.pipeline is not None:
        parallel.after_backward = exact.sweep
    whole = tiny.rows()[0]
    mine = tiny.share(whole, parallel.groups.data_rank, parallel.groups.data_size, size=2)
    mine = [parallel.own_part(batch) for batch in mine]
    runs = [mine] if parallel.pipeline else [[batch] for batch in mine]
    while True:
        sums = []
        with exact.step():
            for batches in runs:
                totals, _ = parallel.run(batches, loss_of, 1 / whole.num_targets, lambda _: None)
                sums += [total.item() for total in totals]
                exact.sweep()
        outcome = exact.finish([sums])
        if not outcome.redo:
            break
    return state_digest(parallel.gradients()), outcome.norm, outcome.sums
