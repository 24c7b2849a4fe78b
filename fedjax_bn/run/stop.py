"""Requests to stop a run: Ctrl-C and SIGTERM."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the round; a second one acts at once.

    Yields:
      A function without arguments that says whether a stop was asked for. In another thread than
      the main one, where Python gives no signals, it never is.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def request(number: int, frame: Any) -> None:
        del frame
        requested.set()
        signal.signal(number, old[number])

    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, request) for number in numbers}
    try:
        yield requested.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
