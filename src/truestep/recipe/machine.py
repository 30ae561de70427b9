"""[run], [machine], [checkpoint], [ledger]: where and how a run is carried out (and its seed)."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt

from truestep.recipe.section import Section, field
from truestep.recipe.units import Bytes, Seconds

Degree = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]


class Run(Section):
    """The run's name, seed and place."""

    name: str = field(
        help="name of the run; its directory is dir/name", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", digest="where"
    )
    seed: int = field(0, help="seed of initialisation and data order", ge=0, digest="what")
    dir: str = field("runs", help="local folder that holds runs", digest="where")
    resume: Literal["auto", "required", "never"] = field(
        "auto",
        help="auto: go on from the newest checkpoint if there is one; required: fail without one; "
        "never: refuse if there is one",
        digest="where",
    )


class Mesh(Section):
    """Degrees of the axes. One may be "auto": what is left of the world size."""

    dp_replicate: Degree | Literal["auto"] = field(
        1, help="replicas of the whole model (alone: DDP; with dp_shard: HSDP)"
    )
    dp_shard: Degree | Literal["auto"] = field(
        "auto", help="ranks that share one copy of parameters, gradients and optimizer state (FSDP2)"
    )


class Machine(Section):
    """Devices, processes, precision and memory. Some fields may change the last bits of results (digest "bits")."""

    processes: int = field(
        1, help="processes to start on this machine (under torchrun or srun the job's world size holds instead)", ge=1
    )
    device: Literal["auto", "cpu", "cuda"] = field("auto", help="auto uses a GPU where there is one", digest="bits")
    threads: int = field(0, help="CPU threads a process; 0 shares the cores among the processes", ge=0, digest="bits")
    mesh: Mesh = field(Mesh(), help="parallel axes", digest="where")
    microbatch_rows: int = field(8, help="rows that go through the model at once", gt=0, digest="bits")
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = field(
        "auto",
        help="compute dtype; master weights and reductions stay fp32 (float64: everything). "
        "auto measures once whether bfloat16 is worth it",
        digest="bits",
    )
    activation_checkpointing: Literal["none", "full", "selective"] = field(
        "none", help="recompute blocks in the backward pass (selective: keep the matrix products)", digest="bits"
    )
    compile: bool = field(False, help="torch.compile every block", digest="bits")
    reshard_after_forward: bool = field(True, help="FSDP2: free gathered weights after the forward pass", digest="bits")
    head_chunk_tokens: int = field(
        0,
        help="tokens at a time in the fused head and cross-entropy, whose full logits are never held; "
        "0 means 512 on a CPU and 8192 on a GPU",
        ge=0,
        digest="bits",
    )
    timeout: Seconds = field("10m", help="how long a collective may wait")
    prefetch: int = field(2, help="steps of data prepared ahead", ge=0)
    data_workers: int = field(0, help="processes for data build; 0 means one a core", ge=0)
    cache: str = field("~/.cache/truestep", help="local cache of downloaded and remote data")


class Checkpoint(Section):
    """When and where training state is saved."""

    url: str | None = field(
        None, help="folder or object store (s3://bucket/prefix, gs://, az://); by default the run's own folder"
    )
    storage_options: dict[str, str] = field(
        {}, help="options of the store (endpoint, region, allow_http, ...); secrets come from the environment"
    )
    every: int = field(0, help="steps between checkpoints; 0 means by `every_time` only", ge=0)
    every_time: Seconds = field("10m", help="time between checkpoints; also at the end of every stage")
    asynchronous: bool = field(True, help="write in the background while training goes on")
    block: Bytes = field("8MiB", help="bytes a checksum covers", gt=0)
    deadline: Seconds = field("30m", help="a save that takes longer is abandoned")
    max_failures: int = field(3, help="saves in a row that may fail before the run stops", ge=0)


class Ledger(Section):
    """What the card says of compute, energy, place and money. What is not given is "not recorded", never zero."""

    peak_flops: Positive | Literal["auto"] = field(
        "auto",
        help="peak of one device in FLOP/s for MFU; auto takes the table of known devices, else measures a matmul",
    )
    grid_region: str | None = field(None, help="where the power comes from")
    pue: float | None = field(None, help="power usage effectiveness of the site", ge=1)
    price_per_device_hour: float | None = field(None, help="money for an hour of one device", ge=0)
    currency: str | None = field(None, help="currency of the price (ISO 4217)")
