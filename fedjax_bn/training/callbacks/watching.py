"""Shows rounds while they are trained: warnings, progress, TensorBoard, the profile of a round."""

import os
import struct
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from fedjax_bn.arguments.text import shown
from fedjax_bn.training.records import Record, warnings_of
from fedjax_bn.training.together import first
from fedjax_bn.training.workdir import faults_named, sync

_BETWEEN_LINES = 30.0  # seconds; an evaluated round always prints a line
# Without tqdm's percentage and rounds per second, so that the text fits into 80 columns.
_BAR = "{desc}: {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Warnings(NamedTuple):
    """Says what is odd in a round's updates, see `records.warnings_of`."""

    say: Callable[[str], None]

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Says the warnings of a round."""
        for warning in warnings_of(metrics):
            self.say(warning)


class Progress:
    """Shows a bar on a terminal, elsewhere plain lines, on standard error.

    They have the mean loss of a round, its mean score if it was evaluated, the pace and the time
    left. `samples` are the training samples of a round, `score` is what the run calls its accuracy.
    """

    def __init__(
        self, title: str, rounds: int, rounds_done: int, samples: float, score: str = "accuracy"
    ) -> None:
        self._title, self._rounds, self._rounds_done = shown(title), rounds, rounds_done
        self._samples, self._score = samples, score
        self._bar: tqdm | None = None

    def __enter__(self) -> "Progress":
        self._printed = time.monotonic()
        if sys.stderr.isatty():
            options = {"initial": self._rounds_done, "desc": self._title, "bar_format": _BAR}
            self._bar = tqdm(total=self._rounds, dynamic_ncols=True, **options)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Shows the round."""
        words, clock = self._in_words(metrics), time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
            return
        due = clock - self._printed >= _BETWEEN_LINES or round >= self._rounds
        if due or "accuracy" in metrics:
            self._printed = clock
            left = tqdm.format_interval(metrics["seconds"] * (self._rounds - round))
            line = f"{self._title}: round {round} of {self._rounds}, {words}, {left} left"
            with suppress(OSError):
                print(line, file=sys.stderr, flush=True)

    def _in_words(self, record: Record) -> str:
        losses = record["loss"]
        # A summary of many clients has their mean.
        values = [losses["mean"]] if "mean" in losses else losses.values()
        present = [loss for loss in values if loss is not None]
        words = [f"loss {sum(present) / len(present):.3f}" if present else "no client took part"]
        if "accuracy" in record:
            words.append(f"{self._score} {record['accuracy']['mean']:.1f} %")
        if present:
            words.append(f"{self._samples / max(record['seconds'], 1e-9):,.0f} samples/s")
        return ", ".join(words)


class TensorBoard:
    """Writes a new event file into WORKDIR/events, with the numbers of each round and the plots.

    TensorBoard drops events of earlier files for rounds after those done, which this run writes
    again. `pictures` is a pattern of the plots' names.
    """

    def __init__(self, folder: Path, rounds_done: int, pictures: str = "*") -> None:
        self._folder, self._rounds_done = folder / "events", rounds_done
        self._plots = sorted((folder / "plots").glob(f"{pictures}.png"))

    def __enter__(self) -> "TensorBoard":
        # tensorboardX would import torch, for seconds, to name a type. None is Python's own mark
        # for "not found".
        hidden = {} if "torch" in sys.modules else {"torch": None}
        sys.modules.update(hidden)
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        finally:
            for name in hidden:
                del sys.modules[name]
        self._event = Event
        with faults_named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Names have the time in seconds, and files are read in the order of their names.
            # Not `SummaryWriter`, whose `flush` does not wait for what its thread has yet to write.
            self._writer = EventsWriter(str(self._folder / "events"), f".{self._rounds_done:08}")
            self._write(self._rounds_done + 1, session_log=SessionLog(status=SessionLog.START))
            sync(self._folder)
        for path in self._plots:
            data = path.read_bytes()
            if data.startswith(b"\x89PNG"):
                width, height = struct.unpack(">II", data[16:24])
                image = {"width": width, "height": height, "colorspace": 4}
                image["encoded_image_string"] = data
                value = {"tag": path.stem, "image": image}
                self._write(self._rounds_done, summary={"value": [value]})
        return self

    def __exit__(self, *error: Any) -> None:
        with faults_named(self._folder):
            self._writer.close()

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Writes the numbers of the record, with tags such as `accuracy/mnist`."""
        # Not by tensorboardX's `scalar`, which would give "a b" and "a_b" the same tag.
        for tag, number in scalars_of(metrics):
            self._write(round, summary={"value": [{"tag": tag, "simple_value": number}]})

    def flush(self) -> None:
        """Waits until the disk has all events."""
        with faults_named(self._folder):
            self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        with faults_named(self._folder):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))


def scalars_of(record: Record, prefix: str = "") -> Iterable[tuple[str, float]]:
    """Yields all (tag, number) pairs of a nested record except its round."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars_of(value, f"{prefix}{shown(key)}/")
        elif isinstance(value, int | float) and prefix + key != "round":
            yield prefix + shown(key), float(value)


class Profile:
    """Writes the trace of one round to FOLDER/plugins/profile, where XProf finds it.

    It comes before all other callbacks, so that the trace has the round alone. Of several
    processes, only the first one writes a trace, that of its own devices.

    Args:
      round: the round that is profiled, from 1; 0 for none.
      folder: made if it is missing.

    Raises:
      WorkdirError: the folder cannot be made, or, by the round, the trace cannot be written.
      RuntimeError: by the round, if another trace of `jax.profiler` is running.
    """

    def __init__(self, round: int, folder: str | os.PathLike[str]) -> None:
        self._round, self._folder, self._stack = round, Path(folder), ExitStack()
        if round and first():
            with faults_named(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: Any) -> None:
        with faults_named(self._folder):
            self._stack.close()

    def on_round_begin(self, round: int) -> None:
        """Starts the trace if it is the round's turn."""
        if round == self._round and first():
            self._stack.enter_context(jax.profiler.trace(self._folder))
            step = jax.profiler.StepTraceAnnotation("round", step_num=round)
            self._stack.enter_context(step)

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Ends the trace."""
        self.__exit__()
