"""Blur: lenses out of focus, frosted glass, motion of the camera."""

from collections.abc import Sequence

import numpy as np
import scipy  # loads ndimage where it is used


def gaussian_blur(images: np.ndarray, rng: np.random.Generator, sigma: float) -> np.ndarray:
    """Blurs images f64[N, H, W, 3] by a Gaussian of sigma pixels; edges are repeated outwards."""
    return scipy.ndimage.gaussian_filter(images, (0, sigma, sigma, 0), mode="nearest")


def glass_blur(
    images: np.ndarray, rng: np.random.Generator, sigma: float, reach: int, passes: int
) -> np.ndarray:
    """Blurs, lets every pixel take the colour of a near one (one after the other), and blurs again.

    The code that made the published files means to swap the two pixels, but its swap of NumPy views
    copies one onto the other; so does this.

    Args:
      images: f64[N, H, W, 3].
      rng: draws the neighbour: -reach to reach - 1 pixels away on both axes.
      sigma: of both Gaussian blurs, pixels.
      reach: pixels.
      passes: over the image.
    """
    pixels = np.floor(gaussian_blur(images, rng, sigma) * 255 + 1e-6)  # k/255 is to stay k
    count, height, width = images.shape[:3]
    every = np.arange(count)
    for _ in range(passes):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                across, down = rng.integers(-reach, reach, (2, count))
                pixels[:, row, column] = pixels[every, row + down, column + across]
    return gaussian_blur(pixels / 255, rng, sigma)


def defocus_blur(
    images: np.ndarray, rng: np.random.Generator, radius: float, smooth: float
) -> np.ndarray:
    """Spreads each point to a disk of that radius in pixels, its edge smoothed over 3x3 pixels."""
    kernel = _disk(radius, smooth)
    return scipy.ndimage.correlate(images, kernel[None, :, :, None], mode="mirror")


def _disk(radius: float, smooth: float) -> np.ndarray:
    """Returns f64[2r+3, 2r+3], r = floor(radius): a disk through a 3x3 Gaussian of that sigma."""
    reach = np.arange(-int(radius) - 1, int(radius) + 2)
    inside = (reach[:, None] ** 2 + reach**2 <= radius**2).astype(np.float64)
    bell = np.exp(-np.square([-1, 0, 1]) / (2 * smooth**2))
    bell /= bell.sum()
    return scipy.ndimage.convolve(inside / inside.sum(), np.outer(bell, bell), mode="constant")


def motion_blur(
    images: np.ndarray, rng: np.random.Generator, radius: int, sigma: float
) -> np.ndarray:
    """Drags along one random direction, at most 45 degrees from the horizontal."""
    return drag(images, rng.uniform(-45, 45, len(images)), radius, sigma)


def drag(images: np.ndarray, degrees: np.ndarray, radius: int, sigma: float) -> np.ndarray:
    """Applies ImageMagick's motion blur: half a Gaussian along a ray, in whole pixels.

    Args:
      images: f64[N, H, W, C].
      degrees: f64[N], the ray's angle, from the columns to the rows.
      radius: pixels; the ray has 2 * radius + 1 of them.
      sigma: of the Gaussian, pixels.

    Returns:
      f64[N, H, W, C]: sum_i w_i image(row + round(i sin a), column + round(i cos a)), edges
      repeated outwards.
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


def zoom_blur(images: np.ndarray, rng: np.random.Generator, factors: Sequence[float]) -> np.ndarray:
    """Returns the mean of the image and of itself magnified by each of the factors."""
    return sum((magnify(images, factor) for factor in factors), images) / (len(factors) + 1)


def magnify(images: np.ndarray, factor: float) -> np.ndarray:
    """Returns the middle of images f64[N, S, S, C], enlarged to their size, linear."""
    side = images.shape[1]
    kept = int(np.ceil(side / factor))
    first = (side - kept) // 2
    # enlarging is linear and acts on rows and columns alike: its matrix is what it makes of 1
    matrix = scipy.ndimage.zoom(np.eye(kept), (factor, 1), order=1)
    trim = (len(matrix) - side) // 2
    matrix = matrix[trim : trim + side]
    large = images[:, first : first + kept, first : first + kept]
    for _ in range(2):  # along one axis, and the two are exchanged
        count, height, width, channels = large.shape
        large = matrix @ large.reshape(count, height, width * channels)
        large = large.reshape(count, side, width, channels).swapaxes(1, 2)
    return large
