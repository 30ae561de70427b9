"""Run logs made up for tests, on a clock of their own."""

import math
from pathlib import Path

import numpy as np
import pytest

from truestep.runlog.log import RunLog, next_attempt
from truestep.runlog.metrics import RankMetrics

STAGE = dict(
    stage_kind="pretrain",
    context=128,
    params={"embedding": 262_144, "attention": 262_144, "mlp": 786_432, "norm": 1_152, "total": 1_311_872},
    train_flops_per_token_causal=9.5e6,
    train_flops_per_token_full=9.9e6,
    flops_rule="matmul-2",
    precision="float32",
    peak_flops=2e10,
    peak_source="measured: 1024^3 float32 matmul",
    start="init",
    data=["train", "heldout"],
    model={"family": "llama", "hidden_size": 128, "num_layers": 4},
    settings={
        "optimizer": [{"group": "matrices", "lr": 0.01}, {"group": "rest", "lr": 0.003}],
        "mesh": {"dp_shard": 2},
    },
)


class Clock:
    """Stands in for time.time in the run log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_s: float = 1_700_000_000.0):
        self.now_s = now_s
        monkeypatch.setattr("truestep.runlog.log.time.time", lambda: self.now_s)

    def wait(self, seconds: float) -> float:
        self.now_s += seconds
        return seconds


class MadeUpRun:
    """Writes attempts of a run. Step times, losses and shard norms are smooth made-up functions of the step."""

    def __init__(self, path: Path, clock: Clock, ranks: int = 2):
        self.path, self.clock, self.ranks = path, clock, ranks
        self.log: RunLog | None = None
        self.metrics: list[RankMetrics] = []
        self.random = np.random.default_rng(0)

    def begin(self, startup_s: float = 4.0, devices: dict[str, int] | None = None, **more) -> None:
        attempt = next_attempt(self.path)
        launched = self.clock.now_s
        self.clock.wait(1.0)
        self.log = RunLog(self.path, attempt)
        self.log.append(
            "attempt_start",
            run="made-up",
            world=self.ranks,
            host="node",
            digests={"what": "aaaa", "where": "bbbb", "bits": "cccc"},
            versions={"truestep": "0.1.0", "torch": "2.13.0"},
            devices={"CPU core": self.ranks} if devices is None else devices,
            launched_s=launched,
            **more,
        )
        self.metrics = [RankMetrics(self.path, attempt, rank) for rank in range(self.ranks)]
        self.clock.wait(startup_s - 1.0)

    def say(self, kind: str, /, **values) -> None:
        assert self.log is not None
        self.log.append(kind, **values)

    def stage(self, name: str = "base", steps: int = 40, start_step: int = 0, **more) -> None:
        values = STAGE | dict(batch_tokens=1024, tokens=1024 * steps, steps=steps, start_step=start_step) | more
        self.say("stage_start", stage=name, **values)

    def steps(
        self, first: int, last: int, name: str = "base", step_s: float = 0.5, data_s: float | None = 0.05
    ) -> None:
        for step in range(first, last + 1):
            noise = float(self.random.normal(0, 0.03))
            loss = 2.0 + 5.0 * math.exp(-step / 12) + noise
            norm = 0.4 + 3.0 * math.exp(-step / 6) + abs(noise)
            lr = 0.01 * min(1.0, step / 4) * (1.0 if step <= 32 else max(0.0, (40 - step) / 8))
            self.clock.wait(step_s)
            numbers = dict(loss=loss, grad_norm=norm, lr=lr, clip=min(1.0, 1 / norm), step_s=step_s, data_s=data_s)
            self.say("step", stage=name, step=step, tokens=1024, targets=1016, **numbers)
            for rank, metrics in enumerate(self.metrics):
                for microbatch in range(2):
                    shard = norm * float(self.random.lognormal(0.2 * rank, 0.15))
                    metrics.append(name, step, microbatch, loss * 254, 254.0, shard)

    def evaluate(self, step: int, loss: float, name: str = "base", eval_s: float = 1.5) -> None:
        bits = dict(bits_per_byte=loss / 2.2, bytes=1_234_567, data="heldout", method="bytes of the text")
        self.say("eval", stage=name, step=step, loss=loss, targets=500_000, eval_s=self.clock.wait(eval_s), **bits)

    def save(self, step: int, name: str = "base", stall_s: float = 0.2, ok: bool = True) -> None:
        for metrics in self.metrics:
            metrics.flush()
        self.clock.wait(stall_s)
        more = dict(bytes=21_000_000, manifest="d" * 16) if ok else dict(error="No space left on device")
        self.say("save", stage=name, step=step, ok=ok, stall_s=stall_s, total_s=0.9, **more)

    def phase(self, name: str, seconds: float, stage: str | None = None) -> None:
        self.say("phase", name=name, seconds=self.clock.wait(seconds), stage=stage)

    def end(self, reason: str | None, **more) -> None:
        """`None` is kill -9: nothing is said and unflushed rows are lost."""
        assert self.log is not None
        if reason:
            self.say("attempt_end", reason=reason, **more)
            for metrics in self.metrics:
                metrics.close()
        self.log.close()


def full_run(path: Path, clock: Clock, **start) -> MadeUpRun:
    """Two attempts: the first saves at 20 and is killed at 26, the second goes on from 20 and passes its gate."""
    run = MadeUpRun(path, clock)
    run.begin(startup_s=4.0, stages=["base"], **start)
    corpus = dict(fingerprint="f" * 16, documents=900, tokens=2_000_000, bytes=7_000_000, licence="PSF-2.0")
    run.say("data", name="train", source="python-stdlib", dropped={"exact duplicate": 12}, **corpus)
    run.say("data", name="heldout", source="python-stdlib", fingerprint="e" * 16, documents=80)
    run.phase("data build", 6.0)
    run.say("yardstick", data="heldout", bytes=1_234_567, bits_per_byte={"gzip -9": 2.05, "xz -9e": 1.71})
    run.stage()
    run.clock.wait(2.0)
    run.steps(1, 10)
    run.evaluate(10, 4.4)
    run.steps(11, 20)
    run.save(20)
    run.steps(21, 26)
    run.end(None)
    clock.wait(100.0)
    run.begin(startup_s=3.0, stages=["base"], **start)
    run.say("resume", stage="base", step=20, checkpoint="20-1", fell_back=[])
    run.stage(start_step=20)
    run.clock.wait(1.0)
    run.steps(21, 30)
    run.evaluate(30, 3.6)
    run.save(30, ok=False)
    run.steps(31, 40)
    run.evaluate(40, 3.3)
    run.save(40)
    run.phase("export", 0.8, stage="base")
    run.say("model", stage="base", path="models/base", digest="0123456789abcdef", bytes=5_247_488)
    run.say("sample", stage="base", prompt="def add(a, b):\n", text="    return a + b\n")
    run.say(
        "gate",
        stage="base",
        verdict="pass",
        gate_kind="heldout",
        reason="held-out 1.500 bits per byte <= 1.71",
        figures={"bits_per_byte": 1.5},
    )
    return run
