"""Small images with discs, and cups in them, whose masks are known."""

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split

SIDE, CLASSES = 16, ("background", "disc", "cup")


def split(count: int, seed: int, shift: int = 0, slices: int = 0) -> Split:
    """Discs with cups, brighter by `shift`; with `slices` so many images are a volume."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    masks = np.zeros((count, SIDE, SIDE), np.uint8)
    for mask in masks:
        row, column = random.integers(5, SIDE - 5, 2)
        far = np.hypot(rows - row, columns - column)
        mask[far < 4.5], mask[far < 2] = 1, 2
    images = 60 + shift + 50 * masks + random.integers(0, 20, masks.shape).astype(np.uint8)
    masks[0, :2] = 255  # without a label
    labels, names = {"mask": masks}, np.array([f"{seed}/{n}.png" for n in range(count)])
    if slices:
        volume = (100 * seed + np.arange(count) // slices).astype(np.int32)
        spacing = np.tile(np.float32([3, 0.5, 0.5]), (count, 1))
        labels |= {"volume": volume, "spacing": spacing}
        names = np.array([f"case{number}" for number in volume])
    return Split(np.repeat(images[..., None], 3, -1).astype(np.uint8), labels, names)


def dataset(slices: int = 0) -> Dataset:
    domains = [
        Domain(name, *(split(n, 3 * k + i, 20 * k, slices) for i, n in enumerate((8, 4, 6))))
        for k, name in enumerate("abc")
    ]
    return Dataset("discs", 3, tuple(domains), (0.3,) * 3, (0.2,) * 3, CLASSES)
