"""Tiny images whose bright squares are the mask, of clients with different contrasts."""

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split

SIDE = 16
CLASSES = ("background", "square", "corner")


def samples(count: int, seed: int, shift: int = 0) -> tuple:
    """Images u8[N, H, W, 3] and masks u8[N, H, W]: a square of class 1 with a corner of class 2."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((count, SIDE, SIDE), np.uint8)
    for mask in masks:
        y, x = rng.integers(0, SIDE // 2, 2)
        mask[y : y + SIDE // 2, x : x + SIDE // 2] = 1
        mask[y : y + SIDE // 4, x : x + SIDE // 4] = 2
    noise = rng.integers(0, 20, (count, SIDE, SIDE, 3))
    return (noise + 20 * shift + 90 * masks[..., None]).astype(np.uint8), masks


def split(count: int, seed: int, shift: int = 0, slices: int = 0) -> Split:
    """The same as a split; with `slices` so many images are a volume, and some rows unlabelled."""
    images, masks = samples(count, seed, shift)
    if not slices:
        return Split(images, {"mask": masks})
    masks[0, :2] = 255
    volume = (100 * seed + np.arange(count) // slices).astype(np.int32)
    spacing = np.tile(np.float32([3, 0.5, 0.5]), (count, 1))
    names = np.array([f"case{number}" for number in volume])
    return Split(images, {"mask": masks, "volume": volume, "spacing": spacing}, names)


def dataset(names: tuple = ("a", "b", "c"), slices: int = 0) -> Dataset:
    """Domains that differ in brightness, with all three parts."""
    domains = [
        Domain(name, *(split(n, 10 * k + n, k, slices) for n in (6, 3, 4)))
        for k, name in enumerate(names)
    ]
    return Dataset("squares", 3, tuple(domains), (0.4,), (0.3,), CLASSES)
