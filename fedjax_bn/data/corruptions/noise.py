"""Noise: what sensors, lack of light and bit errors add."""

import numpy as np


def gaussian_noise(images: np.ndarray, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Images f64[N, H, W, 3] plus normal noise of that standard deviation."""
    return images + rng.normal(scale=scale, size=images.shape)


def shot_noise(images: np.ndarray, rng: np.random.Generator, photons: float) -> np.ndarray:
    """Poisson noise: white is that many photons on average."""
    return rng.poisson(images * photons) / photons


def impulse_noise(images: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Salt and pepper: that share of the values, each channel for itself, becomes 0 or 1."""
    hit, salt = rng.random(images.shape) <= share, rng.random(images.shape) < 0.5
    return np.where(hit, salt, images)


def speckle_noise(images: np.ndarray, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Normal noise in proportion to the value that it is added to."""
    return images + images * rng.normal(scale=scale, size=images.shape)
