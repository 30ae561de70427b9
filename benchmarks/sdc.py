"""Silent corruption: how many flipped bits are found, who is named, how late, how often in vain, and what it costs.

    python benchmarks/sdc.py                       2,400 flips with everything looked at, 480 by default settings,
                                                   100,000 clean steps, overhead; some hours on 2 cores
    python benchmarks/sdc.py --only matrix cost    parts of it
    python benchmarks/sdc.py --smoke               a few flips, under a minute: tries the harness, measures nothing

Site x bit x rank x once or always, on tiny models that train on forked ranks (tests/train/sdc_matrix.py). A flip is
effective if it changes the final state where nobody looks. What a detector costs are the CPU seconds of its own calls
over those of a step, on one rank with a model of 30 million parameters; no difference between two noisy runs.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from harness import machine, median, model_section, save, show

# isort: split
import torch
from tests import tiny
from tests.pool import Pool
from tests.train import sdc, sdc_matrix

from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import Batch
from truestep.recipe.machine import Machine
from truestep.recipe.sentinel import Sentinel
from truestep.recipe.stage import Stage
from truestep.sentinel.host import LONG, SHORT, check_device
from truestep.sentinel.inject import SITES
from truestep.train import held
from truestep.train.at_rest import AtRest
from truestep.train.build import build
from truestep.train.integrity import Integrity
from truestep.train.step import train_step

MESHES = ("exact fsdp 3", "exact ddp 3", "fsdp 3", "ddp 3", "hsdp 4", "ddp 2")
PARTS = ("matrix", "default", "clean", "cost")
BATCH = 60
"""Flips of one task of the pool."""


def flips(pool: Pool, count: int, settings: Sentinel, steps: int, seed: int) -> dict[str, list[sdc_matrix.Outcome]]:
    """Outcomes by mesh, `count` in all."""
    found = {}
    for number, name in enumerate(MESHES):
        setting, share = sdc.SETTINGS[name], count // len(MESHES)
        planned = sdc_matrix.plan(share, setting.world, seed + number)
        found[name] = []
        for start in range(0, share, BATCH):
            some = planned[start : start + BATCH]
            task = setting, some, settings, steps
            found[name] += pool.run(sdc_matrix.outcomes, setting.world, *task, timeout_s=24 * 3600)[0]
        print(f"\n{name}, {len(found[name])} flips\n{sdc_matrix.table(found[name])}", flush=True)
    return found


def summary(found: dict[str, list[sdc_matrix.Outcome]]) -> dict[str, Any]:
    """Over all meshes: shares of effective flips, by site and in all; what was missed, in full."""
    every = [one for some in found.values() for one in some]
    real = [one for one in every if one.effective]

    def shares(some: list[sdc_matrix.Outcome]) -> dict[str, float]:
        hits = [one for one in some if one.after is not None]
        late = sum(one.after or 0 for one in hits) / max(len(hits), 1)
        located = sum(one.located for one in hits) / max(len(hits), 1)
        return {"effective": len(some), "found": len(hits) / max(len(some), 1), "located": located, "steps": late}

    sites = {
        f"{site}, {'always' if sticky else 'once'}": shares(
            [one for one in real if (one.flip.site, one.flip.sticky) == (site, sticky)]
        )
        for site in SITES
        for sticky in (False, True)
    }
    missed = [asdict(one) for one in real if one.after is None]
    wrong = [asdict(one) for one in every if one.wrongly_named]
    return {"flips": len(every), "all": shares(real), "sites": sites, "missed": missed, "wrongly_named": wrong}


def clean(pool: Pool, steps: int, settings: Sentinel) -> dict[str, Any]:
    """Steps without any fault, and alarms (or other weights) in them."""
    found: dict[str, Any] = {}
    for name in MESHES:
        setting, times = sdc.SETTINGS[name], max(1, steps // (3 * len(MESHES)))
        wrong = pool.run(sdc_matrix.clean, setting.world, setting, settings, 3, times, timeout_s=24 * 3600)[0]
        found[name] = {"steps": 3 * times, "false_alarms": wrong}
        print(f"{name}: {3 * times} clean steps, {wrong} false alarms", flush=True)
    return found


def cost(shape: str, context: int, rounds: int) -> dict[str, float]:
    """CPU seconds of a step on one rank and of each detector, and the latter over the former at default rates."""
    section, settings, microbatches = model_section(shape), Sentinel(), 4
    state = build(
        Stage(name="bench", data="made-up", context=context, tokens=10**9, batch_tokens=8 * context),
        build_model(section, section.vocab_size),
        lambda part, pieces: init_weights(part, 0, pieces),
        job=tiny.job(),
        machine=Machine(microbatch_rows=2),
        precision="float32",
        seed=0,
        steps=1000,
    )
    every_step = Integrity(state, Sentinel(digest_share=0.0, replay_share=1.0, sweep_every=0), "bench")
    taken: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> None:
        began = time.process_time()
        action()
        taken.setdefault(name, []).append(time.process_time() - began)

    def digests(share: float) -> None:
        """Of the state; gradients are as large as the weights."""
        for tensors in (held.memory, held.weights):
            rest = AtRest(partial(tensors, state), share)
            rest.leave(state.step)
            rest.find()
            assert not rest.changed()

    random = torch.Generator().manual_seed(0)
    for _ in range(rounds + 1):
        rows = [torch.randint(0, section.vocab_size, (2, context + 1), generator=random) for _ in range(microbatches)]
        places = torch.arange(context).repeat(2, 1)
        batches = [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), places, None) for x in rows]
        timed("step", lambda batches=batches: train_step(state, batches, 8 * context, []))
        timed("digests", lambda: digests(settings.digest_share))
        timed("sweep", lambda: digests(1.0))
        state.guard = every_step
        timed("step and all again", lambda batches=batches: train_step(state, batches, 8 * context, []))
        state.guard = None
        timed("host, short", lambda: check_device(state.parallel.device, SHORT["cpu"]))
        timed("host, long", lambda: check_device(state.parallel.device, LONG["cpu"]))
    found = {name: median(values[1:]) for name, values in taken.items()}
    step = found["step"]
    again = max(0.0, found["step and all again"] - step) / microbatches
    return found | {
        "share of digests": found["digests"] / step,
        "share of sweeps": found["sweep"] / settings.sweep_every / step,
        "share of recomputation": again * settings.replay_share / step,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--flips", type=int, default=2400)
    arguments.add_argument("--default-flips", type=int, default=480)
    arguments.add_argument("--default-steps", type=int, default=200, help="that a run by default settings lasts")
    arguments.add_argument("--clean-steps", type=int, default=100_000)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--smoke", action="store_true")
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    shape, context = "30m-4k", 512
    if asked.smoke:
        asked.flips, asked.default_flips, asked.default_steps, asked.clean_steps, asked.rounds = 24, 6, 4, 18, 1
        shape, context = "tiny", 32
    result: dict[str, Any] = {"machine": machine(), "asked": {k: str(v) for k, v in vars(asked).items()}}
    with Pool(4) as pool:
        if "matrix" in asked.only:
            result["matrix"] = summary(flips(pool, asked.flips, sdc.ALL, 3, asked.seed))
        if "default" in asked.only:
            result["default"] = summary(flips(pool, asked.default_flips, Sentinel(), asked.default_steps, asked.seed))
        if "clean" in asked.only:
            result["clean"] = clean(pool, asked.clean_steps, sdc.ALL)
    if "cost" in asked.only:
        result["cost"] = cost(shape, context, asked.rounds)
    for part in ("matrix", "default"):
        if part in result:
            rows = [(name, *figures.values()) for name, figures in result[part]["sites"].items()]
            rows.append(("all", *result[part]["all"].values()))
            show(part, ("site", "effective", "found", "located", "steps to alarm"), rows)
    if "cost" in result:
        show("cost", ("what", "CPU seconds, or share of a step"), list(result["cost"].items()))
    save("sdc", result, asked.out)


if __name__ == "__main__":
    main()
