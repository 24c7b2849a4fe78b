"""Appends the records of a run's rounds to metrics.jsonl, and writes the selected one's answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_bn.training import workdir
from fedjax_bn.training.evaluation.answers import Keep, write_answers
from fedjax_bn.training.records import Record, select_round, warnings_of
from fedjax_bn.training.together import first


class Warnings(NamedTuple):
    """Says what is odd in a round's updates, see `records.warnings_of`."""

    say: Callable[[str], None]

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Says the warnings of a round."""
        del round, state
        for warning in warnings_of(metrics):
            self.say(warning)


class Lines(NamedTuple):
    """Writes each round's record; of several processes, only the first one writes.

    Attributes:
      folder: the workdir.
      records: the run's, to which the loop appends.
      answers: of the last evaluation, see `evaluation.answers.Keep`.
      predictions: the configuration's: "csv", "npz" or "".
    """

    folder: Path
    records: list[Record]
    answers: Keep
    predictions: str = ""

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Appends the line of the round."""
        del state
        if not first():
            return
        workdir.append_line(self.folder / "metrics.jsonl", metrics)
        if "accuracy" in metrics and select_round(self.records) == round:
            write_answers(self.folder, self.answers, self.predictions)
