"""Followers of the run log: the log is the truth, a sink is a copy of it elsewhere.

A sink is any object with the two methods of `Sink`; `follow_log` feeds it. A sink that starts late, or again, gets the
whole log from its beginning.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from truestep.errors import UserError
from truestep.runlog.log import LogReader
from truestep.runlog.records import AttemptEnd, Eval, Gate, Record, Sample, Save, Step


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Take one record, in log order."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


def follow_log(
    run_dir: Path | str,
    sinks: Sequence[Sink],
    until_end: bool = False,
    poll_s: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Feed the log to `sinks` and close them; with `until_end`, wait for more until the attempt ends. Returns the count
    of records."""
    reader, ended, fed = LogReader(run_dir), False, 0
    try:
        while True:
            for record in reader.records():
                ended = isinstance(record.data, AttemptEnd)
                fed += 1
                for sink in sinks:
                    sink.write(record)
            if ended or not until_end:
                return fed
            sleep(poll_s)
    except KeyboardInterrupt:
        return fed
    finally:
        for sink in sinks:
            sink.close()


def scalars(record: Record) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of what a record says in numbers; what it does not say is left out."""
    data = record.data
    if isinstance(data, Step):
        values = {"loss": data.loss, "grad_norm": data.grad_norm, "lr": data.lr, "clip": data.clip}
        values |= {"step_s": data.step_s, "data_s": data.data_s, **data.metrics}
        values["tokens_per_s"] = data.tokens / data.step_s if data.step_s else None
        group = "train"
    elif isinstance(data, Eval):
        values = {"loss": data.loss, "bits_per_byte": data.bits_per_byte, "eval_s": data.eval_s}
        values["high_loss"], group = data.high_loss, "held-out"
    elif isinstance(data, Save):
        values, group = {"ok": float(data.ok), "stall_s": data.stall_s, "total_s": data.total_s}, "checkpoint"
    else:
        return
    for name, value in values.items():
        if value is not None:
            yield f"{data.stage}/{group}/{name}", data.step, value


class TensorBoardSink:
    """Writes event files that TensorBoard reads: numbers as scalars, gate verdicts and samples as text.

    Needs the extra: `pip install truestep[tensorboard]`; torch is not used.
    """

    def __init__(self, folder: Path | str):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.metadata import create_summary_metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UserError(
                "TensorBoard is not installed; install the extra with `pip install truestep[tensorboard]`"
            ) from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._text = create_summary_metadata
        self._writer = EventFileWriter(str(folder))

    def write(self, record: Record) -> None:
        """Add the record's numbers and texts, at its own time."""
        for tag, step, value in scalars(record):
            self._add(record, step, self._summary.Value(tag=tag, simple_value=value))
        data = record.data
        if isinstance(data, Gate):
            self._add_text(record, f"{data.stage}/gate", f"**{data.verdict}**: {data.reason}")
        elif isinstance(data, Sample):
            self._add_text(record, f"{data.stage}/samples", f"**{data.prompt}**{data.text}")

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, record: Record, step: int, value) -> None:
        summary = self._summary(value=[value])
        self._writer.add_event(self._event(wall_time=record.time_s, step=step, summary=summary))

    def _add_text(self, record: Record, tag: str, text: str) -> None:
        value = self._summary.Value(tag=tag, metadata=self._text(tag, ""))
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.tensor_shape.dim.add().size = 1
        value.tensor.string_val.append(text.encode("utf-8", "replace"))
        self._add(record, record.seq, value)
