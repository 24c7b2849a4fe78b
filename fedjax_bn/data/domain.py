"""Defines datasets: named domains, each with training, validation and test samples."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.labels import (
    BOXES,
    CLASS,
    MASK,
    PADDING,
    SPACING,
    VOLUME,
    PyTree,
    crowd,
    form_of_labels,
    has_boxes,
    has_masks,
    join,
    leaves_of,
    take,
)
from fedjax_bn.engine.inputs import UNLABELLED, check_images

_BLOCK = 1024  # rows in memory at a time
_KEYS = "mean", "method", "adaptation"  # of tables, beside the names of domains


class Rows:
    """Read-only rows `array[index]`, gathered only when they are read.

    `array` is [N, ...], in memory or memory-mapped, and `index` i64[n] in [0, N). Any index of
    NumPy for the first axis, iteration and `np.asarray` return new arrays, as of `array[index]`.
    """

    def __init__(self, array: "np.ndarray | Rows", index: np.ndarray):
        index = np.array(index, np.int64)
        # Rows of rows point into the array itself, so that chains do not grow.
        if isinstance(array, Rows):
            array, index = array.array, array.index[index]
        self.array, self.index = array, index
        self.dtype, self.ndim = array.dtype, array.ndim
        self.shape: tuple[int, ...] = (len(index), *array.shape[1:])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        """Returns n."""
        return len(self.index)

    def __getitem__(self, item: Any) -> np.ndarray:
        """Returns `array[index][item]`."""
        chosen = self.index[item]
        if not np.ndim(chosen):
            return np.array(self.array[chosen])
        if not isinstance(self.array, np.memmap):
            return self.array[chosen]
        # Reads the file in its own order, which is fastest on disks, and makes no second copy.
        plain, flat = self.array.view(np.ndarray), chosen.ravel()
        gathered = np.empty((len(flat), *self.shape[1:]), self.dtype)
        for place in np.argsort(flat, kind="stable"):
            gathered[place] = plain[flat[place]]
        return gathered.reshape(*chosen.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns all rows, copied."""
        return self[:].astype(dtype or self.dtype, copy=False)


def blocks(array: np.ndarray | Rows, size: int = _BLOCK) -> Iterator[np.ndarray]:
    """Yields the rows of an array in order, at most `size` of them at a time."""
    return (array[start : start + size] for start in range(0, len(array), size))


class Split(NamedTuple):
    """Samples with their labels."""

    images: np.ndarray | Rows  # u8[N, H, W, C], or f32[N, ...] for features or images of floats
    labels: PyTree  # i32[N], in [0, num_classes); or a tree of arrays [N, ...], see `data.labels`
    # str[N], the origin of each sample, if it is known; those with one name belong together
    names: np.ndarray | None = None


class Domain(NamedTuple):
    """Data of one appearance: a client, or an unseen client."""

    name: str
    train: Split | None  # None if all samples are held out for testing
    validation: Split | None  # None if no samples validate
    test: Split  # the same object as `validation` if no samples are kept for testing


class Dataset(NamedTuple):
    """Domains that share their classes and the form of their samples."""

    name: str
    num_classes: int
    domains: tuple[Domain, ...]
    # mean, std: per channel (or one number for all); images reach a model as (u8/255 - mean)/std
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()  # names in the order of the labels; empty if they have none
    key: str = ""  # a digest of the content for the fingerprint, see `source.Source`


def splits(domain: Domain) -> Iterator[tuple[str, Split]]:
    """Yields the domain's splits that exist, by name: train, validation, test."""
    for name in ("train", "validation", "test"):
        if (split := getattr(domain, name)) is not None:
            yield name, split


def select(split: Split, index: np.ndarray) -> Split:
    """Returns the samples at index i64[n], in that order; `Rows` are not gathered."""
    images, labels, names = split
    chosen = Rows(images, index) if isinstance(images, Rows) else images[index]
    return Split(chosen, take(labels, index), None if names is None else names[index])


def whole(domain: Domain) -> Split:
    """Returns all samples of a domain; an unseen domain is tested on them."""
    parts = [split for _, split in splits(domain)]
    if domain.test is domain.validation:  # the same samples, which count once
        parts.pop()
    return parts[0] if len(parts) == 1 else join_splits(parts)


def scored_part(domains: Iterable[Domain]) -> str:
    """Returns what domains are tested on: "test", "validation" without such samples, or both."""
    return part_of_all("validation" if d.test is d.validation else "test" for d in domains)


def part_of_all(parts: Iterable[str]) -> str:
    """Returns the part that all are, else "validation and test"."""
    different = set(parts)
    return different.pop() if len(different) == 1 else "validation and test"


def join_splits(parts: Sequence[Split]) -> Split:
    """Returns splits one after the other; `Rows` of one array are not gathered."""
    images = [part.images for part in parts]
    array = getattr(images[0], "array", None)
    # All rows are of one array, so joining their indices is enough and reads no image.
    if all(isinstance(rows, Rows) and rows.array is array for rows in images):
        joined = Rows(array, np.concatenate([rows.index for rows in images]))
    else:
        joined = np.concatenate([np.asarray(array) for array in images])
    all_named = all(part.names is not None for part in parts)
    names = np.concatenate([part.names for part in parts]) if all_named else None
    return Split(joined, join([part.labels for part in parts]), names)


def form_of(dataset: Dataset) -> dict[str, Any]:
    """Returns the form of the data, which a run stores to build its models without the data."""
    images, labels, _ = dataset.domains[0].train
    return {
        "dataset": dataset.name,
        "clients": [domain.name for domain in dataset.domains],
        "num_classes": dataset.num_classes,
        "shape": list(images.shape[1:]),
        "dtype": str(images.dtype),
        "mean": [float(x) for x in dataset.mean],
        "std": [float(x) for x in dataset.std],
        **({"classes": list(dataset.classes)} if dataset.classes else {}),
        **form_of_labels(labels),
    }


def check_dataset(dataset: Dataset) -> Dataset:
    """Returns the dataset if it is sound; a ValueError names the fault before compilation."""
    check_names_differ([domain.name for domain in dataset.domains], dataset.name)
    reference = next(splits(dataset.domains[0]))[1]
    for domain in dataset.domains:
        for name, split in splits(domain):
            place = f"{dataset.name}: the {name} split of {domain.name!r}"
            _check_images(split.images, place)
            check_labels(split.labels, split.images, dataset.num_classes, place)
            form, other_form = _sample_form(split), _sample_form(reference)
            if form != other_form:  # clients are stacked
                raise ValueError(f"{place} has {form}, others {other_form}; give all one form")
    return dataset


def check_names_differ(names: Sequence[str], dataset: str) -> None:
    """Raises ValueError without domains or clients, or if two of them, or a key, have one name."""
    counts = Counter((*names, *_KEYS))
    twice = [name for name in dict.fromkeys(names) if counts[name] > 1] if names else "no domains"
    if twice:
        raise ValueError(f"{dataset} has {twice}: names must differ, also from {_KEYS}")


def _sample_form(split: Split) -> dict[str, str]:
    """Returns dtype and shape of one image and its labels, in words."""
    arrays = {"images": split.images} | {f"labels {k}": v for k, v in leaves_of(split.labels)}
    return {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in arrays.items()}


def _check_images(images: np.ndarray | Rows, place: str) -> None:
    check_images(images, f"{place}: the images")
    are_bytes = images.dtype == np.uint8
    if not len(images) or images.ndim < 2 or (are_bytes and images.ndim != 4):
        form = f"{images.dtype}{list(images.shape)}"
        raise ValueError(f"{place} has {form}; give at least one u8[H, W, C] or f32[...]")
    for number, block in enumerate(() if are_bytes else blocks(images)):  # may be large
        for sample in np.argwhere(~np.isfinite(block))[:1, 0] + _BLOCK * number:
            raise ValueError(f"{place}: sample {sample} is not finite; drop or impute it")


def check_labels(labels: PyTree, images: np.ndarray | Rows, num_classes: int, place: str) -> None:
    """Raises ValueError, beginning with `place`, for wrong labels of images [N, ...]."""
    count, *sides = images.shape
    if has_masks(labels):
        forms = {MASK: f"uint8{[count, *sides[:-1]]}", VOLUME: f"int32[{count}]"}
        forms[SPACING] = f"float32[{count}, 3]"
        allowed = {name: forms[name] for name in forms if name in labels}
    elif has_boxes(labels):
        rows = [count, *labels[CLASS].shape[1:2]]
        allowed = {BOXES: f"float32{[*rows, 4]}", CLASS: f"int32{rows}"}
    else:
        allowed = {"": f"int32[{count}]"}
    form = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves_of(labels)}
    if form != allowed:
        raise ValueError(f"{place} has {count} images with labels {form}; give {allowed}")
    if fault := _wrong_value(labels, num_classes):
        raise ValueError(f"{place} has {fault}; classes must be in 0..{num_classes - 1}")


def _wrong_value(labels: PyTree, num_classes: int) -> str:
    """Returns the first value of labels that is not allowed, and where it is; "" without one."""
    if has_masks(labels):
        for number, block in enumerate(blocks(labels[MASK])):  # may be memory-mapped and large
            for image, row, column in np.argwhere((block >= num_classes) & (block != UNLABELLED)):
                value, image = block[image, row, column], _BLOCK * number + image
                return f"class {value} in mask {image} at row {row}, column {column}"
        spacing = labels.get(SPACING, np.ones(1))
        sound = (np.isfinite(spacing) & (spacing > 0)).all()
        return "" if sound else "a spacing that is not above 0 millimetres"
    if has_boxes(labels):
        boxes, classes = labels[BOXES], labels[CLASS]
        is_class = (classes >= crowd(num_classes - 1)) & (classes < num_classes)
        with np.errstate(invalid="ignore"):  # comparisons with NaN are False, which is right here
            inside = ((boxes >= 0) & (boxes <= 1)).all(-1)
            inside &= (boxes[..., 2:] > boxes[..., :2]).all(-1)
        for image, row in np.argwhere(~is_class | (~inside & (classes != PADDING))):
            place = f"at image {image}, box {row}, not 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1"
            return f"class {classes[image, row]} and box {boxes[image, row].tolist()} {place}"
        return ""
    rows = np.flatnonzero((labels < 0) | (labels >= num_classes))
    return f"label {labels[rows[0]]} at index {rows[0]}" if len(rows) else ""
