"""The report's pictures: inline SVG by matplotlib without a display. A picture without data is None."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from truestep.ledger.words import count
from truestep.runlog.records import Eval, Save, Step

BLUE, ORANGE, GREEN, RED, GREY, INK = "#2563eb", "#ea580c", "#059669", "#dc2626", "#94a3b8", "#334155"
POINTS = 1200  # of a curve; more are thinned to mean and range
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "truestep",
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Segoe UI", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": "#64748b",
    "ytick.color": "#64748b",
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """One picture: its title, a sentence below it, and the SVG."""

    title: str
    says: str
    svg: str


@dataclass(frozen=True)
class Curves:
    """What is drawn of a stage: the steps that stand, evaluations, saves, and steps at which an attempt went on."""

    steps: list[Step]
    evals: list[Eval]
    saves: list[Save]
    resumes: list[int]
    yardsticks: dict[str, float]
    rows: pa.Table | None  # of read_metrics


def plots(curves: Curves) -> list[Plot]:
    """All pictures of a stage for which there is data."""
    with matplotlib.rc_context(_STYLE):
        drawn = [loss(curves), bits(curves), gap(curves), grad_norm(curves), shards(curves)]
        drawn += [learning_rate(curves), speed(curves), stalls(curves)]
    return [plot for plot in drawn if plot is not None]


def loss(curves: Curves) -> Plot | None:
    """Training loss with held-out points on it."""
    if not curves.steps:
        return None
    axes = _axes("nats per token")
    values = np.array([s.loss for s in curves.steps])
    _curve(axes, _numbers(curves), values, BLUE, "training")
    if curves.evals:
        x, y = [e.step for e in curves.evals], [e.loss for e in curves.evals]
        axes.plot(x, y, "o-", color=ORANGE, ms=4, lw=1.2, label="held-out", zorder=4)
        axes.legend(loc="upper right")
    _clip_top(axes, values)
    bad = int(np.sum(~np.isfinite(values)))
    last = f"last {values[-1]:.4f}" + (f"; {bad} steps not finite" if bad else "")
    return _plot("Loss", last, axes, curves)


def bits(curves: Curves) -> Plot | None:
    """Held-out bits per byte beside what compressors reach."""
    known = [(e.step, e.bits_per_byte) for e in curves.evals if e.bits_per_byte is not None]
    if not known:
        return None
    axes = _axes("bits per byte")
    axes.plot([x for x, _ in known], [y for _, y in known], "o-", color=ORANGE, ms=4, lw=1.6)
    for index, (name, value) in enumerate(curves.yardsticks.items()):
        axes.axhline(value, color=INK, lw=1, ls=(0, (5, 2 + 2 * index)))
        axes.annotate(
            f"{name}  {value:.3f}", (0.01, value), xycoords=("axes fraction", "data"), va="bottom", fontsize=8.5
        )
    if curves.steps:
        axes.set_xlim(0, curves.steps[-1].step * 1.03)
    return _plot("Held-out bits per byte", f"last {known[-1][1]:.4f}", axes, curves)


def gap(curves: Curves) -> Plot | None:
    """What low precision costs: held-out loss beyond that of the same weights with every product high."""
    known = [(e.step, e.loss - e.high_loss) for e in curves.evals if e.high_loss is not None]
    if not known:
        return None
    axes = _axes("nats per token")
    axes.axhline(0.0, color=GREY, lw=1)
    axes.plot([x for x, _ in known], [y for _, y in known], "o-", color=RED, ms=4, lw=1.6)
    if curves.steps:
        axes.set_xlim(0, curves.steps[-1].step * 1.03)
    return _plot("Held-out loss that low precision adds", f"last {known[-1][1]:+.4f}", axes, curves)


def grad_norm(curves: Curves) -> Plot | None:
    """Global gradient norm before clipping."""
    values = np.array([s.grad_norm for s in curves.steps])
    if not len(values):
        return None
    axes = _axes("norm before clipping")
    _curve(axes, _numbers(curves), values, GREEN)
    _log_if_wide(axes, values)
    clipped = [s.clip for s in curves.steps if s.clip is not None]
    share = f"clipped in {np.mean(np.array(clipped) < 1):.0%} of steps" if clipped else "clipping not recorded"
    return _plot("Gradient norm", f"{share}, last {values[-1]:.3g}", axes, curves)


def shards(curves: Curves) -> Plot | None:
    """Smallest, median and largest gradient norm over ranks and microbatches of a step."""
    spread = None if curves.rows is None else shard_spread(curves.rows)
    if curves.rows is None or spread is None:
        return None
    step, low, middle, high = spread
    axes = _axes("norm of a shard's contribution")
    keep = slice(None, None, max(1, len(step) // POINTS))
    axes.fill_between(step[keep], low[keep], high[keep], color=GREEN, alpha=0.28, lw=0, label="min to max")
    axes.plot(step[keep], middle[keep], color=GREEN, lw=1.3, label="median")
    _log_if_wide(axes, np.concatenate([low, high]))
    axes.legend(loc="upper right")
    ranks = len(np.unique(curves.rows["rank"].to_numpy()))
    widest = f"up to {np.max(high / np.maximum(middle, 1e-30)):.1f} times the median"
    return _plot("Gradient norm per shard", f"{ranks} ranks, {len(curves.rows):,} rows; {widest}", axes, curves)


def learning_rate(curves: Curves) -> Plot | None:
    """The learning rate that was used."""
    if not curves.steps:
        return None
    axes = _axes("")
    _curve(axes, _numbers(curves), np.array([s.lr for s in curves.steps]), INK)
    axes.set_ylim(bottom=0)
    return _plot("Learning rate", f"peak {max(s.lr for s in curves.steps):.3g}", axes, curves)


def speed(curves: Curves) -> Plot | None:
    """Tokens per second of every step, its wait for data included."""
    steps = [s for s in curves.steps if s.step_s > 0]
    if not steps:
        return None
    axes = _axes("tokens/s")
    values = np.array([s.tokens / s.step_s for s in steps])
    _curve(axes, np.array([s.step for s in steps]), values, BLUE)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: count(v)))
    waits = [s.data_s for s in steps if s.data_s is not None]
    wait = (
        f", {sum(waits) / sum(s.step_s for s in steps):.1%} of it waiting for data" if len(waits) == len(steps) else ""
    )
    return _plot("Throughput", f"median {count(float(np.median(values)))} tokens/s{wait}", axes, curves)


def stalls(curves: Curves) -> Plot | None:
    """Seconds that training waited for each checkpoint, failed ones in red."""
    if not curves.saves:
        return None
    axes = _axes("seconds of stall")
    for good, colour, label in ((True, BLUE, "committed"), (False, RED, "failed")):
        saves = [s for s in curves.saves if s.ok is good]
        if saves:
            x, y = [s.step for s in saves], [s.stall_s for s in saves]
            axes.vlines(x, 0, y, color=colour, lw=1.4)
            axes.plot(x, y, "o" if good else "X", color=colour, ms=4.5 if good else 7, label=label)
    axes.set_ylim(bottom=0)
    if curves.steps:
        axes.set_xlim(0, curves.steps[-1].step * 1.03)
    failed = sum(not s.ok for s in curves.saves)
    if failed:
        axes.legend(loc="best")
    says = (
        f"{len(curves.saves)} checkpoints, {failed} failed, longest stall {max(s.stall_s for s in curves.saves):.2f} s"
    )
    return _plot("Checkpoint stalls", says, axes, curves)


def shard_spread(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Steps, then min, median and max of the shards' gradient norms. Zero-weight rows are padding and touch nothing;
    norms that are not finite are left out."""
    step, norm, weight = (rows[name].to_numpy() for name in ("step", "grad_norm", "weight"))
    kept = (weight > 0) & np.isfinite(norm)
    if not kept.any():
        return None
    step, norm = step[kept], norm[kept]
    order = np.lexsort((norm, step))
    step, norm = step[order], norm[order]
    numbers, first, sizes = np.unique(step, return_index=True, return_counts=True)
    middle = (norm[first + (sizes - 1) // 2] + norm[first + sizes // 2]) / 2
    return numbers, norm[first], middle, norm[first + sizes - 1]


def _numbers(curves: Curves) -> np.ndarray:
    return np.array([s.step for s in curves.steps])


def _curve(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str = "") -> None:
    """A line; of a long series the mean and the range of each bucket, so that spikes stay visible."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) > POINTS:
        edges = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
        low, high = np.fmin.reduceat(y, edges), np.fmax.reduceat(y, edges)
        sums, sizes = np.add.reduceat(np.nan_to_num(y), edges), np.add.reduceat(np.isfinite(y).astype(float), edges)
        x, y = x[edges], np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)
        axes.fill_between(x, low, high, color=colour, alpha=0.22, lw=0)
    axes.plot(x, y, color=colour, lw=1.3, label=label)


def _axes(unit: str) -> Axes:
    axes = Figure(figsize=(5.4, 2.75), layout="constrained").add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel(unit)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: count(v)))
    return axes


def _clip_top(axes: Axes, values: np.ndarray) -> None:
    """Let the first steps run out of the picture where they would flatten the rest."""
    finite = values[np.isfinite(values)]
    if len(finite) > 50:
        top, bottom = np.quantile(finite, 0.98), finite.min()
        if finite.max() - bottom > 1.6 * (top - bottom) > 0:
            axes.set_ylim(bottom - 0.05 * (top - bottom), top + 0.1 * (top - bottom))


def _log_if_wide(axes: Axes, values: np.ndarray) -> None:
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) == len(values) and positive.max() > 20 * positive.min():
        axes.set_yscale("log")


def _plot(title: str, says: str, axes: Axes, curves: Curves) -> Plot:
    for step in curves.resumes:
        axes.axvline(step, color=GREY, lw=1, ls=":", zorder=1)
    return Plot(title, says, _svg(axes.figure, title))


def _svg(figure: Any, title: str) -> str:
    """The figure as an SVG element to put into a page: no prologue, no ids that clash with those of other figures."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :])
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{title}"', text, count=1)


def resumed_at(first_steps: Sequence[int]) -> list[int]:
    """Where a line marks that a later attempt went on: the step it began with."""
    return sorted(set(first_steps[1:]))
