"""SVHN and SynthDigits: MATLAB files with X u8[32, 32, 3, N] and y [N, 1]."""

import math
from pathlib import Path

import numpy as np

from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.arrays import check_unpacked
from fedjax_bn.data.sets.files import Original, corruption_named, first_existing
from fedjax_bn.engine.inputs import class_labels

_SVHN_WHERE = (
    "SVHN needs train_32x32.mat and test_32x32.mat (format 2, cropped digits), "
    "from ufldl.stanford.edu/housenumbers"
)
_BYTES = {"uint8": 1, "int8": 1, "logical": 1}  # of a number by its kind, where they are not 8
_SYNTH_WHERE = (
    "SynthDigits needs synth_train_32x32.mat and synth_test_32x32.mat, "
    "from Yaroslav Ganin's page, yaroslav.ganin.net"
)


def svhn(folder: Path) -> tuple[Original, Original]:
    """Training and test split of SVHN's cropped digits (Netzer et al., 2011); label 10 means 0.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is corrupt, or its labels are not in 1..10.
    """
    paths = [
        first_existing(folder, [f"{name}_32x32.mat"], _SVHN_WHERE) for name in ("train", "test")
    ]
    train, test = (_read_mat(path, first=1) for path in paths)
    return _ten_is_zero(train), _ten_is_zero(test)


def synth_digits(folder: Path) -> tuple[Original, Original]:
    """Training and test split of SynthDigits (Ganin & Lempitsky, 2015); labels are the digits.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is corrupt, or its labels are not in 0..9.
    """
    names = ("synth_train_32x32.mat", "synth_test_32x32.mat")
    train, test = (
        _read_mat(first_existing(folder, [name], _SYNTH_WHERE), first=0) for name in names
    )
    return train, test


def _ten_is_zero(split: Original) -> Original:
    # read_mat has counted from 1: the digit 1 is 0 there, and the digit 0 is 9
    return split._replace(labels=(split.labels + np.int32(1)) % np.int32(10))


def _read_mat(path: Path, first: int) -> Original:
    """One such file; its labels, counted from `first`, become 0..9.

    Raises:
      ValueError: it is no MATLAB file, lacks X or y, or their shapes or labels are wrong.
    """
    from scipy.io import loadmat, whosmat

    with corruption_named(path), open_regular(path, math.inf) as file:
        there = [(math.prod(shape), kind) for _, shape, kind in whosmat(file)]
        check_unpacked(sum(_BYTES.get(kind, 8) * count for count, kind in there), path)
        file.seek(0)
        content = loadmat(file, variable_names=["X", "y"])
    for key in ("X", "y"):
        if key not in content:
            raise ValueError(f"{path} lacks the variable {key}; fetch it again")
    images, labels = content["X"], content["y"].ravel()
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise ValueError(
            f"{path} has X of {images.dtype} {images.shape} for {len(labels)} labels; "
            f"it must be uint8 (32, 32, 3, {len(labels)})"
        )
    labels = class_labels(labels, f"{path}, y", 10, first)
    # pick before turning the axes: the whole of SynthDigits is 1.5 GB
    return Original(labels, lambda index: np.moveaxis(images[..., index], -1, 0))
