"""Datasets that come divided, as a source whose pools have the part of each sample."""

import numpy as np

from fedjax_bn.data.domain import Dataset, splits
from fedjax_bn.data.label_trees import join
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Pool, Source, check_source

PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


def as_source(dataset: Dataset) -> Source:
    """Returns the same samples, undivided: a pool a domain, training samples first.

    Names of samples are DOMAIN/PART/NUMBER where the dataset has none; its splits become the
    official parts.
    """
    pools = []
    for domain in dataset.domains:
        owned = list(splits(domain))
        sizes = {name: len(split.images) for name, split in owned}
        named = all(split.names is not None for _, split in owned)
        names = np.concatenate([split.names for _, split in owned]) if named else None
        pools.append(
            Pool(
                name=domain.name,
                images=np.concatenate([np.asarray(split.images) for _, split in owned]),
                labels=join([split.labels for _, split in owned]),
                names=numbered_names(domain.name, sizes) if names is None else names,
                parts=parts_of(sizes),
            )
        )
    classes = dataset.classes or tuple(map(str, range(dataset.num_classes)))
    return check_source(Source(dataset.name, classes, tuple(pools), dataset.mean, dataset.std))


def numbered_names(domain: str, sizes: dict[str, int]) -> np.ndarray:
    """Returns str[N]: names such as "mnist/train/00017" for parts of these sizes in order.

    The part "" does not appear: "mnist/00017".
    """
    return np.array(
        [
            f"{domain}/{part}/{number:05}" if part else f"{domain}/{number:05}"
            for part, size in sizes.items()
            for number in range(size)
        ]
    )


def parts_of(sizes: dict[str, int]) -> np.ndarray:
    """Returns i8[N]: TRAIN, VALIDATION or TEST for parts of these sizes, one after the other."""
    return np.repeat(np.array([PARTS[part] for part in sizes], np.int8), list(sizes.values()))
