"""Pipeline schedules in numbers: microbatches in flight and idle time.

P ranks of the pipeline, v pipeline stages on each, m microbatches. F is the time of a stage's forward pass for one
microbatch; B is that of its **whole** backward pass, W the part of B that makes the weights' gradients. (The paper on
zero-bubble schedules, arXiv 2401.10241, writes B for B - W.)"""

FORMULAS = {
    "1f1b": "(P-1)(F+B)",
    "gpipe": "(P-1)(F+B)",
    "interleaved": "(P-1)(F+B) (arXiv 2104.04473, section 2.2)",
    "looped-bfs": "(P-1)(F+B) (arXiv 2211.05953)",
    "interleaved-zero-bubble": "(P-1)(F+B-2W) (arXiv 2401.10241, ZB-H1)",
    "zbv": "(P-1)F where F = B-W = W (0 in arXiv 2401.10241: once begun, a rank never waits)",
    "dualpipev": "(P-1)(F&B+B-3W), F&B = F+B (DeepSeek-V3, arXiv 2412.19437, table 2)",
}
"""Idle time of a rank in a step by schedule, F, B and W being times of one pipeline stage. At the end all wait for
the last one, since the gradient norm is one number."""


def microbatches(schedule: str, pp: int, wanted: int) -> int:
    """The least number of microbatches from `wanted` on that the schedule can run; a step fills up with empty ones."""
    if schedule == "dualpipev":
        return max(wanted, 2 * pp)
    if schedule in ("interleaved", "interleaved-zero-bubble"):
        while wanted % max(1, wanted // pp):  # rounds of about P microbatches, all of one length
            wanted += 1
    return wanted


def in_flight(schedule: str, pp: int, per_rank: int, count: int, rank: int) -> int:
    """Most forward passes whose activations a rank holds at a time, in (pipeline stage, microbatch) pairs, with
    `count` microbatches, as `microbatches` gives them."""
    everything = count * per_rank
    if pp == 1:
        return 1
    match schedule:
        case "1f1b":
            return min(count, pp - rank)
        case "interleaved" | "interleaved-zero-bubble":
            rounds = (per_rank - 1) * (count // max(1, count // pp))
            return min(everything, rounds + (pp if "zero" in schedule else 2 * (pp - 1 - rank) + 1))
        case "zbv":  # with fewer than 2 P microbatches the first ranks hold less
            return min(everything, per_rank * pp)
        case "dualpipev":
            return min(everything, 2 * pp + 1)
        case _:
            return everything


def bubble(schedule: str, pp: int, per_rank: int, count: int, forward: float = 1.0, weight: float = 1.0) -> float:
    """The share of a step in which a rank waits for others, by FORMULAS, where a stage's forward pass takes `forward`
    and the two halves of its backward pass `weight` and as long as the forward pass."""
    F, W = forward, weight
    B = F + W
    idle = {
        "interleaved-zero-bubble": (pp - 1) * (F + B - 2 * W),
        "zbv": (pp - 1) * F,
        "dualpipev": (pp - 1) * (F + B + B - 3 * W),
    }.get(schedule, (pp - 1) * (F + B))
    return idle / (idle + count * per_rank * (F + B)) if pp > 1 else 0.0
