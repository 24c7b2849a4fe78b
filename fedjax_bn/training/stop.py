"""Handles what may end a run: requests to stop (Ctrl-C, SIGTERM), and unwritable output.

A run ends after the current round, once its state is saved; before and after the rounds the process
ends at once. A separate thread ends it, because Python runs no signal handlers while XLA compiles,
and an exception that a handler raises during an import may be lost.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fedjax_bn.training.workdir import no_write_under_way

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 2.0  # seconds to wait for a file that is being written
_listening = threading.Event()
_rounds: list[threading.Event] = []  # the requests of the rounds under way
_saved: list[Callable[[], str]] = []  # functions that return what the runs under way have saved


def listen() -> None:
    """Makes Ctrl-C and SIGTERM end this process as described above; for the command line."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup and `&`
            signal.signal(number, lambda number, frame: None)
    # C code writes the number of a signal there at once, also while the main thread compiles.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    _listening.set()


def _watch(reading: int) -> None:
    """Acts on every signal, whatever the main thread does."""
    while True:
        (number,) = os.read(reading, 1)
        if number not in _NUMBERS:
            continue
        if _rounds and not _rounds[-1].is_set():
            _rounds[-1].set()
        else:
            end("stopped at once", 128 + number)


def end(why: str, status: int) -> None:
    """Ends the process between two writes, without Python's clean-up, which could hang or fail.

    Args:
      why: the beginning of the message, which continues with what is saved.
      status: of the process.
    """
    what = ""
    with suppress(OSError, IndexError):
        what = f"; {_saved[-1]()}"
    line = "\n" if _rounds else ""  # after the progress bar
    text = f"{line}fedjax_bn: {why}{what}: give the same command to continue\n"
    with no_write_under_way(_PATIENCE):
        # Not by `print`: the main thread may hold the lock of the stream.
        with suppress(OSError):
            os.write(2, text.encode("ascii", "backslashreplace"))
        os._exit(status)


@contextmanager
def saying(saved: Callable[[], str]) -> Iterator[None]:
    """Adds `saved()`, a text on what is saved, to the message if the process ends at once."""
    _saved.append(saved)
    try:
        yield
    finally:
        _saved.remove(saved)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Takes Ctrl-C and SIGTERM as requests to stop after the round; a second one acts at once.

    Yields:
      A function without arguments that returns whether a stop was requested. Unless `listen` was
      called, signals reach only the main thread, and in others it returns False.
    """
    requested, old = threading.Event(), {}

    def request(number: int, frame: Any) -> None:
        del frame
        requested.set()
        signal.signal(number, old[number])

    if _listening.is_set():
        _rounds.append(requested)
    elif threading.current_thread() is threading.main_thread():  # as in a notebook
        old |= {number: signal.signal(number, request) for number in _NUMBERS}
    try:
        yield requested.is_set
    finally:
        if requested in _rounds:
            _rounds.remove(requested)
        for number, handler in old.items():
            signal.signal(number, handler)


class _Console(io.TextIOWrapper):
    """Writes characters outside the encoding as escapes, and drops what cannot be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._forget()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._forget()

    def _forget(self) -> None:
        """Discards all further output, and output that is still buffered."""
        # Python would try to write its buffer when it ends, and fail with a traceback.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def endure() -> None:
    """Makes printing never fail, and flush each line; for the command line."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is not None:  # None if the process has no such stream
            old.flush()
            new = _Console(old.buffer, old.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, new)
