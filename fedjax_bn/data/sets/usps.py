"""USPS (Hull, 1994): 16x16 grey scans, 7291 for training and 2007 for testing."""

import bz2
import math
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path

import numpy as np

from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.arrays import check_unpacked, read_bounded
from fedjax_bn.data.sets.files import Original, corruption_named, first_existing
from fedjax_bn.engine.inputs import class_labels

_WHERE = (
    "USPS needs usps.h5, or usps.bz2 and usps.t.bz2 (unpacked or not) from the multi-class page of "
    "LIBSVM Data, csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
)
_LARGEST = 2**28  # bytes; USPS has a tenth of it


def usps(folder: Path) -> tuple[Original, Original]:
    """Training and test split, from `usps.h5` if it is there, else from LIBSVM's two files.

    Raises:
      FileNotFoundError: neither form is complete.
      ModuleNotFoundError: `usps.h5` is there, but h5py is not installed.
      ValueError: a file is corrupt, or its labels are wrong.
    """
    if (folder / "usps.h5").exists():
        path = folder / "usps.h5"
        return _read_h5(path, "train"), _read_h5(path, "test")
    train, test = (
        first_existing(folder, [f"{name}.bz2", name], _WHERE) for name in ("usps", "usps.t")
    )
    return _read_libsvm(train), _read_libsvm(test)


def _read_h5(path: Path, split: str) -> Original:
    """Group `split`: data f32[N, 256] in [0, 1], target [N] in 0..9.

    Raises:
      ModuleNotFoundError: h5py is not installed.
      ValueError: it is no HDF5 file, or a data set is missing or wrong.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs h5py; install fedjax_bn with its data extra, or give usps.bz2"
        ) from error
    with corruption_named(path), open_regular(path, math.inf) as raw, h5py.File(raw) as file:
        data, target = file[split]["data"], file[split]["target"]
        check_unpacked(data.nbytes + target.nbytes, path)
        data, target = data[()].astype(np.float64), target[()]
    return _original(data, class_labels(target, f"{path}, target,", 10), path)


def _read_libsvm(path: Path) -> Original:
    """Lines `label index:value ...`: labels 1..10 for the digits 0..9, values in [-1, 1].

    Raises:
      ValueError: a line is not of that form, or a label or value is out of range.
    """
    from sklearn.datasets import load_svmlight_file

    unpacked = bz2.open if path.suffix == ".bz2" else nullcontext
    with corruption_named(path), open_regular(path, _LARGEST) as raw, unpacked(raw) as file:
        content = BytesIO(read_bounded(file, _LARGEST))
        features, target = load_svmlight_file(content, n_features=256, zero_based=False)
    labels = class_labels(target, f"{path}", 10, first=1)
    return _original((features.toarray() + 1) / 2, labels, path)


def _original(pixels: np.ndarray, labels: np.ndarray, path: Path) -> Original:
    if pixels.shape != (len(labels), 256):
        raise ValueError(
            f"{path} has pixels of shape {pixels.shape} for {len(labels)} labels; "
            f"they must be ({len(labels)}, 256), for 16x16 images"
        )
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError(f"{path} has pixel values outside the range of its format; fetch it again")
    # truncated, not rounded, as FedBN's code does
    images = (pixels.astype(np.float32) * np.float32(255)).astype(np.uint8).reshape(-1, 16, 16)
    return Original(labels, lambda index: images[index])
