"""What may end a run: requests to stop (Ctrl-C and SIGTERM), and an output that cannot be written.

A run ends behind the round that is under way, whose state it saves; where no round is under way,
the process ends at once. It does so in a thread of its own: while XLA compiles, Python runs no
handler of signals, and what a handler raises while modules are imported may be swallowed there.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fedjax_bn.run.files.workdir import no_write_under_way

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 2.0  # seconds that a file which is being written may take
_listening = threading.Event()
_rounds: list[threading.Event] = []  # the requests of the rounds under way
_saved: list[Callable[[], str]] = []  # what is said of the runs under way


def listen() -> None:
    """Makes Ctrl-C and SIGTERM end this process as the module says; for the command line."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and `&` have it
            signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    _listening.set()


def _watch(reading: int) -> None:
    """Acts on every signal, whatever the main thread does."""
    while True:
        (number,) = os.read(reading, 1)
        if number not in _NUMBERS:
            continue
        under_way = _rounds[-1:]
        if under_way and not under_way[0].is_set():
            under_way[0].set()
        else:
            _end(number)


def _end(number: int) -> None:
    end("stopped at once", 128 + number)


def end(why: str, status: int) -> None:
    """Ends the process between two writes, without what could hang or fail on the way out.

    Args:
      why: the beginning of a sentence, which goes on with what is saved.
      status: of the process.
    """
    what = ""
    with suppress(OSError, IndexError):
        what = f"; {_saved[-1]()}"
    text = f"fedjax_bn: {why}{what}: give the same command to go on\n"
    if _rounds:  # behind the progress bar
        text = f"\n{text}"
    with no_write_under_way(_PATIENCE):
        with suppress(OSError):
            os.write(2, text.encode("ascii", "backslashreplace"))
        os._exit(status)


@contextmanager
def saying(saved: Callable[[], str]) -> Iterator[None]:
    """Says so if the process ends at once; `saved()` is a part of a sentence on what is saved."""
    _saved.append(saved)
    try:
        yield
    finally:
        _saved.remove(saved)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the round; a second one acts at once.

    Yields:
      A function without arguments that says whether a stop was asked for. In another thread than
      the main one, where Python gives no signals, it never is.
    """
    requested = threading.Event()
    if _listening.is_set():
        _rounds.append(requested)
        try:
            yield requested.is_set
        finally:
            _rounds.remove(requested)
    elif threading.current_thread() is threading.main_thread():
        with _handled(requested):
            yield requested.is_set
    else:
        yield requested.is_set


@contextmanager
def _handled(requested: threading.Event) -> Iterator[None]:
    """The same without `listen`, as in a notebook."""

    def request(number: int, frame: Any) -> None:
        del frame
        requested.set()
        signal.signal(number, old[number])

    old = {number: signal.signal(number, request) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class _Console(io.TextIOWrapper):
    """Spells what cannot be shown in escapes, and loses what cannot be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return self._forget(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._forget("")

    def _forget(self, text: str) -> int:
        """From now on nothing is written, what is still held back included."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(text)


def endure() -> None:
    """Makes messages of this process harmless, line by line; for the command line."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is not None:  # as without a terminal
            old.flush()
            new = _Console(old.buffer, old.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, new)
