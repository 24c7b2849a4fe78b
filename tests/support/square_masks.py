"""Tiny images whose bright squares are the mask, of clients with different contrasts."""

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split

SIDE = 16
CLASSES = ("background", "square", "corner")


def samples(count: int, seed: int, shift: int = 0, side: int = SIDE) -> tuple:
    """Images u8[N, H, W, 3] and masks u8[N, H, W]: a square of class 1 with a corner of class 2."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((count, side, side), np.uint8)
    for mask in masks:
        y, x = rng.integers(0, side - side // 2, 2)
        mask[y : y + side // 2, x : x + side // 2] = 1
        mask[y : y + side // 4, x : x + side // 4] = 2
    noise = rng.integers(0, 20, (count, side, side, 3))
    return (noise + 20 * shift + 90 * masks[..., None]).astype(np.uint8), masks


def split(count: int, seed: int, shift: int = 0, side: int = SIDE) -> Split:
    """The same as a split."""
    images, masks = samples(count, seed, shift, side)
    return Split(images, {"mask": masks})


def dataset(names: tuple = ("a", "b", "c"), side: int = SIDE) -> Dataset:
    """Domains that differ in brightness, with all three parts."""
    domains = [
        Domain(name, *(split(n, 10 * k + n, k, side) for n in (6, 3, 4)))
        for k, name in enumerate(names)
    ]
    return Dataset("squares", 3, tuple(domains), (0.4,), (0.3,), CLASSES)
