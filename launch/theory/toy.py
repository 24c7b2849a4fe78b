"""The toy regression of FedBN's Fig. 1 and 2 (Li et al., ICLR 2021)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.seeds import generator


class ToyRegression(NamedTuple):
    """Data of FedBN's Fig. 1 and 2: two clients and the mean squared errors of cos(w x / gamma).

    Attributes:
      x, y: f64[2, N], inputs and targets of the clients.
      weights: f64[W], the values of w; gammas: f64[G], the values of the batch norm's parameter.
      local_gammas: f64[2], each client's empirical standard deviation of x.
      plain: f64[2, W], Fig. 1 without batch norm: gamma = 1.
      normalized: f64[2, W], Fig. 1 with batch norm: each client's own gamma.
      surface: f64[2, G, W], Fig. 2: all pairs of w and gamma.
      best: f64[2], the w of the smallest normalized error of each client.
    """

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    gammas: np.ndarray
    local_gammas: np.ndarray
    plain: np.ndarray
    normalized: np.ndarray
    surface: np.ndarray
    best: np.ndarray


def toy_regression(
    seed: int = 0,
    samples: int = 500,
    weight: float = 6.0,
    deviations: tuple[float, float] = (0.5, 2.0),
    noise: float = 0.1,
    points: int = 200,
) -> ToyRegression:
    """Returns a regression that is not convex, and how batch norm makes two clients' errors alike.

    z ~ N(0, 1), y = cos(weight z) + noise N(0, 1), and client k sees x = deviations[k] z. The model
    is cos(w x / gamma): without batch norm gamma = 1 and the clients' best w differ by the ratio
    of their deviations; with gamma equal to the local deviation of x both best w are near `weight`.

    Differs from the paper, which writes y = cos(w x) for an x whose deviation differs between
    clients: taken literally, the mean of both clients' w with the mean of their gamma would be
    exact, but the paper finds that it fails. Scales that do not affect the targets agree with all
    its findings.
    """
    rng = generator(seed)
    z = rng.standard_normal((2, samples))
    y = np.cos(weight * z) + noise * rng.standard_normal((2, samples))
    x = np.asarray(deviations)[:, None] * z
    weights, gammas = np.linspace(0.001, 12, points), np.linspace(0.001, 4, points)
    local = x.std(axis=1)

    def errors(slopes_of: Sequence[np.ndarray]) -> np.ndarray:
        """Returns mean_n (cos(slope x_n) - y_n)^2 for both clients' slopes."""
        flat = [
            [np.mean((np.cos(slope * x[k]) - y[k]) ** 2) for slope in slopes.ravel()]
            for k, slopes in enumerate(slopes_of)
        ]
        return np.reshape(flat, np.shape(slopes_of))

    plain, normalized = errors([weights] * 2), errors([weights / gamma for gamma in local])
    surface, best = errors([weights / gammas[:, None]] * 2), weights[normalized.argmin(axis=1)]
    return ToyRegression(x, y, weights, gammas, local, plain, normalized, surface, best)
