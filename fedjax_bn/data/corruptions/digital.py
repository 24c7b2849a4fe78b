"""What cameras and programs do: noise, other colours, less detail, distortion."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import scipy  # loads ndimage where it is used


def gaussian_noise(images: np.ndarray, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Adds normal noise of that standard deviation to images f64[N, H, W, 3]."""
    return images + rng.normal(scale=scale, size=images.shape)


def shot_noise(images: np.ndarray, rng: np.random.Generator, photons: float) -> np.ndarray:
    """Draws from Poisson: white is that many photons on average."""
    return rng.poisson(images * photons) / photons


def impulse_noise(images: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Makes that share of the values, each channel for itself, 0 or 1: salt and pepper."""
    hit, salt = rng.random(images.shape) <= share, rng.random(images.shape) < 0.5
    return np.where(hit, salt, images)


def speckle_noise(images: np.ndarray, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Adds normal noise in proportion to the value."""
    return images + images * rng.normal(scale=scale, size=images.shape)


def contrast(images: np.ndarray, rng: np.random.Generator, keep: float) -> np.ndarray:
    """Moves each channel of images f64[N, H, W, 3] towards its own mean over the image."""
    means = images.mean(axis=(1, 2), keepdims=True)
    return (images - means) * keep + means


def brightness(images: np.ndarray, rng: np.random.Generator, more: float) -> np.ndarray:
    """Raises HSV's value (the largest channel), at most to 1; hue and saturation stay."""
    value = images.max(axis=-1, keepdims=True)
    raised = np.minimum(value + more, 1)
    return np.where(value > 0, images * raised / np.where(value > 0, value, 1), raised)


def saturate(
    images: np.ndarray, rng: np.random.Generator, factor: float, more: float
) -> np.ndarray:
    """Makes HSV's saturation s factor * s + more, within [0, 1]; grey has the hue of red."""
    value = images.max(axis=-1, keepdims=True)
    lack = 1 - images / np.where(value > 0, value, 1)  # of each channel, as a share of the value
    saturation = np.where(value > 0, lack.max(axis=-1, keepdims=True), 0)
    grey = saturation == 0
    shape = np.where(grey, [0.0, 1.0, 1.0], lack / np.where(grey, 1, saturation))
    return value * (1 - shape * np.clip(saturation * factor + more, 0, 1))


def jpeg_compression(images: np.ndarray, rng: np.random.Generator, quality: int) -> np.ndarray:
    """Saves images as JPEG of that quality, 1 to 95, and reads them again."""
    from PIL import Image

    def save_and_read(image: Image.Image) -> Image.Image:
        file = BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _by_pillow(images, save_and_read)


def pixelate(images: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Makes images smaller, to that share of the side, and large again, averaging areas."""
    from PIL import Image

    height, width = images.shape[1:3]
    small = int(width * share), int(height * share)
    box = Image.Resampling.BOX
    return _by_pillow(images, lambda one: one.resize(small, box).resize((width, height), box))


def _by_pillow(images: np.ndarray, change: Callable) -> np.ndarray:
    from PIL import Image

    pixels = np.rint(images * 255).astype(np.uint8)
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in pixels]) / 255


def elastic_transform(
    images: np.ndarray, rng: np.random.Generator, alpha: float, sigma: float, shift: float
) -> np.ndarray:
    """Skews images by a random affine map, then stretches them as if printed on rubber.

    Args:
      images: f64[N, S, S, 3].
      rng: draws the map and the field of displacements.
      alpha: the field, uniform in [-1, 1] and smoothed, is multiplied by it, pixels.
      sigma: by which it is smoothed, pixels.
      shift: the corners that define the affine map move by up to that many pixels.
    """
    count, side = images.shape[:2]
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")).astype(float)
    low, high = side // 2 - side // 3, side // 2 + side // 3
    corners = np.array([[high, high], [low, high], [low, low]], float)  # row, column
    moved = corners + rng.uniform(-shift, shift, (count, 3, 2))[..., ::-1]
    # the picture at `moved` is what was at `corners`: solve for the map that says where to look
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


def _look_at(images: np.ndarray, places: np.ndarray, mode: str) -> np.ndarray:
    """Returns images f64[N, H, W, C] at places f64[2, N, H, W] (row, column) in pixels, linear.

    `mode` is what is beyond the edge, as in scipy.ndimage.
    """
    every = np.broadcast_to(np.arange(len(images))[:, None, None], places.shape[1:])
    where = np.concatenate([every[None], places])
    channels = np.moveaxis(images, -1, 0)
    seen = [scipy.ndimage.map_coordinates(one, where, order=1, mode=mode) for one in channels]
    return np.stack(seen, axis=-1)
