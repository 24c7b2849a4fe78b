"""What every data source gives: a dataset of named domains, each with its own splits."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """Samples and their labels.

    images: u8[N, H, W, C], or f32[N, F] for features that are no images.
    labels: i32[N], in [0, num_classes).
    """

    images: np.ndarray
    labels: np.ndarray


class Domain(NamedTuple):
    """One source of data with an appearance of its own: a client, or the unseen client."""

    name: str
    train: Split
    validation: Split | None
    test: Split


class Dataset(NamedTuple):
    """Domains that share their classes and the form of their samples.

    mean, std: per channel (or one number for all); images reach a model as (u8/255 - mean)/std.
    """

    name: str
    num_classes: int
    domains: tuple[Domain, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def splits(domain: Domain) -> Iterator[tuple[str, Split]]:
    """The domain's splits that exist, by name: train, validation (if any), test."""
    for name in ("train", "validation", "test"):
        split = getattr(domain, name)
        if split is not None:
            yield name, split


def select(split: Split, index: np.ndarray) -> Split:
    """The samples at index i64[n], in that order."""
    return Split(split.images[index], split.labels[index])


def whole(domain: Domain) -> Split:
    """All samples of a domain: how an unseen domain is tested when none of them train."""
    parts = [split for _, split in splits(domain)]
    return Split(
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def check(dataset: Dataset) -> Dataset:
    """Returns the dataset if it is sound, so that no fault is found only after compilation.

    Raises:
      ValueError: a domain's name is used twice, a split is empty, images and labels differ in
        number, a dtype or shape is wrong or differs between domains, features are not finite, or
        a label is outside [0, num_classes).
    """
    if not dataset.domains:
        raise ValueError(f"{dataset.name}: no domains; a dataset needs at least one")
    names = [domain.name for domain in dataset.domains]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{dataset.name}: two domains are called {name!r}; rename one")
    first = dataset.domains[0].train.images
    for domain in dataset.domains:
        for name, split in splits(domain):
            place = f"{dataset.name}: the {name} split of {domain.name!r}"
            _check_counts(split, place)
            _check_form(split, first, place)
            _check_labels(split.labels, dataset.num_classes, place)
    return dataset


def _check_counts(split: Split, place: str) -> None:
    if len(split.images) != len(split.labels):
        raise ValueError(
            f"{place} has {len(split.images)} images but {len(split.labels)} labels; "
            "every image needs one label"
        )
    if not len(split.labels):
        raise ValueError(f"{place} is empty; give it samples or leave the domain out")


def _check_form(split: Split, first: np.ndarray, place: str) -> None:
    images, labels = split
    form = (str(images.dtype), images.ndim)
    if form not in {("uint8", 4), ("float32", 2)}:
        raise ValueError(
            f"{place} has images of dtype {images.dtype} and shape {images.shape}; "
            "allowed are uint8 [N, H, W, C] and float32 [N, F]"
        )
    if images.dtype != first.dtype or images.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"{place} has samples of {images.dtype} {images.shape[1:]}, the first domain's are "
            f"{first.dtype} {first.shape[1:]}; bring all domains to one form"
        )
    if labels.dtype != np.int32 or labels.ndim != 1:
        raise ValueError(
            f"{place} has labels of dtype {labels.dtype} and shape {labels.shape}; "
            "they must be int32 [N]"
        )
    if images.dtype == np.float32 and not np.isfinite(images).all():
        row, column = np.argwhere(~np.isfinite(images))[0]
        raise ValueError(
            f"{place} has a feature that is not finite (sample {row}, feature {column}: "
            f"{images[row, column]}); drop or impute it"
        )


def _check_labels(labels: np.ndarray, num_classes: int, place: str) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise ValueError(
            f"{place} has label {labels[wrong[0]]} at index {wrong[0]}; "
            f"labels must be in 0..{num_classes - 1}"
        )
