"""What a run log can say: one frozen dataclass a kind. A field that may be unknown is None and means "not recorded".

To add a kind, write its dataclass and name it in `KINDS`. New fields need a default, so that older logs stay readable.
Steps are counted from 1 within a stage: `step` is the number of optimizer steps done once this one is done, in step,
eval, save and resume records alike.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Segment:
    """First record of every segment; written by RunLog itself. `previous` is the chain head it continues from."""

    previous: str
    host: str
    pid: int
    format: int = 1


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """The processes are up. `devices` counts what the attempt holds (and pays for) by device name."""

    world: int
    host: str
    digests: dict[str, str]  # what, where, bits
    versions: dict[str, str]
    devices: dict[str, int]
    run: str | None = None  # name of the run
    stages: list[str] = field(default_factory=list)  # names, in the recipe's order
    hosts: list[str] = field(default_factory=list)  # of each rank
    bits: dict[str, Any] = field(default_factory=dict)  # all that the last bits of a result depend on
    drill_every_s: float | None = None  # 0: restores are not drilled
    launched_s: float | None = None  # Unix time at which the command was given; else the time of this record counts
    price_per_device_hour: float | None = None
    currency: str | None = None
    pue: float | None = None
    grid_region: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """A stage begins or goes on. FLOPs are of training (forward and backward) per token, by the rule that is named."""

    stage: str
    stage_kind: str
    steps: int  # planned for the whole stage
    start_step: int = 0  # steps that were already done
    tokens: int | None = None  # planned for the whole stage
    context: int | None = None
    batch_tokens: int | None = None
    params: dict[str, int] = field(default_factory=dict)  # embedding, head, ..., total
    train_flops_per_token_causal: float | None = None
    train_flops_per_token_full: float | None = None
    flops_rule: str | None = None
    precision: str | None = None  # float32, bfloat16, ...
    peak_flops: float | None = None  # FLOP/s of one device; None looks the device up in the table
    peak_source: str | None = None
    start: str | None = None  # init, "stage:NAME", a path or a pinned hub id
    parent: str | None = None  # digest of the model it started from
    data: list[str] = field(default_factory=list)  # names of `data` records
    model: dict[str, Any] = field(default_factory=dict)  # the resolved model section
    settings: dict[str, Any] = field(default_factory=dict)  # optimizer, schedule, loss, mesh, ... as chosen


@dataclass(frozen=True, kw_only=True)
class Data:
    """A corpus as it was built: what came in, what was dropped and why, what came out."""

    name: str
    source: str
    fingerprint: str
    documents: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)  # documents by reason
    licence: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step. `loss` is the mean per target over the global batch; `step_s` is the step's whole wall time,
    the wait for data (`data_s`) included, evaluations and checkpoint stalls excluded."""

    stage: str
    step: int
    tokens: int
    targets: int
    loss: float
    grad_norm: float  # before clipping
    lr: float
    step_s: float
    data_s: float | None = None
    clip: float | None = None  # factor applied to the gradient
    skipped: bool = False  # the update was not applied
    metrics: dict[str, float] = field(default_factory=dict)  # what else the loss reports


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Held-out evaluation. `loss` is nats per target; `bytes` is the text that the targets stand for."""

    stage: str
    step: int
    loss: float
    targets: int
    eval_s: float
    bits_per_byte: float | None = None
    bytes: int | None = None
    data: str | None = None
    method: str | None = None  # how bytes were counted
    high_loss: float | None = None  # of the same weights without low precision, where that is on
    metrics: dict[str, float] | None = None  # of a loss that counts something else than targets


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint was committed, or failed. `stall_s` is how long training waited for it."""

    stage: str
    step: int
    ok: bool
    stall_s: float
    total_s: float | None = None
    bytes: int | None = None
    manifest: str | None = None  # digest
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Training goes on from a checkpoint. `fell_back` says, a line each, which newer ones were passed over and why."""

    stage: str
    step: int
    checkpoint: str
    fell_back: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # fields of where and bits that differ from the last attempt's
    places: dict[str, int] = field(default_factory=dict)  # nearer than the store, and it: bytes read from each


@dataclass(frozen=True, kw_only=True)
class Skip:
    """The update of a step was skipped."""

    stage: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Digests of gradients (as reduced, before clipping) and of state (parameters, buffers, optimizer) after a step, of
    all tensors in one (numerics.fingerprint): the same on every mesh if every bit is. Those of each tensor lie in
    `log/digests`."""

    stage: str
    step: int
    gradient: str | None = None
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something was found to be wrong. `named`: that it is this rank and host was shown by its own memory or a strict
    majority; otherwise the fault is unattributed, and `rank` and `host` are None or mere suspects in `evidence`."""

    kind: Literal[
        "state", "replica", "replay", "collective", "statistics", "invariant", "host", "link", "spike", "not finite",
        "hang", "straggler", "exit", "lost", "checkpoint", "save",
    ]  # fmt: skip
    text: str
    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    host: str | None = None
    named: bool = False
    since: int | None = None  # the first step whose result may be wrong
    evidence: dict[str, Any] = field(default_factory=dict)
    at_s: float | None = None  # Unix time, where it differs from the record's
    id: str | None = None  # of an event that was brought from outside the workers


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was done about a fault, or about hosts that come and go."""

    action: Literal["roll back", "quarantine", "restart", "regroup", "shrink", "grow", "evict", "rebalance", "stop"]
    reason: str
    stage: str | None = None
    step: int | None = None
    to_step: int | None = None  # of the checkpoint that the run goes on from
    left_out: list[int] = field(default_factory=list)  # first row and the one behind the last, of the data order
    rank: int | None = None
    host: str | None = None
    world: int | None = None  # processes from here on
    turns: list[int] = field(default_factory=list)  # replicas in the order in which they get microbatches from here on
    seconds: float | None = None  # from the fault to this
    at_s: float | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Member:
    """A host joined the run or left it."""

    host: str
    event: Literal["joined", "lost", "left", "quarantined", "spare"]
    processes: int | None = None
    at_s: float | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A restore was tried out: every byte read, loaded at another world size, steps repeated."""

    stage: str
    step: int
    checkpoint: str
    ok: bool
    seconds: float
    level: Literal["scrub", "load", "replay"]  # the furthest that was reached
    text: str = ""  # what was wrong
    world: int | None = None  # processes that it was loaded on
    steps: int = 0  # repeated and found equal
    at_s: float | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Checkpoints were deleted because newer ones are verified."""

    stage: str
    deleted: list[str]
    bytes: int | None = None
    kept: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sections:
    """Mean seconds of each section of a step since the last such record, by rank, and the ranks that lag."""

    stage: str
    step: int
    steps: int
    seconds: dict[str, list[float]]
    slow: dict[str, float] = field(default_factory=dict)  # rank -> its time as a multiple of the median


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Wall time that is no step, evaluation or stall: data build, export, gate, sample, ..."""

    name: str
    seconds: float
    stage: str | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of profiled steps went: mean seconds a step on rank 0, `worst_...` on the rank with most of it.
    Communication is exposed while no compute of the same rank hides it; waiting for another rank is communication."""

    stage: str
    step: int  # the last of them
    steps: int
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    groups: dict[str, dict[str, float]]  # axis of the mesh, or kind of collective -> communication_s, exposed_s
    worst_communication_s: float | None = None
    worst_exposed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the first steps of an attempt at a stage took, on the rank with most of it."""

    stage: str
    step: int  # the last of them
    kept_bytes: int  # by autograd, of one microbatch, from its forward to its backward pass
    peak_bytes: int | None = None  # largest sum of the device's allocations; None on a CPU


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model was written."""

    stage: str
    path: str
    digest: str
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Merge:
    """An adapter was added to the weights that it stands beside. `error`: what rounding took of its change, as a share
    of that change's 2-norm."""

    stage: str
    weights: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The decision after a stage. `figures` holds what it looked at."""

    stage: str
    verdict: Literal["pass", "fail", "undecided", "void", "ungated"]
    reason: str
    gate_kind: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What general compressors reach on the held-out text: name -> bits per byte."""

    data: str
    bits_per_byte: dict[str, float]
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion of the stage's model."""

    stage: str
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """A release card was written, computed from the first `records` records of this log."""

    stage: str
    path: str
    digest: str
    records: int


@dataclass(frozen=True, kw_only=True)
class Note:
    """Anything worth saying once: what was measured and chosen, a warning, a fallback."""

    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The attempt ended in order: the run is finished, was politely stopped, met a gate, is to be started again because
    of a fault, or failed with `error`."""

    reason: Literal["finished", "stopped", "gate", "again", "failed"]
    error: str | None = None


IN_ORDER = ("finished", "stopped", "gate")
"""Reasons of an attempt's end that are no failure."""

KINDS: dict[str, type] = {
    "segment": Segment,
    "attempt_start": AttemptStart,
    "stage_start": StageStart,
    "data": Data,
    "step": Step,
    "eval": Eval,
    "save": Save,
    "resume": Resume,
    "skip": Skip,
    "digest": Digest,
    "fault": Fault,
    "decision": Decision,
    "member": Member,
    "drill": Drill,
    "retention": Retention,
    "sections": Sections,
    "phase": Phase,
    "merge": Merge,
    "profile": Profile,
    "memory": Memory,
    "model": Model,
    "gate": Gate,
    "yardstick": Yardstick,
    "sample": Sample,
    "card": Card,
    "note": Note,
    "attempt_end": AttemptEnd,
}

_FIELDS = {kind: {f.name: f for f in fields(cls)} for kind, cls in KINDS.items()}
_FLOATS = {cls: [f.name for f in fields(cls) if f.type in (float, float | None)] for cls in KINDS.values()}


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log. `data` is an instance of the kind's class; of a kind unknown to this version, its fields."""

    seq: int
    time_s: float
    attempt: int
    kind: str
    data: Any
    chain: str


def spell(value: Any) -> Any:
    """JSON has no NaN and no infinity: write them as the words that `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    return value


def typed(kind: str, values: dict[str, Any]) -> Any:
    """The dataclass of `kind` from JSON. Fields of a later version are left out; a float may come as "nan" or "inf"."""
    if kind not in KINDS:
        return values
    cls, known = KINDS[kind], _FIELDS[kind]
    mine = {name: value for name, value in values.items() if name in known}
    for name in _FLOATS[cls]:
        if isinstance(mine.get(name), str):
            mine[name] = float(mine[name])
    return cls(**mine)
