"""Arrays of images made block by block, kept in memory or in a cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.pixels.cache import Write, cached_array


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

    def make(write: Write) -> tuple[str, ...]:
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
