"""Small datasets of image folders for tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def write_shade(path: Path, shade: int, size: int = 6) -> Path:
    """A plain image of one shade; its suffix chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), shade, np.uint8)).save(path)
    return path


def write_tree(
    root: Path, domains: Iterable[str], classes: Sequence[str], count: int = 2, suffix: str = ".png"
) -> Path:
    """DOMAIN/CLASS/{0,1,...}.png, each image of a shade of its domain and class."""
    for d, domain in enumerate(domains):
        for c, name in enumerate(classes):
            for k in range(count):
                write_shade(root / domain / name / f"{k}{suffix}", shade_of(d, c))
    return root


def shade_of(domain: int, label: int) -> int:
    """The shade that `write_tree` gives to a class of a domain, by their positions."""
    return (40 * domain + 3 * label) % 256


def assert_in_place(source) -> None:
    """Every image of a tree sits at its own label, in the source's own order of domains."""
    for d, pool in enumerate(source.pools):
        expected = [shade_of(d, int(label)) for label in pool.labels]
        assert pool.images[:, 0, 0, 0].tolist() == expected
        assert pool.labels.dtype == np.int32
        assert len(pool.names) == len(set(pool.names.tolist())) == len(pool.labels)
