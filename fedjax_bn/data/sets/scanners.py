"""The embedded dataset: real handwritten digits seen through six simulated scanners.

The handwriting is scikit-learn's copy of the UCI test set of optical digits (Alpaydin & Kaynak,
1998): 1797 scans of 8x8 pixels in 17 grey levels, by 13 writers. A scanner determines how the paper
looks, not what is written, so clients differ only in the distribution of features, as in FedBN.

    flatbed    black ink on white paper, sharp, hardly any noise
    blueprint  broad pale strokes on deep blue: inverted polarity
    thermal    thin violet strokes on pink
    microfilm  pale green on near black, half the resolution, noisy: inverted polarity
    magazine   broad yellow strokes over a photograph: inverted polarity where it is dark
    fax        dark green on pale green, half the resolution, the noisiest
"""

from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy  # loads ndimage at its first use
from PIL import Image

from fedjax_bn.data.division.partition import stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.seeds import generator

_SIZE, _WRITING = 28, 24  # pixels a side: of an image, and of the writing in it
_TURN, _MOVE = 15.0, 1.5  # degrees and pixels by which a sheet may at most be askew


class _Scanner(NamedTuple):
    """How one scanner shows ink on paper."""

    name: str
    paper: tuple[int, int, int]  # RGB in 0..255
    ink: tuple[int, int, int]  # lighter than the paper is inverted polarity
    resolution: int  # pixels a side that the sensor resolves; the image is enlarged from it to 28
    stroke: int  # pixels of 28 by which pen strokes grow (grey dilation) or shrink (erosion)
    blur: float  # standard deviation of the lens in pixels of 28
    photograph: float  # share of it in the paper; every image has its own random crop
    noise: float  # standard deviation of the sensor in grey levels, for each pixel and channel


SCANNERS = (
    _Scanner("flatbed", (250, 248, 240), (25, 25, 45), 28, 0, 0.0, 0.0, 4.0),
    _Scanner("blueprint", (20, 45, 120), (205, 220, 245), 28, 1, 0.6, 0.0, 10.0),
    _Scanner("thermal", (235, 200, 210), (60, 10, 80), 28, -1, 0.3, 0.0, 8.0),
    _Scanner("microfilm", (30, 34, 30), (195, 215, 175), 14, 0, 0.3, 0.0, 16.0),
    _Scanner("magazine", (128, 128, 128), (250, 240, 90), 28, 1, 0.3, 0.7, 6.0),
    _Scanner("fax", (200, 215, 185), (20, 70, 50), 14, 0, 0.4, 0.0, 20.0),
)


def load_scanners(seed: int = 0, *, shared_test: bool = False) -> Dataset:
    """Returns "scanners": six domains of u8[N, 28, 28, 3] in ten classes.

    A scanner has its own 299 or 300 scans, of which 180 train, 30 validate and the others test,
    each stratified by class. With `shared_test` every scanner shows the test scans of all six, 537,
    so that an accuracy depends less on chance. "fax" is meant as unseen; any other may take its
    place.
    """
    photograph = to_pixels(shrunk_photograph("china", 4, np.float64))
    sizes, domains, tests = [300] * 3 + [299] * 3, [], []
    for scanner, (ink, labels, rng) in zip(SCANNERS, share_out_scans(seed, sizes), strict=True):
        images = _scan(scanner, ink, photograph, rng)
        parts = stratified_split(labels, [180, 30, len(labels) - 210], rng)
        domains.append(Domain(scanner.name, *(Split(images[p], labels[p]) for p in parts)))
        tests.append((ink[parts[2]], labels[parts[2]], rng))
    if shared_test:
        ink, labels = (np.concatenate(arrays) for arrays in list(zip(*tests, strict=True))[:2])
        for k, (scanner, (_, _, rng)) in enumerate(zip(SCANNERS, tests, strict=True)):
            images = _scan(scanner, ink, photograph, rng)
            domains[k] = domains[k]._replace(test=Split(images, labels))
    return Dataset("scanners", 10, tuple(domains), mean=(0.5,) * 3, std=(0.5,) * 3)


def handwriting() -> tuple[np.ndarray, np.ndarray]:
    """Returns ink f64[1797, 8, 8] in [0, 1], 1 where the pen was, and labels i32[1797]."""
    table = np.loadtxt(_packaged("data/digits.csv.gz"), delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8) / 16.0, table[:, -1].astype(np.int32)


def share_out_scans(
    seed: int, sizes: Sequence[int]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.random.Generator]]:
    """Yields a domain's ink, labels, and generator; each scan has one owner, in any order."""
    ink, labels = handwriting()
    for k, owned in enumerate(stratified_split(labels, sizes, generator(seed, 0))):
        yield ink[owned], labels[owned], generator(seed, 1, k)


def shrunk_photograph(name: str, factor: int, dtype: type) -> np.ndarray:
    """Returns scikit-learn's photograph "china" (a temple) or "flower", shrunk by block means."""
    with Image.open(_packaged(f"images/{name}.jpg")) as photograph:
        image = np.asarray(photograph, dtype)
    height, width = (side // factor for side in image.shape[:2])
    image = image[: height * factor, : width * factor]
    return image.reshape(height, factor, width, factor, 3).mean(axis=(1, 3))


def _packaged(name: str) -> Path:
    """Returns a file of `sklearn.datasets`, whose import would take a second."""
    return Path(PathFinder.find_spec("sklearn").origin).parent / "datasets" / name


def _scan(
    scanner: _Scanner, ink: np.ndarray, photograph: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Returns scans u8[N, 28, 28, 3] of ink f64[N, h, h] over crops of a photograph u8[H, W, 3]."""
    ink = _sense(place(ink, rng), scanner)[..., None]
    windows = np.lib.stride_tricks.sliding_window_view(photograph, (_SIZE, _SIZE), axis=(0, 1))
    top, left = (rng.integers(count, size=len(ink)) for count in windows.shape[:2])
    crops = np.moveaxis(windows[top, left], 1, -1)
    share, colours = scanner.photograph, np.array([scanner.paper, scanner.ink], np.float64)
    paper = share * crops + (1 - share) * colours[0]
    seen = ink * colours[1] + (1 - ink) * paper
    return to_pixels(seen + scanner.noise * rng.standard_normal(seen.shape))


def place(ink: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns handwriting f64[N, h, h] laid on the glass slightly askew: f64[N, 28, 28]."""
    angles = np.deg2rad(rng.uniform(-_TURN, _TURN, len(ink)))
    moves = rng.uniform(-_MOVE, _MOVE, (len(ink), 2))
    side, placed = ink.shape[1], np.empty((len(ink), _SIZE, _SIZE))
    for k, (cosine, sine) in enumerate(zip(np.cos(angles), np.sin(angles), strict=True)):
        matrix = np.array([[cosine, -sine], [sine, cosine]]) * (side / _WRITING)
        offset = np.full(2, (side - 1) / 2) - matrix @ (np.full(2, (_SIZE - 1) / 2) + moves[k])
        placed[k] = scipy.ndimage.affine_transform(
            ink[k], matrix, offset, (_SIZE, _SIZE), order=3, mode="constant"
        )
    return np.clip(placed, 0, 1)


def _sense(ink: np.ndarray, scanner: _Scanner) -> np.ndarray:
    """Returns strokes f64[N, 28, 28] as the pen, the lens and the sensor of a scanner make them."""
    side = 2 * abs(scanner.stroke) + 1
    change = scipy.ndimage.grey_dilation if scanner.stroke > 0 else scipy.ndimage.grey_erosion
    ink = change(ink, size=(1, side, side))
    ink = scipy.ndimage.gaussian_filter(ink, (0, scanner.blur, scanner.blur), mode="nearest")
    # shrinks to the sensor's pixels by means, then enlarges each to a square
    for side, order in ((scanner.resolution, 1), (_SIZE, 0)):
        factors = (1, side / ink.shape[1], side / ink.shape[2])
        ink = scipy.ndimage.zoom(ink, factors, order=order, mode="nearest", grid_mode=True)
    return ink


def to_pixels(image: np.ndarray) -> np.ndarray:
    """Returns grey levels rounded to u8."""
    # 1e-6, so that a tie's last bits, which differ between machines, do not decide
    return np.floor(np.clip(image, 0, 255) + (0.5 - 1e-6)).astype(np.uint8)
