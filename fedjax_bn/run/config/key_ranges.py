"""Ranges of keys that are paths or lists, or have a gap: what each allows, and in which words."""

import os
import re
from typing import Any

from fedjax_bn.arguments.ranges import OF_TEXT, Range, printable


def _is_path(path: str) -> bool:
    unknown_home = path.startswith("~") and os.path.expanduser(path) == path
    return printable(path) and not unknown_home


def _is_folder(path: str) -> bool:
    """Returns whether a text is empty or a path that begins with /, ./, ../ or ~."""
    # Without such a beginning, a slip such as "None" would make a folder of that name.
    begins = path.startswith(("./", "../", "~")) or os.path.isabs(path)
    return not path or (begins and _is_path(path))


def _is_bucket(url: str) -> bool:
    return bool(re.match("(gs|s3|az|hf)://.", url)) and printable(url)  # which etils opens


def _are_epochs(entries: tuple[Any, ...]) -> bool:
    matches = (re.fullmatch(r"0{0,9}[1-9]\d{0,4}", str(entry), re.ASCII) for entry in entries)
    return len(entries) <= 4096 and all(matches)


def _are_patterns(texts: tuple[str, ...]) -> bool:
    pairs = len(texts) % 2 == 0
    return pairs and all(printable(pattern) and pattern.count("{}") == 1 for pattern in texts)


def _is_expression(pattern: str) -> bool:
    try:
        return printable(pattern) and bool(re.compile(pattern))
    except (re.error, RecursionError, OverflowError):
        return False


EPOCHS = Range("whole numbers above 0 and below 100000", _are_epochs)
PATH = Range(f"a path ({OF_TEXT}) whose ~NAME, if any, is a user here", _is_path)
FOLDER = Range(
    "empty for none, or a folder that begins with /, ./, ../ or ~ (of ~NAME a user here)",
    _is_folder,
)
FOLDER_OR_BUCKET = Range(
    f"{FOLDER.text}, or a bucket gs://NAME, s3://NAME, az://NAME or hf://NAME",
    lambda text: _is_folder(text) or _is_bucket(text),
)
PATTERNS = Range(
    "patterns of an image and of its mask in turn, each with {} once, such as "
    "images/{}.png,masks/{}_mask.png",
    _are_patterns,
)
EXPRESSION = Range("a regular expression of Python", _is_expression)
WINDOW = Range("0, or from 2 to 1000000", lambda value: value == 0 or 2 <= value <= 1_000_000)
