"""Evaluates some rounds, copies the state of the selected one, and ends a run in time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.training.records import Record, out_of_patience, select_round


class Scores(NamedTuple):
    """Adds `evaluate(state)` to the record of every `interval`-th round and of the last one."""

    evaluate: Callable[[Any], Record]
    interval: int
    rounds: int

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Evaluates the round if it is its turn."""
        if round == self.rounds or round % self.interval == 0:
            metrics.update(self.evaluate(state))


class Selection:
    """Copies the state of the selected round, see `records.select_round`."""

    state: Any = None

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Copies the state if this round is the best one so far."""
        if "accuracy" in metrics and select_round(self._records) == round:
            self.state = jax.tree.map(jnp.copy, state)  # the next round donates the state


class Patience(NamedTuple):
    """Asks to stop after `rounds` rounds without a better validation score (0: never)."""

    rounds: int
    records: list[Record]

    def on_round_end(self, round: int, state: Any, metrics: Record) -> bool:
        """Returns whether to stop."""
        return out_of_patience(self.records, self.rounds)
