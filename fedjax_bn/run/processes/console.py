"""Standard output and error that end no run: nobody reads them, their disk is full, ASCII only."""

import io
import os
import sys


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
