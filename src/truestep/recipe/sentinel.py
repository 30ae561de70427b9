"""[sentinel]: what watches the numbers of a run, how closely, and what it may do."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from truestep.recipe.section import Section, field

Share = Annotated[float, Ge(0), Le(1)]


class Spikes(Section):
    """Outliers of the loss and of the gradient norm against a window of steps that were taken. The update of such a
    step is skipped; too many in a row roll back to a checkpoint and leave out the data in between."""

    action: Literal["skip", "say"] = field("skip", help="skip: leave out the update; say: only tell", digest="what")
    window: int = field(128, help="steps that a new one is compared with", ge=8, digest="what")
    threshold: float = field(
        20.0,
        help="distance above the window's median, in its median absolute deviations (x 1.4826)",
        gt=0,
        digest="what",
    )
    in_a_row: int = field(8, help="skipped steps in a row after which the run rolls back", ge=1, digest="what")
    skips: int = field(100, help="most steps of a stage that may be skipped", ge=0, digest="what")
    rollbacks: int = field(3, help="most times that a stage may roll back and leave out data", ge=0, digest="what")


class Sentinel(Section):
    """Silent corruption, spikes and broken invariants: how closely they are looked for."""

    statistics: bool = field(True, help="compare loss and gradient norm of every shard with the others and with before")
    digest_share: Share = field(
        0.02,
        help="share of the state whose digest is taken at the end of a step and compared at the next one's start",
    )
    sweep_every: int = field(
        100, help="steps between digests of all state, logged, and compared between replicas; 0 means never", ge=0
    )
    replay_share: Share = field(
        0.005,
        help="share of steps of which every rank computes a microbatch of another one again, to compare bits; "
        "1: all microbatches of all steps",
    )
    invariants: bool = field(
        True,
        help="at the first update, and with each sweep: learning rate as scheduled, no parameter left out, all of them "
        "finite, tied ones equal",
    )
    check_host: bool = field(
        True,
        help="at start, a product and a memory test with known bits, and one of each link; the first two also after "
        "each evaluation",
    )
    spikes: Spikes = field(Spikes(), help="outliers of loss and gradient norm")
