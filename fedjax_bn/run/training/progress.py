"""How far a run is, on standard error: a bar on a terminal, elsewhere plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from fedjax_bn.arguments.text import shown

_BETWEEN_LINES = 30.0  # seconds; a round with an accuracy has a line of its own
# Without tqdm's percentage and rounds a second, so that the whole text fits into 80 columns; and
# without its time left, which counts compiling.
_BAR = "{{desc}}: {{bar}} {{n_fmt}}/{{total_fmt}} [{{elapsed}}<{left}{{postfix}}]"


@contextmanager
def progress(
    title: str, rounds: int, done: int, samples: float, score: str = "accuracy"
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows each round: its mean loss, mean score if it was evaluated, pace and the time left.

    Args:
      title: of the run, such as its method.
      rounds: of the whole run.
      done: of them, before.
      samples: that a round trains on, for the pace.
      score: what the run calls its accuracy.

    Yields:
      A function of a round's record, a line of metrics.jsonl.
    """
    title, left = shown(title), _time_left(rounds)
    if not sys.stderr.isatty():
        printed = time.monotonic()

        def tell(record: dict[str, Any]) -> None:
            nonlocal printed
            number, seconds, now = record["round"], left(record), time.monotonic()
            if "accuracy" in record or number >= rounds or now - printed >= _BETWEEN_LINES:
                printed = now
                text = f"{in_words(record, samples, score)}, {duration(seconds)} left"
                with suppress(OSError):
                    line = f"{title}: round {number} of {rounds}, {text}"
                    print(line, file=sys.stderr, flush=True)

        yield tell
        return
    shape = _BAR.format(left="?")
    with tqdm(total=rounds, initial=done, desc=title, bar_format=shape, dynamic_ncols=True) as bar:

        def tell_bar(record: dict[str, Any]) -> None:
            bar.bar_format = _BAR.format(left=tqdm.format_interval(left(record)))
            bar.set_postfix_str(in_words(record, samples, score), refresh=False)
            bar.update()

        yield tell_bar


def _time_left(rounds: int) -> Callable[[dict[str, Any]], float]:
    """Returns a function from a round's record, when it is done, to the seconds of those to come.

    The mean is over the times from round to round, without the first round and the first evaluated
    one, which compile. Until there are others, a round's own time is taken.
    """
    seen, paces, before = set(), [], time.monotonic()

    def left(record: dict[str, Any]) -> float:
        nonlocal before
        kind, now = "accuracy" in record, time.monotonic()
        if kind in seen:
            paces.append(now - before)
        seen.add(kind)
        before = now
        pace = sum(paces) / len(paces) if paces else record["seconds"]
        return pace * (rounds - record["round"])

    return left


def in_words(record: dict[str, Any], samples: float, score: str) -> str:
    """Returns a round in words: mean loss, the score if it was evaluated, samples a second.

    Args:
      record: a line of metrics.jsonl.
      samples: that the round trained on.
      score: what percentages are, such as accuracy.
    """
    losses = record["loss"]
    losses = {"mean": losses["mean"]} if "mean" in losses else losses  # of many clients
    present = [loss for loss in losses.values() if loss is not None]
    text = f"loss {sum(present) / len(present):.3f}" if present else "no client took part"
    if "accuracy" in record:
        text += f", {score} {record['accuracy']['mean']:.1f} %"
    if not present:
        return text
    return f"{text}, {samples / max(record['seconds'], 1e-9):,.0f} samples/s"


def duration(seconds: float) -> str:
    """Returns seconds as people write them: 8 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
