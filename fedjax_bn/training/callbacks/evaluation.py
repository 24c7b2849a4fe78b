"""Evaluates some rounds, and copies the state of the selected one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.training.records import Record, select_round


class Scores:
    """Adds the scores of every `interval`-th round and of the last one to its record.

    Args:
      evaluate: `evaluate(state) -> record`.
      interval: rounds between evaluations.
      rounds: of the whole run.
    """

    def __init__(self, evaluate: Callable[[Any], Record], interval: int, rounds: int) -> None:
        self._evaluate, self._interval, self._rounds = evaluate, interval, rounds

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Evaluates the round if it is its turn."""
        if round == self._rounds or round % self._interval == 0:
            metrics.update(self._evaluate(state))


class Selection:
    """Copies the state of the selected round, see `records.select_round`.

    Args:
      records: the run's, to which the loop appends.
    """

    state: Any = None

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Copies the state if this round is the best one so far."""
        if "accuracy" in metrics and select_round(self._records) == round:
            self.state = jax.tree.map(jnp.copy, state)  # the next round donates the state
