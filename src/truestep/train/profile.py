"""Where the time of a step goes: compute, collectives, and what of them no compute hides, from torch's profiler.

On CUDA compute is what kernels take and collectives are those of NCCL; on CPU compute is the operators of the training
thread and collectives are gloo's own spans. A collective lasts until its slowest rank has come: waiting for another
rank counts as communication, and so does waiting for the stage before in a pipeline.
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from truestep.train.intervals import Interval, length, union, within, without

STEP = "truestep step"
_NO_COMPUTE = ("c10d::", "_c10d_functional::", "autograd::", "FSDP::", "nccl:", "gloo:")


@dataclass(frozen=True)
class Exposure:
    """Mean seconds a step: in collectives, and of them those without compute of the same rank."""

    communication_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True)
class Overlap:
    """What a rank did in `steps` profiled steps, in mean seconds a step. `groups`: collectives by the axis of the mesh
    or, where the backend does not tell, by kind; those at the same time count in each."""

    steps: int
    step_s: float
    compute_s: float
    all: Exposure
    groups: dict[str, Exposure]


@dataclass
class Timeline:
    """Intervals of a trace, in microseconds: the steps, compute, and collectives by name."""

    steps: list[Interval] = field(default_factory=list)
    compute: list[Interval] = field(default_factory=list)
    collectives: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))


def timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Of the events of a Chrome trace, as torch's profiler exports it."""
    spans = [event for event in events if event.get("ph") == "X"]
    marks = [e for e in spans if e.get("cat") == "user_annotation" and e["name"] == STEP]
    threads = {event["tid"] for event in marks}
    on_gpu = any(event.get("cat") == "kernel" for event in spans)
    found = Timeline(steps=sorted(_interval(event) for event in marks))
    for event in spans:
        if name := _collective(event):
            found.collectives[name].append(_interval(event))
        elif event.get("cat") == "kernel" or (not on_gpu and _computes(event) and event["tid"] in threads):
            found.compute.append(_interval(event))
    return found


def overlap(found: Timeline) -> Overlap:
    """Means over the steps; what lies between them (evaluations, saves) does not count."""
    compute, steps = union(found.compute), len(found.steps)

    def mean_s(intervals: list[Interval]) -> float:
        return sum(length(within(intervals, *step)) for step in found.steps) / steps * 1e-6

    def exposure(intervals: list[Interval]) -> Exposure:
        return Exposure(mean_s(intervals), mean_s(without(intervals, compute)))

    every = [interval for intervals in found.collectives.values() for interval in intervals]
    groups = {name: exposure(intervals) for name, intervals in sorted(found.collectives.items())}
    return Overlap(steps, mean_s(found.steps), mean_s(compute), exposure(every), groups)


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event.get("dur", 0.0)


def _collective(event: Mapping[str, Any]) -> str:
    """Axis or kind of the collective that an event is; "" for any other event."""
    name = event["name"]
    if event.get("cat") == "kernel" and name.startswith("nccl"):
        arguments = event.get("args", {})
        described = arguments.get("Process Group Description") or arguments.get("Collective name") or "unnamed"
        return "world" if described == "default_pg" else described
    if event.get("cat") == "user_annotation" and name.startswith("gloo:"):
        return name.removeprefix("gloo:")
    return ""


def _computes(event: Mapping[str, Any]) -> bool:
    """Operators, like aten::mm; names of other spans (an optimizer, a node of autograd) have no namespace."""
    name = event["name"]
    return event.get("cat") == "cpu_op" and "::" in name and not name.startswith(_NO_COMPUTE)


class StepProfiler:
    """Profiles `steps` steps after one to warm up. Each is done inside `step()`, until `finished` or until there are no
    more; then `close()` gives the result."""

    def __init__(self, steps: int, device: torch.device):
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the library says on stderr when it starts and stops
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        # gloo works in threads of its own, whose spans are recorded only if all threads are
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._read,
            experimental_config=None if cuda else every_thread,
        )
        self._device = device
        self._found: Overlap | None = None
        self._running = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, whose kernels have ended when this ends."""
        if not self._running:
            self._profile.start()
            self._running = True
        with record_function(STEP):
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self._profile.step()

    @property
    def finished(self) -> bool:
        """Whether all steps were profiled."""
        return self._found is not None

    def close(self) -> Overlap | None:
        """Stop. What was found, of fewer steps where there were fewer; None where there were none."""
        if self._running:
            self._running = False
            self._profile.stop()
        return self._found

    def _read(self, done: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            done.export_chrome_trace(str(file))
            found = timeline(json.loads(file.read_bytes())["traceEvents"])
        if found.steps:
            self._found = overlap(found)
