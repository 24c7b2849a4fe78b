"""Shows rounds while they are trained: a bar or lines, and warnings."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from tqdm import tqdm

from fedjax_bn.arguments.text import shown
from fedjax_bn.training.records import Record, warnings_of

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

    `samples` are the training samples of a round, `score` is what the run calls its accuracy.
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
