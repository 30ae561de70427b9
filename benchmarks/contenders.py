"""The training loops that benchmarks/train.py compares. Each has a process of its own and does a round when told to.

All see the same rows in the same order with the same targets, start from the same weights, and use AdamW (fused) at a
constant rate without decay and clipping at norm 1, in fp32. Their losses are compared, so unequal work is noticed.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from harness import Clock, model_section, peak_bytes

# isort: split
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from truestep.data.loader import Corpus, Loader, Prefetcher, microbatches
from truestep.data.store import TokenStore
from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import IGNORE, Batch
from truestep.parallel.job import Job
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.checkpoint import Checkpoint
from truestep.recipe.machine import Machine
from truestep.recipe.stage import Optim, Schedule, Stage

SEED, LR, BETAS, EPS, CLIP = 1, 1e-3, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True)
class Spec:
    """What all contenders get. A round is `steps` steps; before the rounds come `warmup` steps."""

    shape: str
    store: str
    context: int
    rows: int
    accumulate: int
    warmup: int
    steps: int
    rounds: int
    threads: int
    compile: bool

    @property
    def lengths(self) -> list[int]:
        """Steps of each round: warm-up, timed ones, and one more for the profile."""
        return [self.warmup, *[self.steps] * self.rounds, self.steps]

    @property
    def rows_a_step(self) -> int:
        return self.rows * self.accumulate

    def loader(self) -> Loader:
        return Loader([Corpus(TokenStore.open(self.store))], self.context, SEED)

    def stage(self) -> Stage:
        tokens = self.rows_a_step * self.context
        steady = Schedule(kind="constant", warmup=0)
        optim = Optim(lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, clip_norm=CLIP, schedule=steady)
        total = tokens * sum(self.lengths)
        return Stage(name="bench", data="made-up", context=self.context, tokens=total, batch_tokens=tokens, optim=optim)


@dataclass
class Pace:
    """Stops a training loop between rounds and tells the parent process what the round took.

    A loop calls `tick` before every step and `finish` after the last. `settle` is what must end within the round's time
    (a save in the background), so that no contender works while another is on.
    """

    spec: Spec
    answers: TextIO
    commands: TextIO
    settle: Callable[[], Any] = lambda: None
    loss: float = float("nan")
    _begins: list[int] = field(default_factory=list)
    _step: int = 0
    _clock: Clock | None = None
    _profile: profile | None = None

    def __post_init__(self):
        starts = [sum(self.spec.lengths[:index]) for index in range(len(self.spec.lengths))]
        self._begins = starts

    def tick(self) -> None:
        if self._step in self._begins:
            self._end_round()
            self._wait()
        self._step += 1

    def finish(self) -> None:
        self._end_round()

    def say(self, **what: Any) -> None:
        print(json.dumps(what), file=self.answers, flush=True)

    def _wait(self) -> None:
        command = self.commands.readline().strip()
        if command == "profile":
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()
        elif command != "go":
            os._exit(0)  # the parent is gone
        self._clock = Clock()

    def _end_round(self) -> None:
        if self._clock is None:
            return self.say(ready=True)
        self.settle()
        took = self._clock.read()
        operators = {}
        if self._profile is not None:
            self._profile.stop()
            operators = {e.key: e.self_cpu_time_total / 1e6 for e in self._profile.key_averages()}
        self.say(**took, loss=self.loss, peak_bytes=peak_bytes(), operators=operators)


def truestep(spec: Spec, pace: Pace) -> None:
    """The real loop, everything on: run log, shard norms, prefetching, an asynchronous checkpoint in every round."""
    from truestep.checkpoint.catalogue import begin_epoch
    from truestep.checkpoint.checkpointer import Checkpointer
    from truestep.runlog.log import RunLog
    from truestep.runlog.metrics import RankMetrics
    from truestep.storage.store import open_store
    from truestep.train.build import build
    from truestep.train.loop import Loop

    job = Job(0, 1, 0, 1, torch.device("cpu"), "none")
    stage, schedule = spec.stage(), BatchSchedule.of(spec.stage())
    settings = Machine(microbatch_rows=spec.rows, compile=spec.compile)
    section = model_section(spec.shape)
    state = build(
        stage,
        build_model(section, section.vocab_size),
        lambda model, pieces: init_weights(model, SEED, pieces),
        job=job,
        machine=settings,
        precision="float32",
        seed=SEED,
        steps=schedule.steps,
    )
    loader = spec.loader()
    with tempfile.TemporaryDirectory(dir=Path(spec.store).parent) as folder:
        store = open_store(f"{folder}/checkpoints")
        cadence = Checkpoint(every=spec.steps)
        checkpointer = Checkpointer(
            store,
            attempt=begin_epoch(store).number,
            rank=0,
            world=1,
            kv=None,
            block_bytes=cadence.block,
            deadline_s=cadence.deadline,
        )
        pace.settle = checkpointer.wait
        log, metrics = RunLog(folder, 0), RankMetrics(folder, 0, 0)
        with Prefetcher(loader, schedule, 0, 1, spec.rows, settings.prefetch) as fed:
            loop = Loop(
                stage=stage.name,
                state=state,
                feed=_Paced(fed, pace),
                loader_state=lambda step: loader.state(schedule.rows(step - 1)[1]),
                tokens_of=lambda step: schedule.rows_in(step) * spec.context,
                checkpointer=checkpointer,
                cadence=cadence,
                metrics=metrics,
                log=log,
                watcher=_Losses(pace),
            )
            loop.run()
        checkpointer.close()
        metrics.close()
        log.close()


@dataclass
class _Paced:
    """The loop's feed, stopped between rounds."""

    fed: Prefetcher
    pace: Pace

    def __iter__(self) -> Iterator[tuple[int, list[Batch], int]]:
        for _ in range(sum(self.pace.spec.lengths)):
            self.pace.tick()
            yield next(self.fed)
        self.pace.finish()


@dataclass
class _Losses:
    pace: Pace

    def step(self, stage: str, step: int, steps: int, result: Any, tokens: int, seconds: float) -> None:
        self.pace.loss = result.loss

    def held_out(self, stage: str, step: int, figures: Any) -> None:
        """Nothing is held out here."""

    def alarm(self, text: str) -> None:
        raise RuntimeError(text)


def plain(spec: Spec, pace: Pace) -> None:
    """A loop as one writes it by hand, over our decoder: full logits, torch's cross-entropy, no logging, no saving."""
    section = model_section(spec.shape)
    model = build_model(section, section.vocab_size).to_empty(device="cpu")
    init_weights(model, SEED)
    _by_hand(spec, pace, model, lambda m, batch: m(batch.tokens_BT, batch.positions_BT))


def plain_hf(spec: Spec, pace: Pace) -> None:
    """The same loop over transformers' LlamaForCausalLM."""
    _by_hand(spec, pace, hf_model(spec), lambda m, batch: m(input_ids=batch.tokens_BT, use_cache=False).logits)


def _by_hand(spec: Spec, pace: Pace, model: torch.nn.Module, logits_of: Callable[[Any, Batch], torch.Tensor]) -> None:
    call = torch.compile(model) if spec.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    loader, schedule = spec.loader(), BatchSchedule.of(spec.stage())
    for step in range(schedule.steps):
        pace.tick()
        batches = microbatches(loader, *schedule.rows(step), 0, 1, spec.rows)
        targets = sum(int((batch.labels_BT != IGNORE).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits_BTV = logits_of(call, batch)
            loss = cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pace.loss = total
    pace.finish()


def hf_model(spec: Spec) -> torch.nn.Module:
    """transformers' Llama of the same shape with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from truestep.models.hf_config import config_from_section
    from truestep.models.hf_names import hf_name

    section = model_section(spec.shape)
    ours = build_model(section, section.vocab_size).to_empty(device="cpu")
    init_weights(ours, SEED)
    theirs = LlamaForCausalLM(LlamaConfig(**config_from_section(section)))
    named = {hf_name(name, section): value for name, value in ours.state_dict().items()}
    left = theirs.load_state_dict(named, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left  # the head is tied
    return theirs.float().train()


def trainer(spec: Spec, pace: Pace) -> None:
    """transformers.Trainer with its defaults but for what makes the work equal. It saves nothing and its rows lie in
    memory, both in its favour."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            loader, self.rows = spec.loader(), spec.rows_a_step * sum(spec.lengths)
            self.batch = loader.rows(loader.global_rows(0, self.rows))

        def __len__(self) -> int:
            return self.rows

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            tokens_T = self.batch.tokens_BT[row]
            return {"input_ids": tokens_T, "labels": tokens_T}  # the model shifts labels itself

    class Paced(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            pace.tick()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            pace.loss = float((logs or {}).get("loss", pace.loss))

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            pace.finish()

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=spec.rows,
            gradient_accumulation_steps=spec.accumulate,
            max_steps=sum(spec.lengths),
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            weight_decay=0.0,
            max_grad_norm=CLIP,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            torch_compile=spec.compile,
        )
        InOrder(hf_model(spec), arguments, train_dataset=Rows(), callbacks=[Paced()]).train()


CONTENDERS: dict[str, Callable[[Spec, Pace], None]] = {
    "truestep": truestep,
    "trainer": trainer,
    "plain": plain,
    "plain-hf": plain_hf,
}


def main() -> None:
    """Run one contender under a parent that writes commands to stdin and reads answers from stdout."""
    name, spec = sys.argv[1], Spec(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the log
    torch.set_num_threads(spec.threads)
    CONTENDERS[name](spec, Pace(spec, answers, sys.stdin))


if __name__ == "__main__":
    main()
