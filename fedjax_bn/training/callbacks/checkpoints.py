"""Writes lines, answers and checkpoints: all from which a run continues or is evaluated."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.evaluation.answers import Keep, write_answers
from fedjax_bn.training.processes import first
from fedjax_bn.training.records import Record, select_round


class Lines(NamedTuple):
    """Appends each round's record to metrics.jsonl, and writes the selected round's answers."""

    folder: Path
    records: list[Record]  # to which the loop appends
    answers: Keep  # of the last evaluation
    predictions: str = ""

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Appends the line of the round."""
        if first():
            workdir.append_line(self.folder / "metrics.jsonl", metrics)
            if "accuracy" in metrics and select_round(self.records) == round:
                write_answers(self.folder, self.answers, self.predictions)


class Checkpoints:
    """Saves the selected round, every `interval` rounds the latest one, and the last one.

    It comes after the callbacks that write; `flush` waits until the disk has what they wrote. With
    `wait` the disk has a checkpoint before the next round begins.
    """

    def __init__(
        self,
        folder: Path,
        interval: int,
        records: list[Record],
        flush: Sequence[Callable[[], None]] = (),
        wait: bool = False,
    ) -> None:
        self._folder, self._interval, self._records = folder, interval, records
        self._flush, self._wait = flush, wait
        self._stack = ExitStack()

    def __enter__(self) -> "Checkpoints":
        managers = checkpoint.open_both(self._folder, len(self._records))
        self._latest, self._selected = self._stack.enter_context(managers)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Saves the round if it is the selected one, or if it is its turn."""
        if "validation" in metrics and select_round(self._records) == round:
            self._save(self._selected, round, state)
        if round % self._interval == 0:
            self._save(self._latest, round, state)

    def on_train_end(self, round: int, state: Any, metrics: Record) -> None:
        """Saves the last round."""
        if round % self._interval:
            self._save(self._latest, round, state)

    def _save(self, manager: checkpoint.Folder, round: int, state: Any) -> None:
        # A run that continues from here will not write lines and events of earlier rounds again.
        checkpoint.settle(self._selected)
        for flush in self._flush:
            flush()
        if first():
            workdir.sync(self._folder / "metrics.jsonl")
        checkpoint.save(manager, round, state)
        if self._wait:
            checkpoint.settle(manager)
