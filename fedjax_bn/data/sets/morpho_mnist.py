"""Morpho-MNIST (Castro et al., 2019): MNIST with strokes thinned, thickened, swollen or broken.

    global/  a third each of plain, thinned and thickened digits
    local/   a third each of plain, swollen and fractured digits

each with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same for t10k. `global`
and `local` are made of the folders plain, thin, thic, swel and frac, which are not read.

FedBN, Appendix G and Table 17, tests models of the digits benchmark on the two as unseen clients.
`load_beside_digits` reads both from the folder of the digits benchmark, with Morpho-MNIST in it:

    MNIST/  SVHN/  USPS/  SynthDigits/  MNIST-M/     as fedjax_bn/data/sets/digits.py describes
    Morpho-MNIST/global/  Morpho-MNIST/local/        as above

References: Castro et al., "Morpho-MNIST: Quantitative Assessment and Diagnostics for Representation
Learning", JMLR 20(178), 2019; Li et al., "FedBN", ICLR 2021, appendix G.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.pixels.raster import UPRIGHT
from fedjax_bn.data.sets import digits
from fedjax_bn.data.sets.digit_files import mnist, to_digits
from fedjax_bn.data.source import TEST, Pool, Source, check_source, parts_of

_FOLDERS = ("global", "local")
_COUNTS = (60_000, 10_000)
_UNSEEN = ("morpho_global", "morpho_local")
_SAME = ("mnist", "mnist_m")  # whose digits are Morpho-MNIST's
_WHERE = (
    "Morpho-MNIST needs the folders global and local, each with (train|t10k)-images-idx3-ubyte.gz "
    "and (train|t10k)-labels-idx1-ubyte.gz (the unpacked zip files listed in the README of "
    "github.com/dccastro/Morpho-MNIST)"
)


def load(path: str | Path) -> Source:
    """Returns Morpho-MNIST as u8[N, 28, 28, 3], one domain a folder, with its published parts.

    Args:
      path: the folder that holds `global` and `local`.

    Returns:
      Source "morpho_mnist" with the domains "morpho_global" and "morpho_local", normalized by
      (0.5, 0.5) as the digits benchmark is. Samples of a part are named by the digit of MNIST that
      they come from, such as "train/00017", in both: the forms of one digit belong together.

    Raises:
      FileNotFoundError: folders or files are missing; all missing folders are named.
      ValueError: a file is corrupt.
    """
    path = Path(path)
    if missing := [name for name in _FOLDERS if not (path / name).is_dir()]:
        raise FileNotFoundError(f"{path} lacks the folders {', '.join(missing)}; {_WHERE}")
    pools, notes = [], []
    for name in _FOLDERS:
        both = mnist(path / name, _WHERE)
        counts = tuple(len(split.labels) for split in both)
        if counts != _COUNTS:
            notes.append(
                f"{path / name} has {counts[0]} training and {counts[1]} test images, Morpho-MNIST "
                f"has {_COUNTS[0]} and {_COUNTS[1]}: a reduced copy"
            )
        sizes = dict(zip(("train", "test"), counts, strict=True))
        images = [to_digits(split.read(np.arange(len(split.labels)))) for split in both]
        labels = np.concatenate([split.labels for split in both])
        names = np.array([f"{part}/{k:05}" for part, n in sizes.items() for k in range(n)])
        parts = parts_of(sizes)
        pools.append(Pool(f"morpho_{name}", np.concatenate(images), labels, names, parts))
    classes, half = tuple(map(str, range(10))), (0.5,) * 3
    return check_source(Source("morpho_mnist", classes, tuple(pools), half, half, tuple(notes)))


def load_beside_digits(
    path: str | Path,
    *,
    target: Sequence[str],
    seed: int = 0,
    fraction: float | None = None,
    truncate: bool | None = None,
    orientation: str = UPRIGHT,
) -> Dataset:
    """Returns the digits benchmark and, after it, morpho_global and morpho_local, which only test.

    Args:
      path: the folder.
      target: the unseen domains; both of Morpho-MNIST's must be among them.
      seed, fraction, truncate, orientation: see `digits.load`.

    Returns:
      Dataset "digits_morpho". It has Morpho-MNIST's published test part, 10,000 images each, made
      of the digits of MNIST's published test part. MNIST and MNIST-M, which show these digits too,
      train on their published training parts alone, so that no digit both trains and tests.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is corrupt, or Morpho-MNIST is not a target.
    """
    if missing := [name for name in _UNSEEN if name not in target]:
        raise ValueError(
            f"digits_morpho has only test samples of {' and '.join(missing)}: set "
            f"config.target={','.join(_UNSEEN)}"
        )
    how = {"seed": seed, "fraction": fraction, "truncate": truncate, "orientation": orientation}
    known = digits.load(path, **how, whole=target, published=_SAME)
    unseen = []
    for pool in load(Path(path) / "Morpho-MNIST").pools:
        tests = pool.parts == TEST
        split = Split(pool.images[tests], pool.labels[tests], pool.names[tests])
        unseen.append(Domain(pool.name, None, None, split))
    return check_dataset(known._replace(name="digits_morpho", domains=(*known.domains, *unseen)))
