"""UniFed's bounds on the risk at an unseen client, as numbers for given models and data.

There are N seen clients with M samples each and weights omega_i that sum to 1, one unseen client u,
and a model that serves u. Then (UniFed, Section 3.4 and Appendix B.1; N = 1: Blitzer et al. 2008)

    J_u <= J_seen + sum_i omega_i (d_i / 2 + epsilon_i) + 4 sqrt((2 d log 2NM + log 4/delta) / NM)

(Eq. 16, 29 and 30, with averaged batch norm; Eq. 13 and 28 for N = 1). With client-specific batch
norm every client's features are standardized by its own statistics, so that the paper takes d_i,
the divergence of client i from u, to be 0 (Eq. 18 and 31).

The terms are estimated as follows:

- J is the zero-one risk on samples, for which the bounds hold (Eq. 12).
- d_i is the distance over the symmetric differences of the hypotheses, a supremum that samples do
  not determine. `divergence` is the exact value for half-lines along some directions, a maximum of
  Kuiper's statistics, and thus a *lower estimate* of the distance for half-spaces.
- epsilon_i is the error of the best common hypothesis on both clients, a minimum. The error of any
  hypothesis is an *upper estimate*, which needs the unseen client's labels.
- d, the VC dimension of a network, is known only by bounds. With any such number the square root
  exceeds 1 unless NM is far larger: the bound is vacuous, but its terms can be compared.

NumPy computes all numbers in float64, from arrays of NumPy or JAX.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg


class Client(NamedTuple):
    """The samples of one client, and the predictions of two models for them."""

    # f[M, d], by which clients are compared, such as the classifier's input, normalized as in the
    # client's predictions
    features: np.ndarray
    predicted: np.ndarray  # i[M], classes that the served model predicts
    ideal: np.ndarray  # i[M], classes by a hypothesis that fits the seen and the unseen client well
    labels: np.ndarray  # i[M]


class Bound(NamedTuple):
    """The terms of a bound and their sum `total`: f[], but `divergences` and `errors` are f[N]."""

    risk: float  # J of the served model on the seen clients
    divergences: np.ndarray  # d_i, 0 with client-specific batch norm
    errors: np.ndarray  # epsilon_i
    complexity: float  # four times the square root
    total: float  # the right side of the inequality
    observed: float  # J_u, the left side


def divergence(first: np.ndarray, second: np.ndarray, directions: np.ndarray) -> float:
    """Returns a lower estimate of the distance 2 sup |P(A) - P'(A)| of Theorem 3.7, in [0, 2].

    The supremum is over the sets between two hyperplanes normal to one of the given directions, and
    their complements; these sets are symmetric differences of two half-spaces.

    Args:
      first: f[M, d].
      second: f[M', d].
      directions: f[D, d], normals of the hyperplanes.
    """
    return 2 * max(
        _kuiper(np.asarray(first) @ across, np.asarray(second) @ across)
        for across in np.asarray(directions)
    )


def _kuiper(first: np.ndarray, second: np.ndarray) -> float:
    """Returns sup |P(A) - P'(A)| over intervals A, the symmetric differences of half-lines."""
    every = np.concatenate([first, second])
    # "right" counts ties, so that both distribution functions jump at the same points.
    below, other = (np.searchsorted(np.sort(x), every, side="right") for x in (first, second))
    gap = below / len(first) - other / len(second)
    return max(gap.max(), 0) - min(gap.min(), 0)


def separating_directions(first: np.ndarray, second: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """Returns directions f64[D, d] along which two samples are likely to differ, for `divergence`.

    These are the axes and, where they exist,

    - Fisher's direction, normal of the best half-space for equal covariances. Without a difference
      of means, as after each client's own statistics, it would be rounding noise, and is left out.
    - the directions with the greatest and the least ratio of the two variances, the outer
      eigenvectors of C v = l (C + C') v. Without a difference of variances they are left out.

    Differences of less than sqrt(eps) of the points' type count as none. The order of the points
    has no influence.

    Args:
      first: f[M, d], at least 2 points.
      second: f[M', d], at least 2 points.
      ridge: share of the mean variance that is added to every variance.
    """
    least = np.finfo(np.result_type(first, second)).eps ** 0.5
    points = [np.asarray(x, float) for x in (first, second)]
    covariances = np.array([np.atleast_2d(np.cov(x, rowvar=False)) for x in points])
    size = covariances.shape[-1]
    scale = np.trace(covariances.mean(0)) / size or 1.0  # not 0, even if no feature varies
    covariances = covariances / scale + ridge * np.eye(size)
    directions = list(np.eye(size))
    between = points[0].mean(0) - points[1].mean(0)
    fisher = np.linalg.solve(covariances.mean(0), between)
    if between @ fisher > least * scale:  # the squared distance of Mahalanobis
        directions.append(fisher)
    shares, vectors = scipy.linalg.eigh(covariances[0], covariances.sum(0))
    directions += [vectors[:, i] for i in (0, -1) if abs(shares[i] - 1 / 2) > least]
    return np.stack(directions)


def complexity(dimension: float, samples: int, delta: float) -> float:
    """Returns 4 sqrt((2 d log 2M + log 4/delta) / M) (Eq. 13).

    Args:
      dimension: VC dimension d of the hypotheses, at least 1.
      samples: M, the number of all clients' samples together, at least 1.
      delta: probability that the bound fails, in (0, 1).

    Raises:
      ValueError: an argument is out of its range.
    """
    if dimension < 1 or samples < 1 or not 0 < delta < 1:
        raise ValueError(
            f"complexity: dimension={dimension} and samples={samples} must be at least 1, "
            f"delta={delta} between 0 and 1"
        )
    return 4 * np.sqrt((2 * dimension * np.log(2.0 * samples) + np.log(4 / delta)) / samples)


def averaged_bound(
    seen: Sequence[Client], unseen: Client, weights: np.ndarray, dimension: float, delta: float
) -> Bound:
    """Returns the bound with averaged batch norm (Eq. 16, 29, 30; for N = 1 Eq. 13, 28).

    The risk is on the mixture of the seen clients, with the weights as shares; the mixture's
    distance is at most the mean of the clients' distances (Eq. 14). `divergence` takes the
    `separating_directions` of each seen client and the unseen one, of all clients together.

    Args:
      seen: N clients; the same statistics normalize their features and the unseen client's.
      unseen: the client u.
      weights: omega f[N], which sum to 1.
      dimension, delta: see `complexity`.
    """
    theirs = np.asarray(unseen.features)
    ours = [np.asarray(client.features) for client in seen]
    across = np.concatenate([separating_directions(own, theirs) for own in ours])
    apart = np.array([divergence(own, theirs, across) for own in ours])
    return _bound(seen, unseen, weights, apart, dimension, delta)


def specific_bound(
    seen: Sequence[Client], unseen: Client, weights: np.ndarray, dimension: float, delta: float
) -> Bound:
    """Returns the bound with client-specific batch norm (Eq. 18 and 31), where d_i = 0.

    The paper assumes divergences of 0, which holds for Gaussian inputs. To measure how far real
    features deviate, call `divergence` on features that each client's own statistics normalize.
    Arguments are those of `averaged_bound`.
    """
    return _bound(seen, unseen, weights, np.zeros(len(seen)), dimension, delta)


def _bound(
    seen: Sequence[Client],
    unseen: Client,
    weights: np.ndarray,
    apart: np.ndarray,
    dimension: float,
    delta: float,
) -> Bound:
    def risk(predicted: np.ndarray, client: Client) -> float:
        return float(np.mean(np.asarray(predicted) != np.asarray(client.labels)))

    weights = np.asarray(weights)
    own = float(weights @ [risk(client.predicted, client) for client in seen])
    errors = np.array([risk(client.ideal, client) for client in seen])
    errors = errors + risk(unseen.ideal, unseen)
    size = complexity(dimension, sum(len(client.labels) for client in seen), delta)
    total = float(own + weights @ (apart / 2 + errors) + size)
    return Bound(own, apart, errors, size, total, risk(unseen.predicted, unseen))
