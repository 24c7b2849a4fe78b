"""Ends a run after the round in which Ctrl-C or SIGTERM asked for it."""

import signal
import threading
from typing import Any

from fedjax_bn.training.records import Record
from fedjax_bn.training.together import any_asked


class StopRequests:
    """Takes a signal as a request to stop after the round; a second one acts as it usually does.

    Attributes:
      asked: whether any process of the run was asked to stop.
    """

    asked = False

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
