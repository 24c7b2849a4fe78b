"""Defines datasets: named domains, each with training, validation and test samples."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.label_trees import (
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
from fedjax_bn.engine.inputs import UNLABELLED, check_channels_last, check_image_dtype, check_scaled


class Rows:
    """Read-only rows `array[index]`, gathered only when they are read.

    `rows[i]`, `rows[a:b]`, `rows[i64 array]` and `rows[bool array]` return new NumPy arrays, equal
    to those of `array[index]`; so do iteration and `np.asarray`. `len`, `shape`, `dtype`, `ndim`
    and `nbytes` work too. Index other axes afterwards: `rows[3:5][:, 0]`.

    Args:
      array: [N, ...], in memory or memory-mapped; neither copied nor written to.
      index: i64[n] in [0, N), the rows in their order; repeats are allowed.

    Raises:
      IndexError: the index has a number outside [0, N).
    """

    __slots__ = ("array", "dtype", "index", "nbytes", "ndim", "shape")

    def __init__(self, array: "np.ndarray | Rows", index: np.ndarray):
        # Checked here, because rows are read much later, and NumPy accepts negative numbers.
        wrong = index[(index < 0) | (index >= len(array))]
        if wrong.size:
            raise IndexError(f"there is no row {wrong[0]}; rows are 0..{len(array) - 1}")
        index = np.array(index, np.int64)
        if isinstance(array, Rows):
            array, index = array.array, array.index[index]
        self.array, self.index = array, index
        self.dtype, self.ndim = array.dtype, array.ndim
        self.shape: tuple[int, ...] = (len(index), *array.shape[1:])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        index.setflags(write=False)

    def __len__(self) -> int:
        """Returns n."""
        return len(self.index)

    def __getitem__(self, item: Any) -> np.ndarray:
        """Returns `array[index][item]` for a number, slice or array of numbers or bools."""
        if isinstance(item, tuple) or item is None or item is Ellipsis:
            raise TypeError(f"rows[{item}]: index rows alone, then the array that this gives")
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
        """Returns all rows, for `np.asarray`."""
        if copy is False:
            raise ValueError("the rows must be gathered, which copies them: leave copy at None")
        return self[:].astype(dtype or self.dtype, copy=False)


def blocks(array: np.ndarray | Rows, size: int = 1024) -> Iterator[np.ndarray]:
    """Yields the rows of an array in order, at most `size` of them in memory at a time."""
    return (array[start : start + size] for start in range(0, len(array), size))


class Split(NamedTuple):
    """Samples with their labels.

    Attributes:
      images: u8[N, H, W, C], or f32[N, ...] for features or images of floats; an array, or rows of
        a larger one that are gathered when used.
      labels: i32[N], in [0, num_classes); or a tree of arrays [N, ...], see `label_trees`.
      names: str[N], the origin of each sample; samples with the same name belong together. None if
        the source does not name samples.
    """

    images: np.ndarray | Rows
    labels: PyTree
    names: np.ndarray | None = None


class Domain(NamedTuple):
    """Data of one appearance: a client, or an unseen client.

    Attributes:
      train: None if all samples are held out for testing.
      validation: None if no samples validate.
      test: the same object as `validation` if no samples are kept for testing.
    """

    name: str
    train: Split | None
    validation: Split | None
    test: Split


class Dataset(NamedTuple):
    """Domains that share their classes and the form of their samples.

    Attributes:
      mean, std: per channel (or one number for all); images reach a model as (u8/255 - mean)/std.
      classes: their names, in the order of the labels; empty if they have none.
      key: a digest of the content, which the fingerprint of samples with names includes, see
        `source.Source`.
    """

    name: str
    num_classes: int
    domains: tuple[Domain, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    key: str = ""


def splits(domain: Domain) -> Iterator[tuple[str, Split]]:
    """Yields the domain's splits that exist, by name: train, validation, test."""
    for name in ("train", "validation", "test"):
        split = getattr(domain, name)
        if split is not None:
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
    """Returns which of their samples domains are tested on: "test", "validation", or both.

    Without test samples a domain is tested on its validation samples, which also chose the round.
    """
    return part_of_all("validation" if d.test is d.validation else "test" for d in domains)


def part_of_all(parts: Iterable[str]) -> str:
    """Returns the part that all are, else "validation and test"."""
    different = set(parts)
    return different.pop() if len(different) == 1 else "validation and test"


def join_splits(parts: Sequence[Split]) -> Split:
    """Returns splits one after the other; `Rows` of one array are not gathered."""
    images = [part.images for part in parts]
    first = images[0]
    # All rows are of one array, so joining their indices is enough and reads no image.
    if all(isinstance(rows, Rows) and rows.array is first.array for rows in images):
        joined = Rows(first.array, np.concatenate([rows.index for rows in images]))
    else:
        joined = np.concatenate([np.asarray(array) for array in images])
    named = all(part.names is not None for part in parts)
    names = np.concatenate([part.names for part in parts]) if named else None
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
    """Returns the dataset if it is sound, so that faults are found before compilation.

    Raises:
      ValueError: a domain's name is used twice, a split is empty, images and labels differ in
        number, a dtype or shape is wrong or differs between domains, channels are first, floats
        hold bytes, features are not finite, or a label is outside [0, num_classes).
    """
    if not dataset.domains:
        raise ValueError(f"{dataset.name}: no domains; a dataset needs at least one")
    check_names_differ([domain.name for domain in dataset.domains], dataset.name)
    first, first_labels, _ = next(splits(dataset.domains[0]))[1]
    for domain in dataset.domains:
        for name, split in splits(domain):
            place = f"{dataset.name}: the {name} split of {domain.name!r}"
            if not len(split.images):
                raise ValueError(f"{place} is empty; give it samples or leave the domain out")
            _check_form(split.images, first, place)
            check_labels(split.labels, split.images, dataset.num_classes, place)
            form, wanted = (  # equal, so that clients can be stacked
                {name: leaf.shape[1:] for name, leaf in leaves_of(labels)}
                for labels in (split.labels, first_labels)
            )
            if form != wanted:
                raise ValueError(
                    f"{place} has labels of form {form}, the first domain's are {wanted}; bring "
                    "all domains to one form"
                )
    return dataset


def check_names_differ(names: Sequence[str], dataset: str) -> None:
    """Raises ValueError if two domains, or clients that share domains, have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{dataset}: two domains or clients are called {name!r}; rename one")


def _check_form(images: np.ndarray | Rows, first: np.ndarray | Rows, place: str) -> None:
    """Raises ValueError unless images have the form of `first` and are finite."""
    check_image_dtype(images.dtype, f"{place}: the images")
    check_channels_last(images.shape, f"{place}: the images")
    check_scaled(images, f"{place}: the images")
    bytes_of_images = images.dtype == np.uint8 and images.ndim == 4
    kept = (np.float32, jnp.result_type(float))  # what `inputs.as_images` makes of floats
    if not (bytes_of_images or (images.dtype in kept and images.ndim >= 2)):
        raise ValueError(
            f"{place} has images of dtype {images.dtype} and shape {images.shape}; "
            "allowed are uint8 [N, H, W, C] and float32 [N, ...]"
        )
    if images.dtype != first.dtype or images.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"{place} has samples of {images.dtype} {images.shape[1:]}, the first domain's are "
            f"{first.dtype} {first.shape[1:]}; bring all domains to one form"
        )
    if images.dtype == np.uint8:
        return
    start = 0
    for block in blocks(images):  # features may be memory-mapped and large
        if not np.isfinite(block).all():
            row, *feature = np.argwhere(~np.isfinite(block))[0].tolist()
            raise ValueError(
                f"{place} has a feature that is not finite (sample {start + row}, feature "
                f"{', '.join(map(str, feature))}: {block[row, *feature]}); drop or impute it"
            )
        start += len(block)


def check_labels(labels: PyTree, images: np.ndarray | Rows, num_classes: int, place: str) -> None:
    """Raises ValueError if the form or a value of the labels of images [N, ...] is wrong.

    The error message begins with `place`.
    """
    for name, leaf in leaves_of(labels):
        if len(leaf) != len(images):
            what = f"labels[{name!r}]" if name else "labels"
            raise ValueError(
                f"{place} has {len(images)} images but {len(leaf)} {what}; every image needs one "
                "label"
            )
    if has_masks(labels):
        _check_masks(labels, images.shape, num_classes, place)
        return
    if has_boxes(labels):
        _check_boxes(labels, num_classes, place)
        return
    if labels.dtype != np.int32 or labels.ndim != 1:
        raise ValueError(
            f"{place} has labels of dtype {labels.dtype} and shape {labels.shape}; "
            "they must be int32 [N]"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise ValueError(
            f"{place} has label {labels[wrong[0]]} at index {wrong[0]}; "
            f"labels must be in 0..{num_classes - 1}"
        )


def _check_boxes(labels: dict[str, np.ndarray], num_classes: int, place: str) -> None:
    """Raises ValueError if a class is unknown, or a box has no area or is not in its image."""
    if set(labels) != {BOXES, CLASS}:
        raise ValueError(f"{place} has labels {sorted(labels)}; they must be 'boxes' and 'class'")
    boxes, classes = labels[BOXES], labels[CLASS]
    if (boxes.dtype, classes.dtype) != (np.float32, np.int32) or (
        boxes.shape != (*classes.shape, 4) or classes.ndim != 2
    ):
        raise ValueError(
            f"{place} has boxes {boxes.dtype}{boxes.shape} and classes "
            f"{classes.dtype}{classes.shape}; they must be float32 [N, M, 4] and int32 [N, M]"
        )
    wrong = np.argwhere((classes < crowd(num_classes - 1)) | (classes >= num_classes))
    if len(wrong):
        image, row = wrong[0]
        raise ValueError(
            f"{place} has class {classes[image, row]} at image {image}, box {row}; classes must be "
            f"in 0..{num_classes - 1}, -2 less that of a crowd, or -1 after an image's last box"
        )
    with np.errstate(invalid="ignore"):  # comparisons with NaN are False, which is right here
        sound = ((boxes >= 0) & (boxes <= 1)).all(-1) & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    wrong = np.argwhere(~sound & (classes != PADDING))
    if len(wrong):
        image, row = wrong[0]
        raise ValueError(
            f"{place} has the box {boxes[image, row].tolist()} at image {image}, box {row}; boxes "
            "must be 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1"
        )


def _check_masks(
    labels: dict[str, np.ndarray], shape: Sequence[int], num_classes: int, place: str
) -> None:
    """Raises ValueError if masks do not fit images of a shape [N, H, W, C], or a class is unknown.

    Beside the masks there may be volumes and spacings.
    """
    if unknown := sorted(set(labels) - {MASK, VOLUME, SPACING}):
        raise ValueError(
            f"{place} has labels {unknown[0]!r}; beside {MASK!r} there may be {VOLUME!r} and "
            f"{SPACING!r}"
        )
    if len(shape) != 4:
        raise ValueError(f"{place} has masks for samples {list(shape)}; give images [N, H, W, C]")
    count, height, width = shape[:3]
    wanted = {MASK: (np.uint8, (count, height, width)), VOLUME: (np.int32, (count,))}
    for name, (dtype, form) in (wanted | {SPACING: (np.float32, (count, 3))}).items():
        if name in labels and (labels[name].dtype, labels[name].shape) != (dtype, form):
            given = f"{labels[name].dtype}{list(labels[name].shape)}"
            raise ValueError(
                f"{place} has a {name} {given} for images {list(shape)}; it must be "
                f"{np.dtype(dtype)}{list(form)}"
            )
    start = 0
    for block in blocks(labels[MASK]):  # masks may be memory-mapped and large
        wrong = np.argwhere((block >= num_classes) & (block != UNLABELLED))
        if len(wrong):
            image, row, column = wrong[0].tolist()
            raise ValueError(
                f"{place} has class {block[image, row, column]} in mask {start + image} at row "
                f"{row}, column {column}; classes must be in 0..{num_classes - 1}, or "
                f"{UNLABELLED} for a pixel without a label"
            )
        start += len(block)
    if SPACING in labels and not (np.isfinite(labels[SPACING]) & (labels[SPACING] > 0)).all():
        raise ValueError(f"{place} has a spacing that is not above 0; give millimetres")
