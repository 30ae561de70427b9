"""A tiny model, its data and its training state, for tests of the step and of what lies around it."""

import torch
import torch.distributed as dist

from truestep.models.build import init_weights
from truestep.models.decoder import Decoder
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.pieces import stream_whole
from truestep.parallel.job import Job
from truestep.recipe.machine import Machine, Mesh
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.train.build import build
from truestep.train.state import TrainState

VOCAB, CONTEXT, ROWS = 97, 16, 12


def section(**options) -> ModelSection:
    given = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    return ModelSection(**(given | options)).resolved(VOCAB)


def rows(steps: int = 1, seed: int = 5) -> list[Batch]:
    """One global batch of ROWS rows a step; targets are uneven over rows, and row 3 has none."""
    random = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        x_BT = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=random)
        labels_BT = x_BT[:, 1:].clone()
        labels_BT[torch.rand(labels_BT.shape, generator=random) < torch.linspace(0, 0.9, ROWS)[:, None]] = IGNORE
        labels_BT[3] = IGNORE
        cut = torch.randint(1, CONTEXT, (ROWS, 1), generator=random)
        place = torch.arange(CONTEXT)[None]
        documents_BT = (place >= cut).to(torch.int32)
        positions_BT = torch.where(place >= cut, place - cut, place)
        batches.append(Batch(x_BT[:, :-1].clone(), labels_BT, positions_BT, documents_BT))
    return batches


def cut(batch: Batch, size: int) -> list[Batch]:
    """Microbatches of `size` rows."""
    fields = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    return [Batch(*parts) for parts in zip(*(x.split(size) for x in fields))]


def padding(like: Batch) -> Batch:
    """A microbatch of the same shape without any target or document."""
    return like.without_targets()


def share(batch: Batch, rank: int, world: int, size: int = 1) -> list[Batch]:
    """This rank's microbatches, padded so that every rank has as many."""
    pieces = cut(batch, size)
    while len(pieces) % world:
        pieces.append(padding(pieces[0]))
    return pieces[rank::world]


def job(rank: int = 0, world: int = 1) -> Job:
    control = dist.new_group(backend="gloo") if world > 1 else None
    return Job(rank, world, rank, world, torch.device("cpu"), "test", control, None)


def state(
    here: Job,
    *,
    precision="float32",
    mesh: Mesh | None = None,
    optim=None,
    loss=None,
    steps=100,
    seed=1,
    model=None,
    numerics=None,
    limits=None,
    **machine,
) -> TrainState:
    given = {"name": "tiny", "data": "x", "context": CONTEXT, "tokens": 10_000, "batch_tokens": ROWS * CONTEXT}
    stage = Stage(**given, optim=optim or {"lr": 1e-2}, loss=loss or {})
    if model is None:
        with torch.device("meta"):
            model = Decoder(section())
    settings = Machine(mesh=mesh or Mesh(), head_chunk_tokens=7, **machine)
    return build(
        stage,
        model,
        lambda m, pieces: init_weights(m, 3, pieces),
        job=here,
        machine=settings,
        precision=precision,
        seed=seed,
        steps=steps,
        numerics=numerics,
        limits=limits,
    )


def whole_gradients(training: TrainState) -> dict[str, torch.Tensor]:
    """Gradients of all parameters, gathered on every rank."""
    found = [dict(stream_whole(training.parallel.gradients()))]
    if dist.is_initialized():
        dist.broadcast_object_list(found, 0)
    assert set(found[0]) >= set(training.parallel.named_parameters())
    return {name: gradient.clone() for name, gradient in found[0].items()}
