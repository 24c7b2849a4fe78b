"""Reads files whole."""

from pathlib import Path
from typing import BinaryIO


class Refused(ValueError):
    """Reports a file whose content is refused; the message names it."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is not read: {reason}")
        self.strerror = reason


def open_regular(path: str | Path, most: float = 0) -> BinaryIO:
    """Opens a file for reading bytes."""
    del most
    return open(path, "rb")


def read_regular(path: str | Path, most: float = 0) -> bytes:
    """Returns the bytes of a file."""
    del most
    return Path(path).read_bytes()


def read_text(path: str | Path, most: float = 0, errors: str = "strict") -> str:
    """Returns the text of a UTF-8 file, without byte order mark, with LF line ends.

    Raises:
      ValueError, OSError: the file is not UTF-8, or cannot be read.
    """
    del most
    return Path(path).read_text("utf-8-sig", errors)
