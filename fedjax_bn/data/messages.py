"""What the user is told: how far reading is, and which files or names are at fault."""

import sys
from collections.abc import Sequence
from typing import Any

from fedjax_bn.names import shown


def first_few(culprits: Sequence[str], most: int = 10) -> str:
    """Culprits one after the other, and how many more there are than `most`."""
    more = f" and {len(culprits) - most} more" if len(culprits) > most else ""
    return ", ".join(map(shown, culprits[:most])) + more


def progress_bar(total: int, description: str, progress: bool) -> Any:
    """A progress bar on stderr; into a log file it writes a line every ten seconds at most."""
    from tqdm import tqdm

    wait = 0.1 if sys.stderr.isatty() else 10.0  # seconds
    return tqdm(total=total, desc=description, unit="image", disable=not progress, mininterval=wait)
