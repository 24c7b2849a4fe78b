"""Works through files in threads, with a bar of progress."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from fedjax_bn.engine.devices import cpu_cores

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")


def in_threads(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    description: str,
    progress: bool,
    threads: int | None = None,
) -> Iterator[_Result]:
    """Yields `function(item)` of all items in their order, computed in threads, with progress."""
    from tqdm import tqdm

    workers = min(cpu_cores(), threads or 2**16)  # volumes take much memory, so they set a limit
    # At most some ten thousand pieces of work, because each takes memory while it waits.
    step = 1 + len(items) // 10_000
    starts = range(0, len(items), step)
    wait = 0.1 if sys.stderr.isatty() else 10.0  # seconds from one line of a file to the next
    look = {"desc": description, "unit": "image", "mininterval": wait, "disable": not progress}
    with (
        tqdm(total=len(items), **look) as bar,
        ThreadPoolExecutor(workers) as pool,
        # Closed on an error, so that no further piece begins.
        closing(pool.map(lambda k: [*map(function, items[k : k + step])], starts)) as pieces,
    ):
        for results in pieces:
            bar.update(len(results))
            yield from results
