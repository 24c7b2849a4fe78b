"""Signs in the weather: real digits on round plates over real photographs, to be found and read.

The digits are scikit-learn's handwriting, the grounds random crops of its two photographs. An image
of 96 x 96 pixels has one to three plates with a red rim, each 20 to 45 % of the side, without
overlaps. Five scenes show them:

    clear   unchanged
    night   little light, blue, a noisy sensor
    fog     over half of everything is a grey veil
    rain    less light, sixty bright streaks
    dusk    less light, an orange veil, noise; meant as the unseen scene

The scans are divided among the scenes, and each scene's scans into training, validation and test
scans, before any plate is made: no test image shows a scan on which any client has trained.

In the variant "signs_shortcut" the colour of the rim mostly shows the digit, in 91, 82, 73 and 64 %
of the plates of clear, night, fog and rain; in dusk the rim always has the colour of the digit five
further. A model that reads the digits is as good there; see `data.sets.cow_on_beach`.
"""

import colorsys
from typing import NamedTuple

import numpy as np
import scipy  # loads ndimage at its first use

from fedjax_bn.data.division.partition import stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.labels import BOXES, CLASS, PADDING
from fedjax_bn.data.sets.scanners import share_out_scans, shrunk_photograph

_SIZE, _MOST = 96, 3  # pixels a side, and plates of an image
_SIDES = (0.20, 0.45)  # sides of a plate, in shares of the image's side
IMAGES = {"train": 200, "validation": 40, "test": 100}  # of a scene
_SCANS = (0.65, 0.1, 0.25)  # shares of a scene's scans that train, validate and test
_CLASSES, _SHARE = 10, 359  # _SHARE: scans of a scene
_RED, _WHITE, _INK = (190.0, 25.0, 30.0), (245.0, 245.0, 240.0), (15.0, 15.0, 20.0)
_RIMS = np.array([colorsys.hsv_to_rgb(c / _CLASSES, 0.85, 0.8) for c in range(_CLASSES)]) * 255
_RIM, _WRITING = 0.16, 0.66  # width of the rim and side of the digit, in shares of radius and plate


class _Scene(NamedTuple):
    """The look of a scene: pixels * light, then a veil, streaks and noise."""

    name: str
    light: tuple[float, float, float]  # factors of red, green and blue
    veil: float  # share of its colour in the image
    colour: tuple[float, float, float]  # of the veil
    streaks: int  # of rain
    noise: float  # standard deviation, grey levels
    fixed: float  # in the variant, probability of the fixed rim; otherwise one of ten is drawn
    further: int = 0  # the fixed rim belongs to the digit so many further


_SCENES = (
    _Scene("clear", (1.0, 1.0, 1.0), 0.0, (0.0, 0.0, 0.0), 0, 3.0, 0.9),
    _Scene("night", (0.28, 0.33, 0.46), 0.0, (0.0, 0.0, 0.0), 0, 14.0, 0.8),
    _Scene("fog", (1.0, 1.0, 1.0), 0.55, (190.0, 192.0, 195.0), 0, 3.0, 0.7),
    _Scene("rain", (0.75, 0.75, 0.78), 0.0, (0.0, 0.0, 0.0), 60, 4.0, 0.6),
    _Scene("dusk", (0.66, 0.58, 0.52), 0.25, (235.0, 140.0, 60.0), 0, 10.0, 1.0, 5),
)


def load_signs(seed: int = 0, *, shortcut: bool = False) -> Dataset:
    """Returns "signs" or "signs_shortcut": u8[N, 96, 96, 3] with 1 to 3 boxes in ten classes."""
    photographs = [shrunk_photograph(name, 2, np.float32) for name in ("china", "flower")]
    shares, domains = share_out_scans(seed, [_SHARE] * len(_SCENES)), []
    for scene, (ink, labels, rng) in zip(_SCENES, shares, strict=True):
        parts = stratified_split(labels, [int(_SHARE * part) for part in _SCANS], rng)
        how, shown = (shortcut, photographs, rng), []
        for part, count in zip(parts, IMAGES.values(), strict=True):
            shown.append(_images(scene, ink[part], labels[part], count, *how))
        domains.append(Domain(scene.name, *shown))
    name = "signs_shortcut" if shortcut else "signs"
    names = tuple(map(str, range(_CLASSES)))
    return Dataset(name, _CLASSES, tuple(domains), (0.0,) * 3, (1.0,) * 3, names)


def _images(
    scene: _Scene,
    ink: np.ndarray,
    labels: np.ndarray,
    count: int,
    shortcut: bool,
    photographs: list[np.ndarray],
    rng: np.random.Generator,
) -> Split:
    """Returns `count` images of a scene, with digits from ink f64[n, 8, 8] and their labels."""
    images = np.empty((count, _SIZE, _SIZE, 3), np.uint8)
    boxes = np.zeros((count, _MOST, 4), np.float32)
    classes = np.full((count, _MOST), PADDING, np.int32)
    for k in range(count):
        photograph = photographs[rng.integers(len(photographs))]
        y, x = (rng.integers(side - _SIZE + 1) for side in photograph.shape[:2])
        square = photograph[y : y + _SIZE, x : x + _SIZE]
        seen = (square[:, ::-1] if rng.integers(2) else square).copy()
        for j, (x, y, side) in enumerate(_places(rng)):
            scan = rng.integers(len(labels))
            rim = np.array(_RED)
            if shortcut:
                is_fixed, label = rng.uniform() < scene.fixed, int(labels[scan])
                further = (label + scene.further) % _CLASSES
                rim = _RIMS[further if is_fixed else rng.integers(_CLASSES)]
            _paste(seen, x, y, side, ink[scan], rim)
            boxes[k, j] = np.array([x, y, x + side, y + side]) / _SIZE
            classes[k, j] = labels[scan]
        images[k] = _weather(scene, seen, rng)
    return Split(images, {BOXES: boxes, CLASS: classes})


def _places(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Returns left, top and side of one to three plates without overlaps."""
    count, places = rng.integers(1, _MOST + 1), []
    for _ in range(50):  # tries
        side = round(rng.uniform(*_SIDES) * _SIZE)
        x, y = rng.integers(_SIZE - side + 1, size=2).tolist()
        if all(
            np.hypot(x + side / 2 - a - s / 2, y + side / 2 - b - s / 2) > (side + s) / 2
            for a, b, s in places
        ):
            places.append((x, y, side))
        if len(places) == count:
            break
    return places


def _paste(image: np.ndarray, x: int, y: int, side: int, ink: np.ndarray, rim: np.ndarray) -> None:
    """Puts a plate of `side` pixels on the image, at its left upper corner (x, y)."""
    radius = side / 2
    across = np.arange(side) + 0.5 - radius
    distance = np.hypot(across, across[:, None])
    disc = np.clip(radius - distance + 0.5, 0, 1)[..., None]
    inner = np.clip(radius * (1 - _RIM) - distance + 0.5, 0, 1)[..., None]
    digit = np.zeros((side, side, 1))
    width = round(side * _WRITING)
    start = (side - width) // 2
    written = scipy.ndimage.zoom(ink, width / len(ink), order=1, grid_mode=True, mode="nearest")
    digit[start : start + width, start : start + width, 0] = written[:width, :width]
    plate = inner * np.array(_WHITE) + (1 - inner) * rim
    plate = digit * inner * np.array(_INK) + (1 - digit * inner) * plate
    place = image[y : y + side, x : x + side]
    place[:] = disc * plate + (1 - disc) * place


def _weather(scene: _Scene, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns an image f32[_SIZE, _SIZE, 3] as the camera of a scene sees it, as bytes."""
    light, colour = (np.array(colour, np.float32) for colour in (scene.light, scene.colour))
    seen = (1 - scene.veil) * (image * light) + scene.veil * colour
    for _ in range(scene.streaks):
        x, y, length = *rng.integers(_SIZE, size=2), int(rng.integers(6, 14))
        rows = np.arange(y, min(y + length, _SIZE))
        columns = np.clip(x + (rows - y) // 4, 0, _SIZE - 1)
        seen[rows, columns] = 0.45 * seen[rows, columns] + 0.55 * 215
    seen += np.float32(scene.noise) * rng.standard_normal(seen.shape, np.float32)
    return np.clip(np.rint(seen), 0, 255).astype(np.uint8)
