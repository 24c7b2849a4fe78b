"""What another library imports on the way, but nobody here needs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Lets `import name` fail within the block, as if it were not installed.

    A module that is there already stays; one that is imported after the block is the real one.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for "not found"
    try:
        yield
    finally:
        del sys.modules[name]
