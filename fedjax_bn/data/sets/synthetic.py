"""FedBN's synthetic data: two pairs of Gaussians (Appendix F) and a toy regression (Fig. 1 and 2).

Reference: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.seeds import generator
from fedjax_bn.data.source import TEST, TRAIN, Pool, Source


def load_synthetic(
    *, seed: int = 0, samples: int = 1000, dimension: int = 10, correlation: float = -0.5
) -> Source:
    """Returns two clients, each with two Gaussian classes of one covariance around -1 and 1.

    The clients differ only in the covariance: "identity" has the identity matrix, "correlated" the
    matrix correlation^|i - j|, with the same variances but not diagonal.

    Args:
      seed: at least 0; draws the samples.
      samples: number of each client's training samples, and of its test samples; half of each
        class.
      dimension: features of a sample, at least 2.
      correlation: of neighbouring features, in (-1, 1), not 0.

    Returns:
      Source "synthetic": f32[2 * samples, dimension] per client; label 0 is the class around -1,
      label 1 the class around 1; parts are training and test.

    Differs from the paper: it leaves the off-diagonal entries and the number of samples open. With
    a negative correlation, both clients' classes can be separated, as the paper's accuracies
    require (the best possible error is below 0.1 %; a correlation of 0.5 would give 3 %).
    """
    if samples < 2 or dimension < 2:
        raise ValueError(f"samples is {samples} and dimension {dimension}; both must be at least 2")
    if not 0 < abs(correlation) < 1:
        raise ValueError(f"correlation is {correlation}; it must be in (-1, 1) and not 0")
    count, pools = 2 * samples, []
    labels = np.arange(count, dtype=np.int32) % 2
    parts = np.where(np.arange(count) < samples, TRAIN, TEST).astype(np.int8)
    for position, (name, ratio) in enumerate((("identity", 0.0), ("correlated", correlation))):
        noise = generator(seed, position).standard_normal((count, dimension))
        # step by step rather than by a matrix product, whose last bits depend on the machine
        for feature in range(1, dimension):
            noise[:, feature] *= np.sqrt(1 - ratio**2)
            noise[:, feature] += ratio * noise[:, feature - 1]
        images = (noise + (2 * labels[:, None] - 1)).astype(np.float32)
        names = np.array([f"{name}/{i}" for i in range(count)])
        pools.append(Pool(name, images, labels, names, parts))
    return Source("synthetic", ("minus", "plus"), tuple(pools), mean=(0.0,), std=(1.0,))


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
    *,
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

    Args:
      seed: at least 0.
      samples: N of each client.
      weight: the true w of normalized inputs, in (0.001, 12), the range of Fig. 2.
      deviations: of x at the two clients; gamma runs from 0.001 to 4.
      noise: standard deviation of the targets' noise.
      points: W and G, of the grids over w and gamma.

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
