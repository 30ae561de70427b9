"""The two sides of benchmarks/posttrain.py. Each has a process of its own and does a round when told to."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import OUT  # noqa: F401  sets how threads wait, before torch is imported

# isort: split
import torch
from contenders import BETAS, CLIP, EPS, Pace

METHODS = ("sft", "lora", "dpo", "dpo-online")
"""dpo: the reference's log-probabilities are made before the first step; dpo-online: in every step."""
LR, BETA = 1e-4, 0.1
RANK, ALPHA = 16, 32
SEED = 1


@dataclass(frozen=True)
class Spec:
    """What both sides get. A round is `steps` steps; before the rounds come `warmup` steps."""

    shape: str
    path: str
    context: int
    rows: int
    warmup: int
    steps: int
    rounds: int
    threads: int

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def lengths(self) -> list[int]:
        """Steps of each round."""
        return [self.warmup, *[self.steps] * self.rounds]

    def ordered(self, method: str) -> Path:
        return self.folder / f"{method}-ordered.jsonl"


def recipe(spec: Spec, method: str) -> dict[str, Any]:
    """truestep's side as a recipe."""
    pairs = method.startswith("dpo")
    tokens = spec.rows * spec.context
    optim = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": 0.0, "clip_norm": CLIP}
    stage: dict[str, Any] = {
        "name": "bench",
        "kind": "preference" if pairs else "sft",
        "start": str(spec.folder / "model"),
        "data": "rows",
        "context": spec.context,
        "tokens": tokens * sum(spec.lengths),
        "batch_tokens": tokens,
        "optim": optim | {"schedule": {"kind": "constant", "warmup": 0}},
        "gate": {"kind": "none", "reason": "a benchmark"},
    }
    if method == "lora":
        stage["lora"] = {"rank": RANK, "alpha": ALPHA, "merge": False}
    if pairs:
        stage["preference"] = {"beta": BETA, "reference": "online" if method == "dpo-online" else "precomputed"}
    rows = {"source": "jsonl", "path": str(spec.folder / ("dpo.jsonl" if pairs else "sft.jsonl"))}
    rows |= {"format": "preference" if pairs else "prompt-completion", "too_long": "refuse"}
    machine = {"device": "cpu", "precision": "float32", "threads": spec.threads, "microbatch_rows": spec.rows}
    return {
        "run": {"name": f"truestep-{method}", "dir": str(spec.folder / "runs"), "seed": SEED},
        "tokenizer": {"kind": "start"},
        "data": {"rows": rows},
        "stages": [stage],
        "machine": machine | {"activation_checkpointing": "none", "cache": str(spec.folder / "cache")},
        "checkpoint": {"every": 1_000_000, "every_time": "10h"},
    }


def truestep(spec: Spec, method: str, pace: Pace) -> None:
    """The recipe, stopped between rounds."""
    from truestep.cli.verbs import run
    from truestep.stages.assemble import Parts
    from truestep.stages.progress import TerminalProgress

    feed, step = Parts.feed, TerminalProgress.step

    def heard(self: Any, stage: str, number: int, steps: int, result: Any, *rest: Any) -> None:
        pace.loss = result.loss
        step(self, stage, number, steps, result, *rest)

    TerminalProgress.step = heard
    Parts.feed = lambda self, context: _Paced(feed(self, context), pace)
    run(recipe(spec, method))


class _Paced:
    """The loop's feed, stopped between rounds."""

    def __init__(self, fed: Any, pace: Pace):
        self.fed, self.pace = fed, pace

    def __enter__(self) -> "_Paced":
        self.fed.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.fed.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(sum(self.pace.spec.lengths)):
            self.pace.tick()
            yield next(self.fed)
        self.pace.finish()


def trl(spec: Spec, method: str, pace: Pace) -> None:
    """TRL's trainer with its defaults but for what makes the work equal."""
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class Paced(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            pace.tick()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            pace.loss = float((logs or {}).get("loss", pace.loss))

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            pace.finish()

    pairs = method.startswith("dpo")
    trainer: Any = DPOTrainer if pairs else SFTTrainer

    class InOrder(trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    settings: dict[str, Any] = {
        "output_dir": str(spec.folder / f"trl-{method}"),
        "per_device_train_batch_size": spec.rows,
        "max_steps": sum(spec.lengths),
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": None,
    }
    if pairs:
        arguments = DPOConfig(**settings, beta=BETA, precompute_ref_log_probs=method == "dpo")
    else:
        arguments = SFTConfig(**settings)
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear") if method == "lora" else None
    lines = spec.ordered(method).read_text().splitlines()
    InOrder(
        model=AutoModelForCausalLM.from_pretrained(spec.folder / "model", dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(spec.folder / "model"),
        peft_config=adapter,
        callbacks=[Paced()],
    ).train()


def main() -> None:
    """Run one side of a method under a parent that writes commands to stdin and reads answers from stdout."""
    side, _, method = sys.argv[1].partition(" ")
    spec = Spec(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the log
    torch.set_num_threads(spec.threads)
    {"truestep": truestep, "trl": trl}[side](spec, method, Pace(spec, answers, sys.stdin))


if __name__ == "__main__":
    main()
