"""CIFAR-10-C's domains made from CIFAR-10."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.corruptions import CHUNK, corrupt
from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import array_of_blocks
from fedjax_bn.data.pixels.resize import resized
from fedjax_bn.data.sets import cifar10
from fedjax_bn.data.source import Pool

BLOCK = CHUNK  # images made and written at a time
_FORM = 1  # to be raised when the same photographs would give other pixels


def read_photographs(path: Path, photographs: Sequence[str]) -> tuple[Pool, tuple[str, ...]]:
    """CIFAR-10's "train" or "test" photographs, or both as one pool with parts; and notes.

    Raises:
      FileNotFoundError, ValueError: see `cifar10.read`.
    """
    chosen = [part for part, name in cifar10.PART_NAMES.items() if name in photographs]
    pools, notes = zip(*(cifar10.read(path, part) for part in chosen), strict=True)
    images, labels, names = (np.concatenate([pool[k] for pool in pools]) for k in range(1, 4))
    sizes = [len(pool.labels) for pool in pools]
    parts = np.repeat(np.array(chosen, np.int8), sizes) if len(chosen) > 1 else None
    return Pool("cifar10", images, labels, names, parts), tuple(n for own in notes for n in own)


def make_pools(
    origin: Pool,
    corruptions: Sequence[str],
    severities: Sequence[int],
    image_size: int,
    cache: Path | None,
    seed: int,
    progress: bool,
) -> tuple[Pool, ...]:
    """A pool for each corruption: all photographs at the first severity, then at the next.

    Args:
      origin: photographs u8[N, 32, 32, 3].
      corruptions: of `CORRUPTIONS`.
      severities: of 1 to 5.
      image_size: pixels a side; the corrupted photographs are resized to it.
      cache: folder to keep them in, or None for memory.
      seed: of the noise, at least 0.
      progress: show a bar on stderr.

    Raises:
      ModuleNotFoundError: frost or spatter, without the extra package.
    """
    many = len(severities)
    labels, names = np.tile(origin.labels, many), np.tile(origin.names, many)
    parts = None if origin.parts is None else np.tile(origin.parts, many)
    shape = (len(labels), image_size, image_size, 3)
    state = hash_of(_FORM, origin.images, list(severities), seed)
    pools = []
    with progress_bar(len(corruptions) * len(labels), "corrupting", progress) as shown:
        for name in corruptions:

            def blocks(name: str = name) -> Iterator[np.ndarray]:
                for severity in severities:
                    for first in range(0, len(origin.images), BLOCK):
                        photographs = origin.images[first : first + BLOCK]
                        made = corrupt(photographs, name, severity, seed, first // BLOCK)
                        yield resized(made, (image_size, image_size, 3))
                        shown.update(len(made))

            images = array_of_blocks(cache, f"cifar10_c-{name}-{image_size}-{state}", shape, blocks)
            pools.append(Pool(name, images, labels, names, parts))
    return tuple(pools)
