"""Ends a run whose validation no longer improves."""

from typing import Any, NamedTuple

from fedjax_bn.training.records import Record, out_of_patience


class Patience(NamedTuple):
    """Asks to stop after `rounds` rounds without a better validation score (0: never).

    Attributes:
      rounds: `config.patience`.
      records: the run's, to which the loop appends.
    """

    rounds: int
    records: list[Record]

    def on_round_end(self, round: int, state: Any, metrics: Record) -> bool:
        """Returns whether to stop."""
        del round, state, metrics
        return out_of_patience(self.records, self.rounds)
