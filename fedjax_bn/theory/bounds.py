"""How much worse an unseen client may fare: UniFed's bounds as numbers of given models and data.

N seen clients with M samples each, weights omega_i that sum to 1, one unseen client u, a model that
is served to u (UniFed, section 3.4 and Appendix B.1; Blitzer et al. 2008 for one seen client):

    J_u <= J_seen + sum_i omega_i (d_i / 2 + epsilon_i) + 4 sqrt((2 d log 2NM + log 4/delta) / NM)

(Eq. 16, 29 and 30, with averaged batch norm; Eq. 13 and 28 are N = 1). With client-specific batch
norm every client's features are standardized by its own statistics, so that d_i, the divergence of
client i from u, is taken to be 0 (Eq. 18 and 31).

What is estimated, and how:

- J is the zero-one risk on samples, for which the bounds hold (Eq. 12).
- d_i is the distance over the symmetric differences of the hypotheses, a supremum that samples do
  not give. `divergence` is its exact value for half-lines on each of some directions, a maximum of
  Kuiper's statistics, and so a *lower estimate* of it for half-spaces.
- epsilon_i is the error of the best common hypothesis on both clients, a minimum: that of any
  hypothesis is an *upper estimate*, and it needs the unseen client's labels.
- d, the VC dimension of a network, is known by bounds alone. With any such number the square root
  passes 1 unless NM is larger by far: the bound is vacuous, and what can be compared are its terms.

All are computed by NumPy from arrays of NumPy or JAX, in their precision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Client(NamedTuple):
    """The samples of one client, and what the models in question predict for them.

    Attributes:
      features: f[M, d], in which clients are compared, such as those before the classifier,
        normalized as the client is served.
      predicted: i[M], classes by the served model.
      ideal: i[M], classes by a hypothesis that is good on the seen and the unseen client.
      labels: i[M].
    """

    features: np.ndarray
    predicted: np.ndarray
    ideal: np.ndarray
    labels: np.ndarray


class Bound(NamedTuple):
    """The terms of a bound, each f[] but `divergences` and `errors` f[N], and their sum `total`.

    Attributes:
      risk: J of the served model on the seen clients.
      divergences: d_i, 0 with client-specific batch norm.
      errors: epsilon_i.
      complexity: the square root, four times.
      total: right side of the inequality.
      observed: J_u, its left side.
    """

    risk: float
    divergences: np.ndarray
    errors: np.ndarray
    complexity: float
    total: float
    observed: float


def divergence(first: np.ndarray, second: np.ndarray, directions: np.ndarray) -> float:
    """Returns a lower estimate of the distance 2 sup |P(A) - P'(A)| of Theorem 3.7, in [0, 2].

    The supremum is over slabs, the sets between two parallel hyperplanes and their complements,
    across the given directions; they are symmetric differences of two half-spaces.

    Args:
      first: f[M, d].
      second: f[M', d].
      directions: f[D, d].
    """
    return 2 * max(
        _kuiper(np.asarray(first) @ across, np.asarray(second) @ across)
        for across in np.asarray(directions)
    )


def _kuiper(first: np.ndarray, second: np.ndarray) -> float:
    """Returns sup |P(A) - P'(A)| over intervals A, the symmetric differences of half-lines."""
    every = np.concatenate([first, second])
    # "right" counts ties, so that both distribution functions jump at the same points
    below, other = (np.searchsorted(np.sort(x), every, side="right") for x in (first, second))
    gap = below / len(first) - other / len(second)
    return max(gap.max(), 0) - min(gap.min(), 0)


def _discriminant(first: np.ndarray, second: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """Returns Fisher's direction f[d], the best half-space where both covariances are one.

    `ridge` is added to the covariance's diagonal, as a share of its mean.
    """
    own = [np.cov(x, rowvar=False).reshape(x.shape[1], -1) for x in (first, second)]
    within = (own[0] + own[1]) / 2
    # `tiny` keeps the matrix regular where no feature varies
    more = ridge * np.trace(within) / len(within) + np.finfo(within.dtype).tiny
    regular = within + more * np.eye(len(within))
    return np.linalg.solve(regular, first.mean(0) - second.mean(0))


def complexity(dimension: float, samples: int, delta: float) -> float:
    """Returns 4 sqrt((2 d log 2M + log 4/delta) / M) (Eq. 13).

    Args:
      dimension: VC dimension d of the hypotheses, at least 1.
      samples: M, at least 1; those of all clients together.
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
    """Returns the bound with averaged batch norm (Eq. 16, 29, 30); of one seen client Eq. 13, 28.

    The risk is that on the mixture of the seen clients, whose shares are the weights, and the
    mixture's distance is at most the mean of theirs (Eq. 14); divergences are `divergence` across
    Fisher's directions of all seen clients from the unseen one.

    Args:
      seen: N clients, whose features are normalized by the statistics that the unseen one gets too.
      unseen: the other client.
      weights: omega f[N], which sum to 1.
      dimension, delta: see `complexity`.
    """
    theirs = np.asarray(unseen.features)
    ours = [np.asarray(client.features) for client in seen]
    across = np.stack([_discriminant(own, theirs) for own in ours])
    apart = np.array([divergence(own, theirs, across) for own in ours])
    return _bound(seen, unseen, weights, apart, dimension, delta)


def specific_bound(
    seen: Sequence[Client], unseen: Client, weights: np.ndarray, dimension: float, delta: float
) -> Bound:
    """Returns the bound with client-specific batch norm (Eq. 18 and 31), where d_i = 0.

    That the divergences are 0 is the paper's assumption, which holds for Gaussian inputs. What is
    left of them on real features is `divergence` of features that each client's own statistics
    normalize. Arguments as of `averaged_bound`.
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
