"""Small sources whose samples can be followed."""

import numpy as np

from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Pool, Source

CLASSES = ("cat", "dog", "elk", "fox")


def pool(name: str, labels, names=None, parts=None) -> Pool:
    """Samples whose only feature is their own number, so that they can be followed."""
    labels = np.asarray(labels, np.int32)
    names = [f"{name}/{k}.jpg" for k in range(len(labels))] if names is None else names
    images = np.arange(len(labels), dtype=np.float32)[:, None]
    return Pool(name, images, labels, np.asarray(names, np.str_), parts)


def toy(sizes=(60, 40, 90), groups=None, parts=None) -> Source:
    pools = tuple(
        pool(name, np.arange(size) % 4, parts=None if parts is None else parts(size))
        for name, size in zip("abc", sizes, strict=True)
    )
    return Source("toy", CLASSES, pools, (0.5,), (0.5,), groups=groups or {})


def official(size: int) -> np.ndarray:
    return np.repeat([TRAIN, VALIDATION, TEST], [size - 20, 10, 10]).astype(np.int8)


def numbers(split) -> list[int]:
    return np.asarray(split.images)[:, 0].astype(int).tolist()


def sizes_of(dataset: Dataset) -> list[int]:
    return [len(domain.train.labels) for domain in dataset.domains]
