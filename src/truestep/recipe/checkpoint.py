"""[checkpoint]: when and where training state is saved, how long it is kept, and how often a restore is drilled."""

from typing import Literal

from truestep.recipe.section import Section, field
from truestep.recipe.units import Bytes, Seconds


class Checkpoint(Section):
    """When and where training state is saved, how long it is kept, and how often its restore is drilled."""

    url: str | None = field(
        None, help="folder or object store (s3://bucket/prefix, gs://, az://); by default the run's own folder"
    )
    storage_options: dict[str, str] = field(
        {}, help="options of the store (endpoint, region, allow_http, ...); secrets come from the environment"
    )
    every: int = field(0, help="steps between checkpoints; 0 means by `every_time` only", ge=0)
    every_time: Seconds | Literal["auto"] = field(
        "auto",
        help="time between checkpoints; also at the end of every stage. auto: from the measured stall of a save and "
        "the rate of failures (Young, Daly), never closer than a save takes",
    )
    asynchronous: bool = field(True, help="write in the background while training goes on")
    block: Bytes = field("8MiB", help="bytes a checksum covers", gt=0)
    deadline: Seconds = field("30m", help="a save that takes longer is abandoned")
    max_failures: int = field(3, help="saves in a row that may fail before the run stops", ge=0)
    disk: str | None = field(
        None, help="folder on a disk of each host, where its part of the two newest checkpoints is kept as well"
    )
    memory: bool = field(
        False, help="keep the newest checkpoint also in the memory of this host and of a neighbour, outside the workers"
    )
    keep: int = field(0, help="verified checkpoints to keep, the newest; 0 keeps all", ge=0)
    keep_every: int = field(0, help="also keep those whose step is a multiple of this; 0 keeps none for that", ge=0)
    drill_every: Seconds = field(
        "1h", help="time between drills: read every byte, load at another world size, repeat steps; 0s turns them off"
    )
    drill_steps: int = field(2, help="steps that a drill repeats and compares with the log", ge=0)
