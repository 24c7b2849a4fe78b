"""Glands under five stains: real handwriting as walls and lumens to be segmented in tissue.

Strokes of handwritten digits (see `data.sets.scanners`) are the walls of glands, and what they
enclose, as in 0, 6, 8 and 9, is their lumen, empty glass. An image of 64 x 64 pixels has one to
three digits in different quarters, one with a lumen at least. Five stains show them:

    eosin         violet walls in pink tissue, sharp
    silver        black walls in ochre tissue, a blurred lens
    azan          red walls in blue tissue, noisy
    fluorescence  green walls in black tissue, half the resolution, noisy: inverted polarity
    faded         pale brown walls in grey tissue, uneven light; meant as the unseen stain

A mask has class 0 for tissue, 1 for walls and 2 for lumens. It is made before any stain, lens or
sensor, so that stains differ only in how an image looks.
Scans are divided as for `data.sets.signs`: no test image shows one on which a client has trained.
"""

from typing import NamedTuple

import numpy as np
import scipy  # loads ndimage at its first use

from fedjax_bn.data.division.partition import stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.labels import MASK
from fedjax_bn.data.sets.scanners import place, share_out_scans, shrunk_photograph, to_pixels

_Colour = tuple[int, int, int]

_SIZE, _MOST = 64, 3  # pixels a side, and digits of an image
IMAGES = {"train": 80, "validation": 20, "test": 60}  # of a stain
_CLASSES = ("tissue", "wall", "lumen")
_SCANS = (0.6, 0.1, 0.3)  # shares of a stain's scans that train, validate and test
_SHARE, _LEAST = 359, 12  # scans of a stain, and pixels of a lumen


class _Stain(NamedTuple):
    name: str
    tissue: _Colour  # RGB in 0..255
    wall: _Colour  # lighter than tissue is inverted polarity
    lumen: _Colour
    texture: float  # grey levels by which tissue is at most lighter or darker than its colour
    blur: float  # standard deviation of the lens in pixels
    resolution: int  # pixels a side that the sensor resolves, shown as squares
    shade: float  # share by which light is at most weaker or stronger, along a random direction
    noise: float  # standard deviation of the sensor in grey levels


STAINS = (
    _Stain("eosin", (225, 160, 190), (95, 45, 130), (247, 240, 246), 50, 0.3, 64, 0.0, 5),
    _Stain("silver", (190, 160, 95), (25, 20, 20), (225, 210, 170), 60, 1.0, 64, 0.1, 8),
    _Stain("azan", (70, 95, 175), (185, 45, 60), (215, 220, 235), 50, 0.5, 64, 0.0, 12),
    _Stain("fluorescence", (20, 60, 35), (120, 235, 90), (5, 12, 8), 30, 0.3, 32, 0.0, 14),
    _Stain("faded", (175, 178, 182), (125, 95, 70), (212, 214, 216), 30, 0.7, 64, 0.25, 8),
)


def load_stains(seed: int = 0) -> Dataset:
    """Returns "stains": u8[N, 64, 64, 3] with masks u8[N, 64, 64] of three classes."""
    greys = [shrunk_photograph(name, 2, np.float64).mean(-1) for name in ("china", "flower")]
    shares, domains = share_out_scans(seed, [_SHARE] * len(STAINS)), []
    for stain, (ink, labels, rng) in zip(STAINS, shares, strict=True):
        parts = stratified_split(labels, [int(_SHARE * part) for part in _SCANS], rng)
        rows = zip(parts, IMAGES.values(), strict=True)
        shown = [_images(stain, ink[part], count, greys, rng) for part, count in rows]
        domains.append(Domain(stain.name, *shown))
    return Dataset("stains", 3, tuple(domains), (0.5,) * 3, (0.5,) * 3, _CLASSES)


def _images(
    stain: _Stain, ink: np.ndarray, count: int, greys: list[np.ndarray], rng: np.random.Generator
) -> Split:
    """Returns `count` images of a stain, with shapes from ink f64[n, 8, 8]."""
    ink = np.clip((place(ink, rng) - 0.25) / 0.4, 0, 1)  # firmer, so that few rings have gaps
    walls = ink > 0.5
    lumens = np.array([scipy.ndimage.binary_fill_holes(wall) for wall in walls]) & ~walls
    closed = np.flatnonzero(lumens.sum((1, 2)) >= _LEAST)
    images = np.empty((count, _SIZE, _SIZE, 3), np.uint8)
    masks = np.zeros((count, _SIZE, _SIZE), np.uint8)
    for k in range(count):
        strokes = np.zeros((_SIZE, _SIZE))
        scans = [rng.choice(closed), *rng.integers(len(ink), size=rng.integers(_MOST))]
        for scan, quarter in zip(scans, rng.permutation(4), strict=False):
            free = _SIZE // 2 - ink.shape[1] + 1
            y, x = _SIZE // 2 * np.array(divmod(quarter, 2)) + rng.integers(free, size=2)
            window = np.s_[y : y + ink.shape[1], x : x + ink.shape[2]]
            strokes[window], masks[k][window] = ink[scan], walls[scan] + 2 * lumens[scan]
        images[k] = _seen(stain, strokes, masks[k] == 2, greys, rng)
    return Split(images, {MASK: masks})


def _seen(
    stain: _Stain,
    strokes: np.ndarray,
    lumen: np.ndarray,
    greys: list[np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    """Returns an image u8[_SIZE, _SIZE, 3] of strokes f64[_SIZE, _SIZE] and lumens bool of that."""
    # The texture of the tissue is a random crop of a photograph, of mean 0 and within [-1, 1].
    grey = greys[rng.integers(len(greys))]
    y, x = (rng.integers(side - _SIZE + 1) for side in grey.shape)
    crop = grey[y : y + _SIZE, x : x + _SIZE, None]
    crop = crop - crop.mean()
    texture = crop / np.abs(crop).max().clip(1)
    tissue, wall, glass = (np.array(colour, np.float64) for colour in stain[1:4])
    seen = np.where(lumen[..., None], glass, tissue + stain.texture * texture)
    seen = strokes[..., None] * wall + (1 - strokes[..., None]) * seen
    seen = scipy.ndimage.gaussian_filter(seen, (stain.blur, stain.blur, 0), mode="nearest")
    angle, across = rng.uniform(0, 2 * np.pi), np.linspace(-1, 1, _SIZE)
    slope = (np.cos(angle) * across + np.sin(angle) * across[:, None]) / np.sqrt(2)
    seen *= 1 + stain.shade * slope[..., None]
    block = _SIZE // stain.resolution
    seen = seen.reshape(stain.resolution, block, stain.resolution, block, 3).mean((1, 3))
    seen += stain.noise * rng.standard_normal(seen.shape)
    return to_pixels(seen).repeat(block, 0).repeat(block, 1)
