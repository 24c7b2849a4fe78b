"""Adds weather: snow, frost, fog, and spatter of rain or mud, in the form of `camera`."""

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import scipy  # loads ndimage at its first use

from fedjax_bn.data.corruptions.camera import Array, Rng, Table, drag, magnify

_NEEDS = "install fedjax_bn with its corruptions extra (pip install imagecorruptions-imaug)"
_GREY = np.array([0.299, 0.587, 0.114])  # luma of ITU-R BT.601
_WATER, _MUD = np.array([175, 238, 238]) / 255, np.array([63, 42, 20]) / 255


def _snow(
    images: Array,
    rng: Rng,
    layer: tuple[float, float],
    size: float,
    least: float,
    blur: tuple[int, float],
    keep: float,
) -> Array:
    """Adds steeply falling flakes to keep * image + (1 - keep) * whitened image.

    Flakes are where a magnified normal layer, with `layer` as mean and deviation, is above `least`;
    `blur` is the radius and sigma of their motion blur in pixels.
    """
    flakes = magnify(rng.normal(*layer, images.shape[:3])[..., None], size)
    flakes = np.floor(np.clip(np.where(flakes < least, 0, flakes), 0, 1) * 255) / 255
    flakes = drag(flakes, rng.uniform(-135, -45, len(images)), *blur)
    flakes = np.rint(flakes * 255) / 255
    white = np.maximum(images, (images @ _GREY)[..., None] * 1.5 + 0.5)
    return keep * images + (1 - keep) * white + flakes + flakes[:, ::-1, ::-1]


def _frost(images: Array, rng: Rng, keep: float, share: float) -> Array:
    """Returns keep * image + share * a random crop of one of five photographs of frost."""
    photographs = _frost_photographs()
    frosted = np.empty_like(images)
    height, width = images.shape[1:3]
    for k, image in enumerate(images):
        photograph = photographs[rng.integers(5)]  # of six: the published files never use the last
        top = rng.integers(photograph.shape[0] - height)
        left = rng.integers(photograph.shape[1] - width)
        frosted[k] = keep * image + share * photograph[top : top + height, left : left + width]
    return frosted


@cache
def _frost_photographs() -> tuple[Array, ...]:
    """Returns imagecorruptions' six photographs at a fifth of the size, f64[h, w, 3] in [0, 1]."""
    from PIL import Image

    package = importlib.util.find_spec("imagecorruptions")  # not imported, only its files are used
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"the corruption 'frost' needs photographs of frost: {_NEEDS}")
    files = sorted((Path(package.origin).parent / "frost").glob("frost[1-6].*"))
    if len(files) != 6:
        raise ModuleNotFoundError(f"{package.origin} lacks its frost photographs: {_NEEDS}")
    # Every fifth pixel: linear interpolation at a fifth of the size falls on pixel centres.
    return tuple(np.asarray(Image.open(file).convert("RGB"))[2::5, 2::5] / 255 for file in files)


def _fog(images: Array, rng: Rng, share: float, decay: float) -> Array:
    """Adds a cloud to each image, and scales the sum to at most the image's brightest value."""
    brightest = images.max(axis=(1, 2, 3), keepdims=True)
    cloud = _plasma(len(images), images.shape[1], decay, rng)[..., None]
    return (images + share * cloud) * brightest / (brightest + share)


def _plasma(count: int, side: int, decay: float, rng: Rng) -> Array:
    """Draws clouds f64[count, side, side] in [0, 1] by the diamond-square algorithm, on a torus."""
    full = 1 << (side - 1).bit_length()  # clouds are drawn at the next power of two, then cut
    cloud = np.zeros((count, full, full))
    step, rough = full, 100.0

    # A point differs from the mean of its neighbours by up to rough**2, less at every halving.
    def set_points(points: Array, *neighbours: Array) -> None:
        offset = rng.uniform(-rough, rough, points.shape)
        points[...] = sum(neighbours) / 4 + rough * offset

    while step >= 2:
        half = step // 2
        corner, middle = cloud[:, ::step, ::step], cloud[:, half::step, half::step]
        right = np.roll(corner, -1, 2)
        below = np.roll(corner, -1, 1)
        set_points(middle, corner, right, below, np.roll(right, -1, 1))
        set_points(cloud[:, ::step, half::step], middle, np.roll(middle, 1, 1), corner, right)
        set_points(cloud[:, half::step, ::step], middle, np.roll(middle, 1, 2), corner, below)
        step, rough = half, rough / decay
    cloud -= cloud.min(axis=(1, 2), keepdims=True)
    return (cloud / cloud.max(axis=(1, 2), keepdims=True))[:, :side, :side]


def _spatter(
    images: Array,
    rng: Rng,
    mean: float,
    scale: float,
    size: float,
    least: float,
    strength: float,
    mud: bool,
) -> Array:
    """Adds drops of water, which add light, or splashes of mud, which hide the picture.

    They are where a normal layer, blurred by `size` pixels, is above `least`. `strength` scales the
    light, or is the blur of the mud's edge in pixels.
    """
    layer = rng.normal(mean, scale, images.shape[:3])
    layer = scipy.ndimage.gaussian_filter(layer, (0, size, size), mode="nearest")
    layer[layer < least] = 0
    if mud:
        cover = (layer > least).astype(np.float64)
        cover = scipy.ndimage.gaussian_filter(cover, (0, strength, strength), mode="nearest")
        cover = np.where(cover < 0.8, 0, cover)[..., None]
        return images * (1 - cover) + _MUD * cover
    light = np.stack([_water_light(drops) for drops in (layer * 255).astype(np.uint8)])
    return images + strength * light[..., None] * _WATER


def _water_light(drops: Array) -> Array:
    """Returns the light f32[H, W] in [0, 1] of drops u8[H, W], brightest on one side."""
    try:
        import cv2
    except ImportError as error:
        raise ModuleNotFoundError(
            f"the corruption 'spatter' needs OpenCV ({error}): {_NEEDS}"
        ) from error
    away = cv2.distanceTransform(255 - cv2.Canny(drops, 50, 150), cv2.DIST_L2, 5)
    shade = cv2.equalizeHist(cv2.blur(np.minimum(away, 20), (3, 3)).astype(np.uint8))
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    shade = cv2.blur(cv2.filter2D(shade, cv2.CV_8U, relief), (3, 3)).astype(np.float32)
    light = drops * shade
    return light / max(light.max(), np.float32(1e-12))


# name -> the corruption, with its arguments at severity 1 to 5
WEATHER: Table = {
    "snow": (
        _snow,
        (
            ((0.1, 0.2), 1, 0.6, (8, 3), 0.95),
            ((0.1, 0.2), 1, 0.5, (10, 4), 0.9),
            ((0.15, 0.3), 1.75, 0.55, (10, 4), 0.9),
            ((0.25, 0.3), 2.25, 0.6, (12, 6), 0.85),
            ((0.3, 0.3), 1.25, 0.65, (14, 12), 0.8),
        ),
    ),
    "frost": (_frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (_fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "spatter": (
        _spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
    ),
}
