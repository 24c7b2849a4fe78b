"""Shows rounds on standard error: a bar on a terminal, elsewhere plain lines."""

import sys
import time
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from fedjax_bn.arguments.text import shown
from fedjax_bn.training.records import Record

_BETWEEN_LINES = 30.0  # seconds; an evaluated round always prints a line
# Leaves out tqdm's percentage and rounds per second, so that the text fits into 80 columns, and its
# time left, which counts compiling.
_BAR = "{{desc}}: {{bar}} {{n_fmt}}/{{total_fmt}} [{{elapsed}}<{left}{{postfix}}]"


class Progress:
    """Shows of each round its mean loss, its mean score if evaluated, its pace and the time left.

    Args:
      title: of the run, such as its method.
      rounds: of the whole run.
      rounds_done: rounds done before.
      samples: training samples of a round, for the pace.
      score: what the run calls its accuracy.
    """

    def __init__(
        self, title: str, rounds: int, rounds_done: int, samples: float, score: str = "accuracy"
    ) -> None:
        self._title, self._rounds, self._rounds_done = shown(title), rounds, rounds_done
        self._samples, self._score = samples, score
        # The time left is the mean time between rounds, without the first round and the first
        # evaluated one, which compile. Until there are others, it is the round's own time.
        self._seen_kinds: set[bool] = set()
        self._paces: list[float] = []
        self._bar: tqdm | None = None

    def __enter__(self) -> "Progress":
        self._before = self._printed = time.monotonic()
        if sys.stderr.isatty():
            shape = _BAR.format(left="?")
            options = {"initial": self._rounds_done, "desc": self._title, "bar_format": shape}
            self._bar = tqdm(total=self._rounds, dynamic_ncols=True, **options)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Shows the round."""
        del state
        seconds, words = self._seconds_left(metrics), _in_words(metrics, self._samples, self._score)
        if self._bar is not None:
            self._bar.bar_format = _BAR.format(left=tqdm.format_interval(seconds))
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
            return
        clock = time.monotonic()
        due = clock - self._printed >= _BETWEEN_LINES
        if due or "accuracy" in metrics or round >= self._rounds:
            self._printed = clock
            line = f"{self._title}: round {round} of {self._rounds}, {words}"
            with suppress(OSError):
                print(f"{line}, {_duration(seconds)} left", file=sys.stderr, flush=True)

    def _seconds_left(self, record: Record) -> float:
        kind, clock = "accuracy" in record, time.monotonic()
        if kind in self._seen_kinds:
            self._paces.append(clock - self._before)
        self._seen_kinds.add(kind)
        self._before = clock
        pace = sum(self._paces) / len(self._paces) if self._paces else record["seconds"]
        return pace * (self._rounds - record["round"])


def _in_words(record: Record, samples: float, score: str) -> str:
    """Returns a round in words: mean loss, the score if it was evaluated, samples a second."""
    losses = record["loss"]
    losses = {"mean": losses["mean"]} if "mean" in losses else losses  # a summary of many clients
    present = [loss for loss in losses.values() if loss is not None]
    words = f"loss {sum(present) / len(present):.3f}" if present else "no client took part"
    if "accuracy" in record:
        words += f", {score} {record['accuracy']['mean']:.1f} %"
    if not present:
        return words
    return f"{words}, {samples / max(record['seconds'], 1e-9):,.0f} samples/s"


def _duration(seconds: float) -> str:
    """Returns seconds as people write them: 8 s, 3 min 20 s, 2 h 5 min."""
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {seconds_left} s" if minutes else f"{seconds_left} s"
