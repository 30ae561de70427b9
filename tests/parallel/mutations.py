"""Known bugs of composed parallelism, each as one change to the real code, made on the ranks while a test runs.

They are what trackers of other stacks report (Megatron-LM 7452, 844, 1446; torchtitan 2972, 4544; pytorch 149768). A
mutation whose symbol is gone fails with an AttributeError: find where that work is done now.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE


@dataclass(frozen=True)
class Mutation:
    """`target` is the "module:name" that `change` gets and gives another one for. `line`: a composition on which it
    must show. `refusal`: what the code may say (a pattern) if it finds the fault by itself."""

    line: str
    target: str
    change: Callable[[Any], Any]
    refusal: str = ""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code changed by the mutation of this name; as it is, without one."""
    if not name:
        yield
        return
    mutation = MUTATIONS[name]
    module, _, path = mutation.target.partition(":")
    *holders, last = path.split(".")
    holder = functools.reduce(getattr, holders, importlib.import_module(module))
    original = getattr(holder, last)
    setattr(holder, last, mutation.change(original))
    try:
        yield
    finally:
        setattr(holder, last, original)


def _no_sum(_: Any) -> Any:
    """Gradients that are partial over tp stay so, and copies drift apart (C32)."""
    return lambda grads: None


def _keys_not_summed(places: Any) -> Any:
    """Key and value projections that every tensor rank holds whole are taken to be finished after backward."""

    def finished(*args: Any) -> Any:
        found = places(*args)
        keys = [name for name in found if ".attention.k." in name or ".attention.v." in name]
        return found | {name: replace(found[name], missing=Axis("none")) for name in keys}

    return finished


def _everybody_owns(norm: Any) -> Any:
    """Every rank's copy of a tensor counts in the global norm (C33)."""
    return lambda grads, *rest: norm([replace(grad, owned=True) for grad in grads], *rest)


def _mean_over_ranks(divide: Any) -> Any:
    """FSDP2 takes the mean over its ranks, as it does by default."""
    return lambda module, factor: divide(module, factor * dist.get_world_size())


def _padded_vocabulary(softmax: Any) -> Any:
    """Two rows of padding, with logits 0, take part in the softmax of the last tensor rank (C30)."""

    def padded(self: Any, logits_CV: torch.Tensor, labels_C1: torch.Tensor) -> Any:
        vocab, rows = self.options.vocab, logits_CV.shape[1]
        more = 2 if vocab.rank == vocab.size - 1 else 0
        nll_C1, log_z_C1, logp_CV, hit = softmax(self, pad(logits_CV, (0, more)), labels_C1)
        return nll_C1, log_z_C1, logp_CV[:, :rows].contiguous(), hit

    return padded


def _bias_of_every_rank(forward: Any) -> Any:
    """The bias of a product that is summed over tensor ranks is added before the sum, once a rank."""

    def biased(self: Any, x: torch.Tensor) -> torch.Tensor:
        after = self.after
        if after is None or self.bias is None:
            return forward(self, x)
        self.after = lambda y: after(y + self.bias) - self.bias
        try:
            return forward(self, x)
        finally:
            self.after = after

    return biased


def _tie_twice(bring: Any) -> Any:
    """The head's part of a tied table's gradient is added twice (C29)."""

    def twice(self: Any) -> None:
        bring(self)
        bring(self)

    return twice


def _tie_never(_: Any) -> Any:
    """The head's part of a tied table's gradient is never added, or the copy is never made equal again (C29)."""
    return lambda self: None


def _divided_by_microbatches(run: Any) -> Any:
    """Gradients of a pipeline are divided by the number of microbatches, as torch's schedules do by default (C15)."""
    return lambda self, batches, heads, factor, *more: run(self, batches, heads, factor / len(batches), *more)


def _mean_of_means(run: Any) -> Any:
    """Each microbatch counts as much as any other, however many targets it has."""

    def averaged(self: Any, batches: Any, heads: Any, *more: Any) -> Any:
        counts = [batch.num_targets for batch in batches]
        each = sum(counts) / sum(count > 0 for count in counts)

        def weighed(head: Any, count: int) -> Any:
            def scaled(out: Any) -> Any:
                loss_sum, metrics = head(out)
                return loss_sum * (each / max(count, 1)), metrics

            return scaled

        return run(self, batches, [weighed(*pair) for pair in zip(heads, counts)], *more)

    return averaged


def _names_of_the_part(tensors: Any) -> Any:
    """Layers are saved under their number within the rank's part of the pipeline."""

    def local(self: Any) -> Any:
        found = tensors(self)
        numbers = sorted({int(number) for name in found for number in re.findall(r"blocks\.(\d+)\.", name)})
        first = numbers[0] if numbers else 0
        return {re.sub(r"(?<=blocks\.)\d+", lambda m: str(int(m[0]) - first), name): x for name, x in found.items()}

    return local


def _cut_then_shifted(part: Any) -> Any:
    """Labels are made from the tokens of a rank's part, whose last one so has no label (C35)."""

    def shifted(self: Any, columns: Any) -> Any:
        found = part(self, columns)
        labels_BT = torch.full_like(found.labels_BT, IGNORE)
        labels_BT[:, :-1] = torch.where(found.labels_BT[:, :-1] == IGNORE, IGNORE, found.tokens_BT[:, 1:])
        return replace(found, labels_BT=labels_BT)

    return shifted


def _positions_of_the_part(part: Any) -> Any:
    """Positions count from the start of a rank's part of the row."""

    def counted(self: Any, columns: Any) -> Any:
        found = part(self, columns)
        return replace(found, positions_BT=torch.arange(found.tokens_BT.shape[1]).expand_as(found.tokens_BT))

    return counted


def _own_keys_only(_: Any) -> Any:
    """The gradient of keys and values that other ranks' queries looked at is not brought home."""

    def cut(whole: torch.Tensor, axes: Any) -> torch.Tensor:
        parts = whole.chunk(len(axes.order), 2)
        own = len(axes.order) // axes.cp.size
        return torch.cat([parts[place] for place in axes.order[axes.cp.rank * own :][:own]], dim=2)

    return cut


def _own_counts(take: Any) -> Any:
    """Loads are those of this rank's tokens, not of the global batch."""
    return lambda routers, sum_over, *rest: take(routers, lambda x: x, *rest)


def _own_tokens(begin: Any) -> Any:
    """Losses of routers are means over a rank's tokens."""
    return lambda self, tokens, scale: begin(self, tokens // dist.get_world_size(), scale)


def _padding_counts(forward: Any) -> Any:
    """Tokens of padding are counted and weigh in the losses of routers (C17)."""
    return lambda self, x_ND, real_N=None: forward(self, x_ND, None)


def _counts_again(_: Any) -> Any:
    """What activation checkpointing computes again is counted again."""
    return lambda: False


def _experts_divided(complete: Any) -> Any:
    """Gradients of experts are divided by the ranks of the expert axis."""

    def divided(self: Any) -> None:
        complete(self)
        for name, parameter in self.named_parameters().items():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad /= self.groups.axes.ep.size

    return divided


MUTATIONS = {
    "partial gradients of tensor ranks not summed": Mutation("tp=2", "truestep.parallel.model:sum_missing", _no_sum),
    "gradient of shared key heads not summed": Mutation(
        "tp=2 kv_heads=1", "truestep.parallel.apply:places", _keys_not_summed
    ),
    "bias added once a tensor rank": Mutation(
        "tp=2 bias=all", "truestep.models.layers:Linear.forward", _bias_of_every_rank
    ),
    "padding inside the softmax": Mutation(
        "tp=2 vocab=37", "truestep.losses.cross_entropy:_Chunks._softmax", _padded_vocabulary
    ),
    "copies counted twice in the norm": Mutation("tp=2", "truestep.parallel.model:global_norm", _everybody_owns),
    "mean over data ranks": Mutation(
        "dp_shard=2", "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor", _mean_over_ranks
    ),
    "tied gradient added twice": Mutation("pp=2 tie=True", "truestep.parallel.model:Mirror.bring_gradient", _tie_twice),
    "tied gradient never added": Mutation("pp=2 tie=True", "truestep.parallel.model:Mirror.bring_gradient", _tie_never),
    "tied copy never made equal": Mutation("pp=2 tie=True", "truestep.parallel.model:Mirror.bring_values", _tie_never),
    "pipeline divides by microbatches": Mutation(
        "pp=2", "truestep.parallel.pipeline:Pipeline.run", _divided_by_microbatches
    ),
    "mean of means over uneven microbatches": Mutation(
        "pp=2", "truestep.parallel.pipeline:Pipeline.run", _mean_of_means
    ),
    "layers saved under local numbers": Mutation(
        "pp=2 tie=True", "truestep.train.state:TrainState.tensors", _names_of_the_part, refusal="owne|missing"
    ),
    "rows cut before labels are shifted": Mutation("cp=2", "truestep.numerics.batch:Batch.part", _cut_then_shifted),
    "positions counted within a part": Mutation("cp=2", "truestep.numerics.batch:Batch.part", _positions_of_the_part),
    "gradient of gathered keys stays where it arose": Mutation(
        "cp=2", "truestep.models.context:_own_sum", _own_keys_only
    ),
    "loads of a rank instead of all": Mutation(
        "dp_shard=2 moe=mixtral", "truestep.models.decoder:end_step", _own_counts
    ),
    "counts of a rank's pre-pass": Mutation("dp_shard=2 moe=qwen3", "truestep.models.decoder:take_counts", _own_counts),
    "balance over a rank's tokens": Mutation(
        "dp_shard=2 moe=mixtral", "truestep.models.router:Router.begin", _own_tokens
    ),
    "padding routed like text": Mutation(
        "dp_shard=2 moe=mixtral rows=5", "truestep.models.router:Router.forward", _padding_counts
    ),
    "recomputation counted": Mutation(
        "dp_shard=2 moe=mixtral recompute=full", "truestep.models.router:is_recomputation", _counts_again
    ),
    "gradients of experts divided by their ranks": Mutation(
        "dp_shard=2 ep=2 moe=mixtral", "truestep.parallel.model:Parallel.complete_gradients", _experts_divided
    ),
}
