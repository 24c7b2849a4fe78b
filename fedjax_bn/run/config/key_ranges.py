"""Ranges of keys that are paths or lists, or have a gap: what each allows, and in which words."""

import os
import re
from typing import Any

from fedjax_bn.arguments.ranges import OF_TEXT, Range, printable


def _is_path(text: str) -> bool:
    unknown_home = text.startswith("~") and os.path.expanduser(text) == text
    return printable(text) and not unknown_home


def _is_folder(text: str) -> bool:
    """Returns whether a text is empty or a path that begins with /, ./, ../ or ~."""
    # Without such a beginning, a slip such as "None" would make a folder of that name.
    begins = text.startswith(("./", "../", "~")) or os.path.isabs(text)
    return not text or (begins and _is_path(text))


def _is_bucket(text: str) -> bool:
    return bool(re.match("(gs|s3|az|hf)://.", text)) and printable(text)  # which etils opens


def _are_epochs(entries: tuple[Any, ...]) -> bool:
    found = (re.fullmatch(r"0{0,9}[1-9]\d{0,4}", str(entry), re.ASCII) for entry in entries)
    return len(entries) <= 4096 and all(found)


def _are_patterns(texts: tuple[str, ...]) -> bool:
    pairs = len(texts) % 2 == 0
    return pairs and all(printable(text) and text.count("{}") == 1 for text in texts)


def _is_expression(text: str) -> bool:
    try:
        return printable(text) and bool(re.compile(text))
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
