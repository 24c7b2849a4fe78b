"""Evaluates some rounds, copies the selected state, and ends a run early, also by a signal."""

import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.training.processes import any_asked
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


class StopRequests:
    """Takes a signal as a request to stop after the round; a second one acts as it usually does."""

    asked = False  # whether any process of the run was asked to stop

    def __init__(self) -> None:
        self._requested, self._handlers = threading.Event(), {}

    def __enter__(self) -> "StopRequests":
        # Signals reach only Python's main thread: in others nothing is requested.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup and `&`
                    self._handlers[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        self._requested.set()
        signal.signal(number, self._handlers[number])

    def on_round_end(self, round: int, state: Any, metrics: Record) -> bool:
        """Returns whether to stop, the same in all processes."""
        self.asked = any_asked(self._requested.is_set())
        return self.asked
