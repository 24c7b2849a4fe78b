"""Opens files from outside only if they are regular files of at most a given size.

A named pipe blocks whoever opens it, and an endless device, or a link to one, fills the memory. All
readers of labels, lists, tables, archives and images open their files here.
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
    """Reports a file that is not opened; the message names it, `strerror` is only the reason."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is not read: {reason}")
        self.strerror = reason


def open_regular(path: str | Path, most: float) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading.

    Args:
      path: the file.
      most: the largest size in bytes.

    Raises:
      Refused (a ValueError): the file is not a regular one, or is larger.
      OSError: the file is missing or not readable.
    """
    path = Path(path)
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        # Asks the open file, because the path may by now be another file.
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
    """Returns the bytes of a regular file; arguments and errors are those of `open_regular`."""
    with open_regular(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: str | Path, most: int = _LARGEST_TEXT, errors: str = "strict") -> str:
    """Returns the text of a regular UTF-8 file, without byte order mark, with LF line ends.

    Raises:
      ValueError, OSError: as in `open_regular`, or the file is not UTF-8.
    """
    text = read_regular(path, most).decode("utf-8-sig", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")
