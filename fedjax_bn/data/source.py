"""Defines what a reader of a dataset returns: pools of named samples, not yet divided."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.domain import check_names_differ
from fedjax_bn.data.labels import PyTree, leaves_of
from fedjax_bn.engine.inputs import as_images, class_labels

TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
_PART_NAMES = PARTS | {"training": TRAIN, "val": VALIDATION, "valid": VALIDATION, "testing": TEST}


class Pool(NamedTuple):
    """All samples of one domain."""

    name: str  # of the domain
    images: np.ndarray  # u8[N, H, W, C], or f32[N, ...]; may be memory-mapped
    labels: PyTree  # i32[N], indices into the source's classes; or a tree, see `data.labels`
    # str[N], the origin of each sample, such as its path in the dataset's folder, with / on every
    # system. No split separates samples with one name, in this or another domain
    names: np.ndarray
    parts: np.ndarray | None = None  # i8[N], the authors' own split: TRAIN, VALIDATION or TEST


class Source(NamedTuple):
    """A dataset as its authors publish it: domains that share their classes."""

    name: str  # of the dataset
    classes: tuple[str, ...]  # their names, in the order of the labels
    pools: tuple[Pool, ...]  # one per domain
    # mean, std: per channel (or one for all); images reach a model as (u8/255 - mean)/std
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()  # on what was converted, skipped or differs from the publication
    # Read-only, because all sources share the default.
    # name -> domains that may be left out together, such as "noise" -> the corruptions of that type
    groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    # a digest of the content that is the same on any machine (of checksums or sizes of files, not
    # of times), or ""; the fingerprint of a dataset includes it
    key: str = ""


def check_source(source: Source) -> Source:
    """Returns the source with images and labels in the stored dtypes; ValueError if unsound."""
    check_names_differ([pool.name for pool in source.pools], source.name)
    pools = []
    for pool in source.pools:
        place = f"{source.name}, {pool.name!r}"
        arrays = {"images": pool.images, "names": pool.names, **dict(leaves_of(pool.labels))}
        arrays |= {} if pool.parts is None else {"parts": pool.parts}
        lengths = {name or "labels": len(array) for name, array in arrays.items()}
        alike = len(set(lengths.values())) == 1 and len(pool.images)
        if not alike or not np.isin(arrays.get("parts", 0), range(3)).all():
            of_parts = ", and parts 0, 1 or 2" if "parts" in arrays else ""
            raise ValueError(f"{place}: samples {lengths} must be equal and above 0{of_parts}")
        # Bytes and float32 stay as they are, so that memory maps are not read.
        if pool.images.dtype not in (np.uint8, np.float32):
            pool = pool._replace(images=as_images(pool.images, f"{place}: the images"))
        if not isinstance(pool.labels, dict):
            labels = class_labels(pool.labels, f"{place}: the array of labels", len(source.classes))
            pool = pool._replace(labels=labels)
        pools.append(pool)
    return source._replace(pools=tuple(pools))


def numbered_names(domain: str, sizes: dict[str, int]) -> np.ndarray:
    """Returns str[N]: "mnist/train/00017" for parts in order, "mnist/00017" for the part ""."""
    folders = {f"{domain}/{part}" if part else domain: size for part, size in sizes.items()}
    return np.array([f"{name}/{k:05}" for name, size in folders.items() for k in range(size)])


def parts_of(sizes: dict[str, int]) -> np.ndarray:
    """Returns i8[N]: TRAIN, VALIDATION or TEST for consecutive parts of these sizes."""
    return np.repeat(np.array([PARTS[part] for part in sizes], np.int8), list(sizes.values()))


def part_in(names: Sequence[str]) -> int | None:
    """Returns the part that the names give, such as "train2017" or "val"; the last one wins."""
    plain = [name.lower().rstrip("0123456789_-") for name in names]
    return next((_PART_NAMES[name] for name in reversed(plain) if name in _PART_NAMES), None)
