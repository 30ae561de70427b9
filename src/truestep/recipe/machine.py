"""[run], [machine], [ledger]: where and how a run is carried out (and its seed)."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt

from truestep.recipe.elastic import Elastic
from truestep.recipe.section import Section, field
from truestep.recipe.units import Bytes, Seconds

Degree = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
LOOPED = ("interleaved", "looped-bfs", "interleaved-zero-bubble")
"""Schedules whose ranks hold every pp-th pipeline stage."""
FOLDED = ("zbv", "dualpipev")
"""Schedules whose ranks hold stage i and its mirror from the end."""


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
    """Degrees of the axes. One of all may be "auto": what is left of the number of processes."""

    dp_replicate: Degree | Literal["auto"] = field(
        1, help="replicas of the whole model (alone: DDP; with dp_shard: HSDP)"
    )
    dp_shard: Degree | Literal["auto"] = field(
        "auto", help="ranks that share one copy of parameters, gradients and optimizer state (FSDP2)"
    )
    tp: Degree | Literal["auto"] = field(
        1, help="ranks that share every layer's heads and columns, and the tokens between them", digest="bits"
    )
    pp: Degree | Literal["auto"] = field(1, help="ranks that share the layers (a pipeline)")
    cp: Degree | Literal["auto"] = field(1, help="ranks that share the tokens of every row", digest="bits")
    ep: Degree | Literal["auto"] = field(
        1, help="ranks that share the experts; they are the same ranks as dp_shard, cp and tp", digest="bits"
    )


class Pipeline(Section):
    """How the layers lie on the pipeline's ranks, and in which order microbatches go through them."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"] = (
        field(
            "1f1b",
            help="interleaved, looped-bfs (arXiv 2104.04473, 2211.05953): several pipeline stages a rank; "
            "zero-bubble (arXiv 2401.10241) does the weights' gradients later; zbv, dualpipev: two, folded as a V",
        )
    )
    stages_per_rank: int = field(2, help="pipeline stages on each rank", ge=2)
    split: Literal["auto"] | list[Degree] = field(
        "auto", help="layers of each pipeline stage; auto balances their cost, embedding and head counted"
    )

    @property
    def stages_on_a_rank(self) -> int:
        """Pipeline stages that a rank holds under this schedule: the V of the V schedules has two arms."""
        if self.schedule in LOOPED:
            return self.stages_per_rank
        return 2 if self.schedule in FOLDED else 1


class Context(Section):
    """How the ranks of mesh.cp share the attention of long rows."""

    style: Literal["all-gather", "ulysses"] = field(
        "all-gather", help="gather keys and values, or exchange tokens for heads (arXiv 2309.14509)", digest="bits"
    )
    balance: bool = field(
        True,
        help="give each rank one part from the row's head and one from its tail, so that causal work is even",
        digest="bits",
    )

    @property
    def parts_per_rank(self) -> int:
        """Parts of a row that a rank of the context axis owns: two where head and tail are paired."""
        return 2 if self.balance and self.style == "all-gather" else 1


class Machine(Section):
    """Devices, processes, precision and memory. Some fields may change the last bits of results (digest "bits")."""

    processes: int = field(
        1, help="processes to start on this machine (under torchrun or srun the job's world size holds instead)", ge=1
    )
    device: Literal["auto", "cpu", "cuda"] = field("auto", help="auto uses a GPU where there is one", digest="bits")
    threads: int = field(0, help="CPU threads a process; 0 shares the cores among the processes", ge=0, digest="bits")
    mesh: Mesh = field(Mesh(), help="parallel axes", digest="where")
    pipeline: Pipeline = field(Pipeline(), help="the axis mesh.pp", digest="where")
    context: Context = field(Context(), help="the axis mesh.cp", digest="bits")
    elastic: Elastic = field(Elastic(), help="failures, restarts, other numbers of processes")
    async_tp: bool = field(
        False,
        help="mesh.tp: overlap its collectives with the matrix products (CUDA with symmetric memory)",
        digest="bits",
    )
    microbatch_rows: int = field(8, help="rows that go through the model at once", gt=0, digest="bits")
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = field(
        "auto",
        help="compute dtype; master weights and reductions stay fp32 (float64: everything). "
        "auto measures once whether bfloat16 is worth it",
        digest="bits",
    )
    activation_checkpointing: Literal["none", "full", "selective", "auto"] = field(
        "none",
        help="recompute blocks in the backward pass (selective: keep the matrix products; "
        "auto: as few as activation_memory allows)",
        digest="bits",
    )
    activation_memory: Bytes = field("8GiB", help="what activations of one rank may take", gt=0, digest="bits")
    offload_optimizer: bool = field(
        False, help="keep optimizer state in the host's memory; it visits the GPU for the update", digest="bits"
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
    profile_steps: int = field(
        0, help="steps early in each stage that are profiled, for the share of communication that nothing hides", ge=0
    )
    prefetch: int = field(2, help="steps of data prepared ahead", ge=0)
    data_workers: int = field(0, help="processes for data build; 0 means one a core", ge=0)
    cache: str = field("~/.cache/truestep", help="local cache of downloaded and remote data")

    @property
    def hang_s(self) -> float:
        """Seconds without progress of any rank after which the run is taken to hang."""
        return self.timeout / 2 if self.elastic.hang == "auto" else self.elastic.hang


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
