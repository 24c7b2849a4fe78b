"""MNIST in its idx format (LeCun et al., 1998).

An idx file is a big-endian header, two zero bytes, a type (8 for u8) and the number of axes, then
the length of each axis as u32, then the values.
"""

import gzip
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.arrays import check_unpacked, read_bounded
from fedjax_bn.data.sets.files import Original, corruption_named, first_existing
from fedjax_bn.engine.inputs import class_labels

_WHERE = (
    "MNIST needs (train|t10k)-images-idx3-ubyte and (train|t10k)-labels-idx1-ubyte, "
    "optionally .gz, from yann.lecun.com/exdb/mnist or any of its mirrors"
)


def mnist(folder: Path, where: str = _WHERE) -> tuple[Original, Original]:
    """Training and test split of MNIST in `folder`, or in its `raw` folder as torchvision has it.

    Args:
      folder: with the four files.
      where: what belongs there and where to fetch it, for the error.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is no idx file, is cut short, or its labels are no digits.
    """
    folder = folder / "raw" if (folder / "raw").is_dir() else folder
    return _split(folder, "train", where), _split(folder, "t10k", where)


def _split(folder: Path, name: str, where: str) -> Original:
    image_path = _find(folder, f"{name}-images", "idx3-ubyte", where)
    label_path = _find(folder, f"{name}-labels", "idx1-ubyte", where)
    images, labels = _read_idx(image_path, axes=3), _read_idx(label_path, axes=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{image_path} has {len(images)} images but {label_path.name} {len(labels)} labels; "
            "fetch both again"
        )
    return Original(class_labels(labels, f"{label_path}", 10), lambda index: images[index])


def _find(folder: Path, stem: str, kind: str, where: str) -> Path:
    names = [f"{stem}{joint}{kind}{end}" for end in ("", ".gz") for joint in ("-", ".")]
    return first_existing(folder, names, where)


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """The u8 array of an idx file with that number of axes, unzipped if its name ends in .gz.

    Raises:
      ValueError: the header is not that of such a file, or the values do not fill the shape.
    """
    expected = bytes([0, 0, 8, axes])
    unpacked = gzip.open if path.suffix == ".gz" else nullcontext
    with corruption_named(path), open_regular(path, math.inf) as raw, unpacked(raw) as file:
        head = file.read(4 + 4 * axes)
        shape = tuple(int(side) for side in np.frombuffer(head[4:], ">u4"))
        sound = head[:4] == expected and len(shape) == axes
        check_unpacked(math.prod(shape) if sound else 0, path)
        values = read_bounded(file, math.prod(shape)) if sound else b""
    if not sound:
        raise ValueError(
            f"{path} is no idx file of bytes with {axes} axes (it begins with {head[:4].hex()}, "
            f"not {expected.hex()}); fetch it again"
        )
    if len(values) != math.prod(shape):
        raise ValueError(
            f"{path} has {len(values)} values where its header says {shape}; fetch it again"
        )
    return np.frombuffer(values, np.uint8).reshape(shape)
