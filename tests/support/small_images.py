"""Domains of images so small that a test can afford runs on them."""

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split


def dataset_of_images(names, mean=0.5, std=0.5, classes=()):
    """Domains of bytes [N, 8, 8, 3] in three classes of brightness, each brighter by a shift."""
    random = np.random.default_rng(3)
    domains = []
    for shift, name in enumerate(names):
        parts = []
        for size in (12, 5, 9):
            labels = np.arange(size, dtype=np.int32) % 3
            noise = random.integers(0, 40, (size, 8, 8, 3))
            images = 60 * labels[:, None, None, None] + 20 * shift + noise
            parts.append(Split(images.astype(np.uint8), labels))
        domains.append(Domain(name, *parts))
    return Dataset("tiny", 3, tuple(domains), (mean,), (std,), classes)
