"""Text files that list a dataset's images, a line `FILE LABEL` each."""

from pathlib import Path

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_text


def read_list(path: Path) -> tuple[list[str], np.ndarray]:
    """The files, with / in their names, and their labels i64[N] as written.

    Raises:
      FileNotFoundError: there is no such list.
      ValueError: it is no text, or some lines are not of that form; the first ten are named.
    """
    if not path.exists():
        raise FileNotFoundError(f"the list {path} is missing; fetch it again")
    try:
        lines = read_text(path).splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"the list {path} is no text ({error}); fetch it again") from error
    rows = [(number, line.rsplit(None, 1)) for number, line in enumerate(lines, 1) if line.strip()]
    wrong = [str(number) for number, row in rows if len(row) != 2 or not is_label(row[1])]
    if wrong:
        raise ValueError(f"{path}: lines must be FILE LABEL, but these are not: {first_few(wrong)}")
    if not rows:
        raise ValueError(f"the list {path} is empty; fetch it again")
    names = [row[0].strip().replace("\\", "/") for _, row in rows]
    return names, np.array([int(row[1]) for _, row in rows], np.int64)


def is_label(text: str) -> bool:
    """Whether a word is a label as lists have them: up to nine digits."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def without_suffix(name: str) -> str:
    """The name without its suffix: copies of a dataset differ in the format of their images."""
    head, dot, suffix = name.rpartition(".")
    return head if dot and "/" not in suffix else name
