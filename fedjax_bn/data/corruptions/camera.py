"""Corrupts images as lenses, sensors and programs do: blur, noise, colours, detail, distortion.

A corruption is a function of images f64[N, S, S, 3] in [0, 1], a generator, and a strength;
`corrupt` clips its result to [0, 1] and truncates it to bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import scipy  # loads ndimage at its first use

Array = np.ndarray
Rng = np.random.Generator
Table = Mapping[str, tuple[Callable[..., Array], tuple[tuple[Any, ...], ...]]]


def _gaussian_noise(images: Array, rng: Rng, scale: float) -> Array:
    """Adds normal noise of standard deviation `scale`."""
    return images + rng.normal(scale=scale, size=images.shape)


def _shot_noise(images: Array, rng: Rng, photons: float) -> Array:
    """Draws from a Poisson distribution, in which white has `photons` photons on average."""
    return rng.poisson(images * photons) / photons


def _impulse_noise(images: Array, rng: Rng, share: float) -> Array:
    """Sets a share of the values, drawn per channel, to 0 or 1: salt and pepper."""
    # The order of these two draws is part of the result.
    hit, salt = rng.random(images.shape) <= share, rng.random(images.shape) < 0.5
    return np.where(hit, salt, images)


def _speckle_noise(images: Array, rng: Rng, scale: float) -> Array:
    """Adds normal noise in proportion to the value."""
    return images + images * rng.normal(scale=scale, size=images.shape)


def _contrast(images: Array, rng: Rng, keep: float) -> Array:
    """Moves each channel towards its own mean over the image."""
    means = images.mean(axis=(1, 2), keepdims=True)
    return (images - means) * keep + means


def _brightness(images: Array, rng: Rng, more: float) -> Array:
    """Raises HSV's value (the largest channel), at most to 1; hue and saturation do not change."""
    value = images.max(axis=-1, keepdims=True)
    raised = np.minimum(value + more, 1)
    return np.where(value > 0, images * raised / np.where(value > 0, value, 1), raised)


def _saturate(images: Array, rng: Rng, factor: float, more: float) -> Array:
    """Changes HSV's saturation s to factor * s + more, within [0, 1]; grey gets the hue of red."""
    value = images.max(axis=-1, keepdims=True)
    lack = 1 - images / np.where(value > 0, value, 1)  # of each channel, as a share of the value
    saturation = np.where(value > 0, lack.max(axis=-1, keepdims=True), 0)
    grey = saturation == 0
    shape = np.where(grey, [0.0, 1.0, 1.0], lack / np.where(grey, 1, saturation))
    return value * (1 - shape * np.clip(saturation * factor + more, 0, 1))


def _jpeg_compression(images: Array, rng: Rng, quality: int) -> Array:
    """Saves images as JPEG of `quality`, 1 to 95, and reads them again."""
    from PIL import Image

    def save_and_read(image: Image.Image) -> Image.Image:
        file = BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _by_pillow(images, save_and_read)


def _pixelate(images: Array, rng: Rng, share: float) -> Array:
    """Shrinks images to a share of their side and enlarges them again, averaging areas."""
    from PIL import Image

    height, width = images.shape[1:3]
    small = int(width * share), int(height * share)
    box = Image.Resampling.BOX
    return _by_pillow(images, lambda one: one.resize(small, box).resize((width, height), box))


def _by_pillow(images: Array, change: Callable) -> Array:
    from PIL import Image

    pixels = np.rint(images * 255).astype(np.uint8)
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in pixels]) / 255


def _elastic_transform(images: Array, rng: Rng, alpha: float, sigma: float, shift: float) -> Array:
    """Skews images by a random affine map, then stretches them as if printed on rubber.

    The map moves corners by up to `shift` pixels; displacements are uniform in [-1, 1], smoothed by
    `sigma` pixels, times `alpha` pixels.
    """
    count, side = images.shape[:2]
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")).astype(float)
    low, high = side // 2 - side // 3, side // 2 + side // 3
    corners = np.array([[high, high], [low, high], [low, low]], float)  # row, column
    moved = corners + rng.uniform(-shift, shift, (count, 3, 2))[..., ::-1]
    # The picture at `moved` is what was at `corners`: solve for the map from new to old places.
    system = np.concatenate([moved, np.ones((count, 3, 1))], axis=-1)
    affine = np.linalg.solve(system, np.broadcast_to(corners, moved.shape))
    points = np.concatenate([grid, np.ones((1, side, side))])
    images = _look_at(images, np.einsum("nka,kyx->anyx", affine, points), "mirror")
    fields = [rng.uniform(-1, 1, (count, side, side)) for _ in range(2)]
    across, down = (
        scipy.ndimage.gaussian_filter(field, (0, sigma, sigma), mode="reflect", truncate=3) * alpha
        for field in fields
    )
    return _look_at(images, grid[:, None] + np.stack([down, across]), "reflect")


def _look_at(images: Array, places: Array, mode: str) -> Array:
    """Interpolates images f64[N, H, W, C] linearly at pixels f64[2, N, H, W] (row, column)."""
    every = np.broadcast_to(np.arange(len(images))[:, None, None], places.shape[1:])
    where = np.concatenate([every[None], places])
    channels = np.moveaxis(images, -1, 0)
    seen = [scipy.ndimage.map_coordinates(one, where, order=1, mode=mode) for one in channels]
    return np.stack(seen, axis=-1)


def _gaussian_blur(images: Array, rng: Rng, sigma: float) -> Array:
    """Blurs by a Gaussian of `sigma` pixels; edges are repeated outwards."""
    return scipy.ndimage.gaussian_filter(images, (0, sigma, sigma, 0), mode="nearest")


def _glass_blur(images: Array, rng: Rng, sigma: float, reach: int, passes: int) -> Array:
    """Blurs by `sigma` pixels, gives each pixel the colour of a near one, and blurs again."""
    # The code of the published files intends to swap the two pixels, but swaps NumPy views and so
    # copies one onto the other; so does this.
    pixels = np.floor(_gaussian_blur(images, rng, sigma) * 255 + 1e-6)  # k/255 stays k
    count, height, width = images.shape[:3]
    every = np.arange(count)
    for _ in range(passes):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                across, down = rng.integers(-reach, reach, (2, count))
                pixels[:, row, column] = pixels[every, row + down, column + across]
    return _gaussian_blur(pixels / 255, rng, sigma)


def _defocus_blur(images: Array, rng: Rng, radius: float, smooth: float) -> Array:
    """Spreads each point to a disk of `radius` pixels, its edge smoothed over 3x3 pixels."""
    reach = np.arange(-int(radius) - 1, int(radius) + 2)
    inside = (reach[:, None] ** 2 + reach**2 <= radius**2).astype(np.float64)
    bell = np.exp(-np.square([-1, 0, 1]) / (2 * smooth**2))
    bell /= bell.sum()
    disk = scipy.ndimage.convolve(inside / inside.sum(), np.outer(bell, bell), mode="constant")
    return scipy.ndimage.correlate(images, disk[None, :, :, None], mode="mirror")


def _motion_blur(images: Array, rng: Rng, radius: int, sigma: float) -> Array:
    """Blurs each image along a random direction, at most 45 degrees from the horizontal."""
    return drag(images, rng.uniform(-45, 45, len(images)), radius, sigma)


def drag(images: Array, degrees: Array, radius: int, sigma: float) -> Array:
    """Applies ImageMagick's motion blur, half a Gaussian of `sigma` pixels along a ray.

    Returns f64[N, H, W, C], sum_i w_i image(row + round(i sin a), column + round(i cos a)) over
    i = 0 .. 2 * radius, edges repeated outwards; `degrees` f64[N] is a, from columns to rows.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-np.square(steps) / (2 * sigma**2))
    angle = np.deg2rad(degrees)[:, None]
    down, across = (np.ceil(steps * f(angle) - 0.5).astype(int) for f in (np.sin, np.cos))
    every = np.arange(len(images))[:, None, None]
    rows, columns = (np.arange(side)[None] for side in images.shape[1:3])
    blurred = np.zeros_like(images)
    for k, weight in enumerate(weights / weights.sum()):
        row = np.clip(rows + down[:, k, None], 0, rows[0, -1])[:, :, None]
        column = np.clip(columns + across[:, k, None], 0, columns[0, -1])[:, None, :]
        blurred += weight * images[every, row, column]
    return blurred


def _zoom_blur(images: Array, rng: Rng, factors: Sequence[float]) -> Array:
    """Returns the mean of the image and of itself magnified by each of the factors."""
    return sum((magnify(images, factor) for factor in factors), images) / (len(factors) + 1)


def magnify(images: Array, factor: float) -> Array:
    """Returns the middle of images f64[N, S, S, C], enlarged linearly to their size."""
    side = images.shape[1]
    kept = int(np.ceil(side / factor))
    first = (side - kept) // 2
    # Enlarging is linear and the same for rows and columns: its matrix is the enlarged identity.
    matrix = scipy.ndimage.zoom(np.eye(kept), (factor, 1), order=1)
    trim = (len(matrix) - side) // 2
    matrix = matrix[trim : trim + side]
    large = images[:, first : first + kept, first : first + kept]
    for _ in range(2):  # enlarges one axis, then exchanges the two
        count, height, width, channels = large.shape
        large = matrix @ large.reshape(count, height, width * channels)
        large = large.reshape(count, side, width, channels).swapaxes(1, 2)
    return large


def _singles(*values: Any) -> tuple[tuple[Any], ...]:
    return tuple((value,) for value in values)


# name -> the corruption, with its arguments at severity 1 to 5
CAMERA: Table = {
    "gaussian_noise": (_gaussian_noise, _singles(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, _singles(500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, _singles(0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": (_speckle_noise, _singles(0.06, 0.1, 0.12, 0.16, 0.2)),
    "defocus_blur": (_defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (
        _glass_blur,
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (
        _zoom_blur,
        _singles(*(np.arange(1, end, 0.01) for end in (1.06, 1.11, 1.16, 1.21, 1.26))),
    ),
    "gaussian_blur": (_gaussian_blur, _singles(0.4, 0.6, 0.7, 0.8, 1)),
    "brightness": (_brightness, _singles(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (_contrast, _singles(0.75, 0.5, 0.4, 0.3, 0.15)),
    "saturate": (_saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
    "elastic_transform": (
        _elastic_transform,
        ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    ),
    "pixelate": (_pixelate, _singles(0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (_jpeg_compression, _singles(80, 65, 58, 50, 40)),
}
