"""What the user is told: how far reading is, and which files or names are at fault."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from fedjax_bn.arguments.text import short

WAIT = 10.0  # seconds between lines that are no terminal's


def first_few(culprits: Sequence[str], most: int = 10) -> str:
    """Culprits one after the other, long ones cut, and how many more there are than `most`."""
    more = f" and {len(culprits) - most} more" if len(culprits) > most else ""
    return ", ".join(map(short, culprits[:most])) + more


def progress_bar(total: int, description: str, progress: bool) -> AbstractContextManager[Any]:
    """A progress bar on a terminal, else plain lines; its `update(count)` says what is done."""
    if progress and not sys.stderr.isatty():
        return _in_lines(total, description)
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit="image", disable=not progress)


class _Lines(NamedTuple):
    """What stands in a bar's place."""

    update: Callable[[int], None]


@contextmanager
def _in_lines(total: int, description: str) -> Iterator[_Lines]:
    """Tells on stderr how many images are done, every ten seconds and last, in plain lines."""
    done, told = 0, time.monotonic()

    def update(count: int) -> None:
        nonlocal done, told
        done += count
        if done == total or time.monotonic() - told >= WAIT:
            told = time.monotonic()
            print(f"{description}: {done:,} of {total:,} images", file=sys.stderr, flush=True)

    yield _Lines(update)
