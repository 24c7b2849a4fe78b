"""Shows the progress of reading, and lists the files or names at fault."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from fedjax_bn.arguments.text import shown

WAIT = 10.0  # seconds between lines of progress where stderr is not a terminal


def first_few(culprits: Sequence[str], most: int = 10) -> str:
    """Returns the first `most` culprits, whole, and the number of the others."""
    others_note = f" and {len(culprits) - most} more" if len(culprits) > most else ""
    return ", ".join(map(shown, culprits[:most])) + others_note


def progress_bar(total: int, description: str, progress: bool) -> AbstractContextManager[Any]:
    """Returns a progress bar on a terminal, else a printer of lines; both have `update(count)`."""
    if progress and not sys.stderr.isatty():
        return _in_lines(total, description)
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit="image", disable=not progress)


@contextmanager
def _in_lines(total: int, description: str) -> Iterator[SimpleNamespace]:
    """Prints to stderr how many images are done, every ten seconds and at the end."""
    count_so_far, printed_at = 0, time.monotonic()

    def update(count: int) -> None:
        nonlocal count_so_far, printed_at
        count_so_far += count
        if count_so_far == total or time.monotonic() - printed_at >= WAIT:
            printed_at = time.monotonic()
            print(
                f"{description}: {count_so_far:,} of {total:,} images", file=sys.stderr, flush=True
            )

    yield SimpleNamespace(update=update)
