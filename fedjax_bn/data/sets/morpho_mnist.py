"""Morpho-MNIST (Castro et al., 2019): MNIST with strokes thinned, thickened, swollen or broken.

    global/  a third each of plain, thinned and thickened digits
    local/   a third each of plain, swollen and fractured digits

each with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same for t10k. The folders
plain, thin, thic, swel and frac, if there, are no domains by default: `global` and `local` are made
of them.

FedBN, Appendix G and Table 17, tests models of the digits benchmark on the two as unseen clients.

Reference: Castro et al., "Morpho-MNIST: Quantitative Assessment and Diagnostics for Representation
Learning", JMLR 20(178), 2019.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.pools import parts_of
from fedjax_bn.data.sets.files import Original, to_digits
from fedjax_bn.data.sets.idx import mnist
from fedjax_bn.data.source import Pool, Source, check_source

_FOLDERS = ("global", "local", "plain", "thin", "thic", "swel", "frac")
_COUNTS = (60_000, 10_000)
_WHERE = (
    "Morpho-MNIST needs the folders global and local, each with (train|t10k)-images-idx3-ubyte.gz "
    "and (train|t10k)-labels-idx1-ubyte.gz (the unpacked zip files listed in the README of "
    "github.com/dccastro/Morpho-MNIST)"
)


def load(path: str | Path, *, folders: Sequence[str] = ("global", "local")) -> Source:
    """Morpho-MNIST as u8[N, 28, 28, 3], one domain a folder, with its own training and test part.

    Args:
      path: the folder that holds them.
      folders: which, of `_FOLDERS`; the domains are called "morpho_global" and so on.

    Returns:
      Source "morpho_mnist", normalized by (0.5, 0.5) as the digits benchmark is. Samples of a part
      are named by the digit of MNIST that they come from, such as "train/00017", in every folder:
      the plain, thinned and broken forms of one digit belong together.

    Raises:
      FileNotFoundError: folders or files are missing; all missing folders are named.
      ValueError: a file is corrupt, or a folder unknown.
    """
    path = Path(path)
    unknown = [name for name in folders if name not in _FOLDERS]
    if unknown or not folders:
        raise ValueError(f"folders {unknown} are unknown; choose from {', '.join(_FOLDERS)}")
    missing = [name for name in folders if not (path / name).is_dir()]
    if missing:
        raise FileNotFoundError(f"{path} lacks the folders {', '.join(missing)}; {_WHERE}")
    pools, notes = [], []
    for name in folders:
        parts = mnist(path / name, _WHERE)
        counts = tuple(len(part.labels) for part in parts)
        if counts != _COUNTS:
            notes.append(
                f"{path / name} has {counts[0]} training and {counts[1]} test images, Morpho-MNIST "
                f"has {_COUNTS[0]} and {_COUNTS[1]}: a reduced copy"
            )
        pools.append(_pool(f"morpho_{name}", *parts))
    digits = tuple(str(digit) for digit in range(10))
    half = (0.5,) * 3
    return check_source(Source("morpho_mnist", digits, tuple(pools), half, half, tuple(notes)))


def _pool(name: str, train: Original, test: Original) -> Pool:
    sizes = {"train": len(train.labels), "test": len(test.labels)}
    images = [to_digits(part.read(np.arange(len(part.labels)))) for part in (train, test)]
    return Pool(
        name=name,
        images=np.concatenate(images),
        labels=np.concatenate([train.labels, test.labels]),
        names=np.array([f"{part}/{k:05}" for part, size in sizes.items() for k in range(size)]),
        parts=parts_of(sizes),
    )
