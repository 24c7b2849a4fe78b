"""Prepared digits in one NumPy archive, for any domains: see `npz` for its form."""

from pathlib import Path

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.sets.files import SIZE
from fedjax_bn.data.sets.npz_archive import Part, read_archive

_PARTS = ("train", "test")


def from_npz(path: Path) -> Dataset:
    """All samples of a `.npz` with four arrays a domain; domains in the file's order.

    `DOMAIN__train_images` and `DOMAIN__test_images` are u8[N, 28, 28, 3], `DOMAIN__train_labels`
    and `DOMAIN__test_labels` integers [N] in 0..9.

    Raises:
      ValueError: the file is corrupt, an array is missing, unknown, or of a wrong form, or a label
        is out of range.
    """
    archive, _ = read_archive(path)
    domains = tuple(_domain(name, parts, path) for name, parts in archive.items())
    try:
        return check_dataset(Dataset("digits", 10, domains, mean=(0.5,) * 3, std=(0.5,) * 3))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _domain(name: str, parts: dict[str, Part], path: Path) -> Domain:
    missing = [part for part in _PARTS if part not in parts]
    if missing:
        raise ValueError(f"{path} lacks the array {name}__{missing[0]}_images; write it again")
    if len(parts) > len(_PARTS):
        raise ValueError(
            f"{path} has an array '{name}__validation_images'; digits come divided into "
            f"{' and '.join(_PARTS)} only: leave it out, or read the file as data.name=npz"
        )
    for part, own in parts.items():
        if own.images.dtype != np.uint8 or own.images.shape[1:] != (SIZE, SIZE, 3):
            raise ValueError(
                f"{path}: {name}__{part}_images is {own.images.dtype} {own.images.shape}; "
                "it must be uint8 [N, 28, 28, 3]"
            )
    train, test = (Split(*parts[part]) for part in _PARTS)
    return Domain(name, train, None, test)
