"""Small data sets for `theory`: Gaussian clients, and real handwriting.

Every set has N `clients`, one after another, with `each` points of d dimensions. A client needs
more than d points for a positive definite covariance.
"""

import numpy as np

from fedjax_bn.data.sets import scanners
from theory.convergence import Data, data_from


def gaussian_clients(seed: int = 0, clients: int = 3, each: int = 12, dimension: int = 10) -> Data:
    """Draws Gaussian points whose covariance differs by client, with targets from one rule."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(clients, dimension, dimension)) / np.sqrt(dimension)
    mixing += 0.5 * np.eye(dimension)
    points = np.concatenate([random.normal(size=(each, dimension)) @ m.T for m in mixing])
    targets = np.tanh(points @ random.normal(size=dimension))
    return data_from(points, np.repeat(np.arange(clients), each), targets)


def shifted_points(
    seed: int = 0, clients: int = 6, each: int = 180, dimension: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Draws Gaussian clients that differ only in the mean and scale of each feature.

    Returns:
      Points f[N * each, d], and labels i[N * each], 0 or 1 by a half-space of the points before
      shift and scale.
    """
    random = np.random.default_rng(seed)
    standard = random.normal(size=(clients, each, dimension))
    labels = standard @ random.normal(size=dimension) > 0
    scale = np.exp(random.normal(size=(clients, 1, dimension)) / 2)
    points = scale * standard + random.normal(size=(clients, 1, dimension))
    return points.reshape(-1, dimension), labels.ravel().astype(np.int64)


def scanner_points(
    seed: int = 0, clients: int = 5, each: int = 20, dimension: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Returns digits from up to 6 scanners, projected to the first d principal axes of all.

    Returns:
      Points f[N * each, d], divided by their standard deviation, and labels i[N * each], 1 for odd
      digits, 0 for even ones.
    """
    domains = scanners.load_scanners(seed).domains[:clients]
    splits = [domain.train for domain in domains if domain.train]
    images = np.concatenate([np.asarray(split.images[:each]) for split in splits])
    labels = np.concatenate([split.labels[:each] for split in splits])
    flat = images.reshape(len(images), -1) / 255.0
    flat -= flat.mean(0)
    _, _, axes = np.linalg.svd(flat, full_matrices=False)
    points = flat @ axes[:dimension].T
    return points / points.std(), labels % 2


def scanner_clients(seed: int = 0, clients: int = 5, each: int = 20, dimension: int = 10) -> Data:
    """Returns `scanner_points` with targets 1 for even digits and -1 for odd digits."""
    points, odd = scanner_points(seed, clients, each, dimension)
    return data_from(points, np.repeat(np.arange(clients), each), 1.0 - 2 * odd)
