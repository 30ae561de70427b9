"""Live progress of a run for a person at a terminal, or a line now and then where there is no terminal."""

import sys
import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from truestep.train.evaluate import HeldOut
from truestep.train.step import StepResult

LINE_EVERY_S = 10.0


class TerminalProgress(AbstractContextManager):
    """One bar per stage on a terminal; plain lines elsewhere. Silent on every rank but 0 (`speaks` false)."""

    def __init__(self, speaks: bool = True):
        self.console = Console(stderr=False, highlight=False, soft_wrap=not sys.stdout.isatty())
        self._speaks = speaks
        self._live = speaks and self.console.is_terminal
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said_at = 0.0
        self._tokens = 0
        self._since = 0.0

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        if self._speaks:
            self.console.print(text)

    def alarm(self, text: str) -> None:
        """Something is wrong, and the run goes on."""
        self.say(f"[bold red]WARNING[/bold red] {escape(text)}")

    def table(self, table: object) -> None:
        if self._speaks:
            self.console.print(table)

    def begin(self, stage: str, step: int, steps: int) -> None:
        self._tokens, self._since, self._said_at = 0, time.monotonic(), time.monotonic()
        if not self._live:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        numbers = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tok/s")
        self._bar = Progress(*columns, numbers, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self._bar.start()
        self._task = self._bar.add_task(stage, total=steps, completed=step, loss=float("nan"), speed=0.0)

    def step(self, stage: str, step: int, steps: int, result: StepResult, tokens: int, seconds: float) -> None:
        if not self._speaks:
            return
        self._tokens += tokens
        now = time.monotonic()
        speed = self._tokens / max(now - self._since, 1e-9)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, loss=result.loss, speed=speed)
        elif now - self._said_at >= LINE_EVERY_S or step == steps:
            self._said_at = now
            self.say(f"{stage}: step {step}/{steps}  loss {result.loss:.4f}  {speed:,.0f} tok/s")

    def held_out(self, stage: str, step: int, figures: HeldOut) -> None:
        bits = "" if figures.bits_per_byte is None else f"  {figures.bits_per_byte:.4f} bits per byte"
        high = figures.high_loss
        gap = "" if high is None else f"  low precision costs {figures.loss - high:+.4f}"
        more = "".join(f"  {name} {value:.4f}" for name, value in figures.metrics.items())
        self.say(f"{stage}: step {step}  held-out loss {figures.loss:.4f}{bits}{gap}{more}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
