"""Small data sets in the form of `fedjax_bn.theory`: Gaussian clients, and real handwriting."""

import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.sets import scanners
from fedjax_bn.theory.convergence import Data, data_from


def gaussian_clients(seed: int = 0, clients: int = 3, each: int = 12, dimension: int = 10) -> Data:
    """Gaussian points whose covariance differs by client; targets of one rule.

    Args:
      seed: at least 0.
      clients: N.
      each: points of a client, more than `dimension`.
      dimension: d.
    """
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(clients, dimension, dimension)) / np.sqrt(dimension)
    mixing += 0.5 * np.eye(dimension)
    points = np.concatenate([random.normal(size=(each, dimension)) @ m.T for m in mixing])
    targets = np.tanh(points @ random.normal(size=dimension))
    return _assemble(points, clients, each, targets)


def scanner_clients(clients: int = 5, each: int = 20, dimension: int = 10) -> Data:
    """Embedded digits as different scanners see them; 1 for even numbers, -1 for odd.

    Args:
      clients: N, up to 6 scanners.
      each: digits of a scanner, more than `dimension`.
      dimension: d, principal axes of all points together.
    """
    domains = scanners.load().domains[:clients]
    images = np.concatenate([domain.train.images[:each] for domain in domains])
    labels = np.concatenate([domain.train.labels[:each] for domain in domains])
    flat = images.reshape(len(images), -1) / 255.0
    flat -= flat.mean(0)
    _, _, axes = np.linalg.svd(flat, full_matrices=False)
    points = flat @ axes[:dimension].T
    return _assemble(points / points.std(), clients, each, 1.0 - 2 * (labels % 2))


def _assemble(points: np.ndarray, clients: int, each: int, targets: np.ndarray) -> Data:
    """Points of one client after the other, centred, with the clients' covariances."""
    client = jnp.repeat(jnp.arange(clients), each)
    return data_from(jnp.asarray(points), client, jnp.asarray(targets))
