"""Files from outside, opened as what they must be: regular files of a stated size at most.

A named pipe blocks whoever opens it, and an endless device, or a link to one, fills the memory. So
every reader of labels, lists, tables, archives and images opens its files here.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

_LARGEST_TEXT = 2**28  # bytes of a text file that is read whole
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class Refused(ValueError):
    """A file is not opened; the message names it. `strerror` is the reason alone."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is not read: {reason}")
        self.strerror = reason


def open_regular(path: str | Path, most: float) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading.

    Args:
      path: of the file.
      most: bytes that it may have.

    Raises:
      Refused (a ValueError): it is a named pipe, a device, a folder, or larger.
      OSError: it is not there, or may not be read.
    """
    path = Path(path)
    # Without O_NONBLOCK, to open a named pipe waits for a writer.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        # Of the open file: by now its name may belong to another one.
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            kind = _KINDS.get(stat.S_IFMT(about.st_mode), "not a regular file")
            raise Refused(path, f"it is {kind}; put a regular file in its place")
        if about.st_size > most:
            raise Refused(
                path,
                f"it has {about.st_size:,} bytes, and at most {most:,} of such a file are read",
            )
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | Path, most: int = _LARGEST_TEXT) -> bytes:
    """Returns the bytes of a regular file; arguments and errors as of `open_regular`."""
    with open_regular(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: str | Path, most: int = _LARGEST_TEXT, errors: str = "strict") -> str:
    """Returns the text of a regular file in UTF-8, with or without a byte order mark.

    Raises:
      ValueError, OSError: as `open_regular`, or it is not such a text.
    """
    text = read_regular(path, most).decode("utf-8-sig", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")
