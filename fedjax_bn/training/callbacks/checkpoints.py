"""Saves the selected round, and every so often the latest one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.records import Record, select_round
from fedjax_bn.training.together import first


class Checkpoints:
    """Saves rounds in a workdir; comes after the callbacks that write what a round leaves.

    Args:
      folder: the workdir.
      interval: rounds between checkpoints; the last round is always saved.
      records: the run's, to which the loop appends.
      flush: are called before a save: they wait until the disk has what other callbacks wrote.
      wait: whether to wait until the disk has a checkpoint before the next round begins.
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
        self._stack, self._saved_round = ExitStack(), 0

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
            self._saved_round = round

    def on_train_end(self, round: int, state: Any, metrics: Record) -> None:
        """Saves the last round."""
        del metrics
        if self._saved_round != round:
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
