"""Rules that must hold after an update: each one broken in turn, on the real training state."""

import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from truestep.models.decoder import Decoder
from truestep.recipe.machine import Mesh, Pipeline
from truestep.train.invariants import Invariants
from truestep.train.step import train_step


def broken(rank: int, world: int, spoil: str, **options) -> list[str]:
    """What is found after a step during which `spoil` was done."""
    with torch.device("meta"):
        model = Decoder(tiny.section(tie_embeddings="pp" in options))
    mesh = Mesh(**options)
    training = tiny.state(
        tiny.job(rank, world), model=model, mesh=mesh, pipeline=Pipeline(), optim={"kind": "muon", "lr": 1e-2}
    )
    parallel, optimizer, groups = training.parallel, training.optimizer, training.parallel.groups
    name = "blocks.0.mlp.down.weight"
    assert "pp" in options or name in parallel.named_parameters()
    if spoil == "frozen by mistake":
        hand_over = parallel.hand_over_gradients

        def without_one():
            parallel.named_parameters()[name].grad = None
            return hand_over()

        parallel.hand_over_gradients = without_one  # type: ignore[method-assign]
    check = Invariants(training, every=2)
    batch = tiny.rows()[0]
    result = train_step(training, tiny.share(batch, groups.data_rank, groups.data_size, 3), batch.num_targets, [])
    if spoil == "left out":
        del optimizer.named_params[name]
    elif spoil == "stateless":
        param = optimizer.named_params[name]
        for part in optimizer.parts:
            part.state.pop(param, None)
    elif spoil == "rate":
        optimizer.param_groups[0]["lr"] *= 1.0001
    elif spoil == "not a number" and rank == world - 1:
        optimizer.named_params[name].data.view(-1)[-1] = float("nan")
    elif spoil == "tie" and parallel.mirror is not None and parallel.mirror.copy is not None:
        parallel.mirror.copy.data.view(-1)[3] += 1e-3
    return [alarm.fault.text for alarm in check.after(result)]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("frozen by mistake", "parameter blocks.0.mlp.down.weight got no gradient"),
        ("left out", "parameter blocks.0.mlp.down.weight is trainable, but not in the optimizer"),
        ("stateless", "parameter blocks.0.mlp.down.weight has no optimizer state"),
        ("rate", "the learning rate of group 'muon' is 0.0"),
        ("not a number", "blocks.0.mlp.down.weight is not finite"),
    ],
)
def test_a_broken_rule_is_named(spoil, says):
    (text,) = broken(0, 1, spoil)
    assert text.startswith(says) and "this is a bug" in text


def test_all_ranks_say_the_same_and_who_has_it():
    found = run_ranks(broken, 2, "not a number")
    assert found[0] == found[1] and "(rank 1)" in found[0][0]


def test_sound_states_break_no_rule():
    assert broken(0, 1, "") == []
    assert run_ranks(broken, 2, "") == [[], []]


@pytest.mark.parametrize("spoil", ["", "tie"])
def test_a_tied_table_in_two_parts_of_a_pipeline_stays_tied(spoil):
    found = run_ranks(_tied, 2, spoil)
    assert found[0] == found[1] and len(found[0]) == (spoil == "tie")
    assert all("the head's copy of the tied table embed.weight differs" in text for text in found[0])


def _tied(rank: int, world: int, spoil: str) -> list[str]:
    return broken(rank, world, spoil, pp=2)


def test_it_looks_at_the_first_update_and_now_and_then():
    training = tiny.state(tiny.job())
    check, batch = Invariants(training, every=3), tiny.rows()[0]
    due = []
    for step in range(1, 8):
        due += [step] if check.due(step) else []
        assert check.after(train_step(training, [batch], batch.num_targets, [])) == []
    assert due == [1, 3, 6]
