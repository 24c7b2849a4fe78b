"""Prepared digits in one NumPy archive, for any domains."""

from pathlib import Path
from zipfile import is_zipfile

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.sets.files import SIZE, corruption_named

PARTS = ("train_images", "train_labels", "test_images", "test_labels")


def from_npz(path: Path) -> Dataset:
    """All samples of a `.npz` with four arrays a domain; domains in the file's order.

    `DOMAIN__train_images` and `DOMAIN__test_images` are u8[N, 28, 28, 3], `DOMAIN__train_labels`
    and `DOMAIN__test_labels` integers [N] in 0..9.

    Raises:
      ValueError: the file is corrupt, an array is missing, unknown, or of a wrong form, or a label
        is out of range.
    """
    if not is_zipfile(path):
        raise ValueError(f"{path} is no .npz archive, or is cut short; fetch or write it again")
    with corruption_named(path), np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    names = list(dict.fromkeys(key.rpartition("__")[0] for key in arrays))
    for key in arrays:
        name, _, part = key.rpartition("__")
        if part not in PARTS or not name:
            raise ValueError(
                f"{path} has an array {key!r}; allowed are DOMAIN__PART, PART of {PARTS}"
            )
    if not names:
        raise ValueError(f"{path} holds no arrays; it needs DOMAIN__PART, PART of {PARTS}")
    domains = tuple(_domain(arrays, name, path) for name in names)
    try:
        return check_dataset(Dataset("digits", 10, domains, mean=(0.5,) * 3, std=(0.5,) * 3))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _domain(arrays: dict[str, np.ndarray], name: str, path: Path) -> Domain:
    for part in PARTS:
        if f"{name}__{part}" not in arrays:
            raise ValueError(f"{path} lacks the array {name}__{part}; write it again")
    train, test = (_split(arrays, f"{name}__{kind}", path) for kind in ("train", "test"))
    return Domain(name, train, None, test)


def _split(arrays: dict[str, np.ndarray], key: str, path: Path) -> Split:
    images, labels = arrays[f"{key}_images"], arrays[f"{key}_labels"]
    if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE, 3):
        raise ValueError(
            f"{path}: {key}_images is {images.dtype} {images.shape}; "
            "it must be uint8 [N, 28, 28, 3]"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise ValueError(
            f"{path}: {key}_labels is {labels.dtype} {labels.shape}; it must be integers [N]"
        )
    return Split(images, labels.astype(np.int32))
