"""Arrays made block by block, kept in memory or in a cache; and what the makers share."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.pixels.cache import cached_array


def array_of_blocks(
    cache: Path | None, name: str, shape: Sequence[int], blocks: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """The array that the blocks, one after the other, make up.

    Args:
      cache: folder for it, or None to keep it in memory.
      name: tells the array from all others in the cache, see `cache.cached_array`.
      shape: of the whole.
      blocks: `blocks()` yields u8[n, ...]; called only if the cache does not have the array.

    Returns:
      u8[shape]; memory-mapped and read-only, if it is in a cache.

    Raises:
      OSError: the cache cannot be written.
    """
    if cache is None:
        array, first = np.empty(shape, np.uint8), 0
        for block in blocks():
            array[first : first + len(block)] = block
            first += len(block)
        return array

    def make(write: Callable[[np.ndarray], None]) -> tuple[str, ...]:
        for block in blocks():
            write(block)
        return ()

    return cached_array(cache, name, shape, make)[0]


def resized(blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Blocks u8[n, H, W, 3] as u8[n, size, size, 3], by Pillow's bilinear filter where need be."""
    from PIL import Image

    for block in blocks:
        if block.shape[1:3] == (size, size):
            yield block
            continue
        images = (Image.fromarray(image) for image in block)
        yield np.stack([np.asarray(i.resize((size, size), Image.BILINEAR)) for i in images])


def hash_of(*content: object) -> str:
    """Twenty hexadecimal digits that change with any array's bytes or other value's `repr`."""
    state = hashlib.sha256()
    for one in content:
        if isinstance(one, np.ndarray):
            state.update(f"{one.dtype.str} {one.shape}\n".encode())
            for first in range(0, len(one), 10_000):  # arrays may be memory-mapped and large
                state.update(np.ascontiguousarray(one[first : first + 10_000]))
        else:
            state.update(f"{one!r}\n".encode())
    return state.hexdigest()[:20]


def progress_bar(total: int, description: str, progress: bool) -> Any:
    """A progress bar on stderr; into a log file it writes a line every ten seconds at most."""
    from tqdm import tqdm

    wait = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=description, unit="image", disable=not progress, mininterval=wait)
