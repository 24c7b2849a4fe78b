"""How far an unseen client may fall behind: UniFed's bounds as numbers of given models and data.

N seen clients with M samples each, weights omega_i that sum to 1, one unseen client u, a model that
is served to u (UniFed, section 3.4 and Appendix B.1; Blitzer et al. 2008 for one seen client):

    J_u <= J_seen + sum_i omega_i (d_i / 2 + epsilon_i) + 4 sqrt((2 d log 2NM + log 4/delta) / NM)

(Eq. 16, 29 and 30, with averaged batch norm; Eq. 13 and 28 are N = 1). With client-specific batch
norm every client's features are standardized by its own statistics, so that d_i, the divergence of
client i from u, is taken to be 0 (Eq. 18 and 31).

What is estimated, and how:

- J is the zero-one risk on samples, for which the bounds hold.
- d_i is the distance over the symmetric differences of the hypotheses, a supremum that samples do
  not give. `divergence` is its exact value for half-lines on each of some directions, a maximum of
  Kuiper's statistics, and so a *lower estimate* of it for half-spaces.
- epsilon_i is the error of the best common hypothesis on both clients, a minimum: that of any
  hypothesis is an *upper estimate*, and it needs the unseen client's labels.
- d, the VC dimension of a network, is known by bounds alone. With any such number the square root
  passes 1 unless NM is larger by far: the bound is vacuous, and what can be compared are its terms.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Client(NamedTuple):
    """What one client's samples are to the models in question.

    Attributes:
      features: f[M, d], in which clients are compared, such as those before the classifier,
        normalized as the client is served.
      predicted: i[M], classes by the served model.
      ideal: i[M], classes by a hypothesis that is good on the seen and the unseen client.
      labels: i[M].
    """

    features: jax.Array
    predicted: jax.Array
    ideal: jax.Array
    labels: jax.Array


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

    risk: jax.Array
    divergences: jax.Array
    errors: jax.Array
    complexity: jax.Array
    total: jax.Array
    observed: jax.Array


def empirical_risk(predicted: jax.Array, labels: jax.Array) -> jax.Array:
    """J: the share of samples that are classified wrongly, f[] in [0, 1] (Eq. 12).

    Args:
      predicted, labels: i[M].
    """
    return jnp.mean(predicted != labels, dtype=jnp.result_type(float))


def aggregated(weights: jax.Array, outputs: jax.Array) -> jax.Array:
    """f_u = sum_i omega_i f_i, the hypothesis of Eq. 15 and 16, f[M, C].

    Args:
      weights: f[N].
      outputs: f[N, M, C], of the seen clients' models.
    """
    return jnp.einsum("n,nmc->mc", weights, outputs)


def standardized(points: jax.Array, mean: jax.Array, covariance: jax.Array) -> jax.Array:
    """z = Sigma^(-1/2) (x - mu), f[M, d]: N(0, I) where x ~ N(mu, Sigma) (Eq. 17).

    With the seen clients' mean and covariance it is what averaged batch norm makes of an unseen
    client's samples, with its own what client-specific batch norm does.

    Args:
      points: f[M, d].
      mean: f[d].
      covariance: f[d, d], positive definite.
    """
    values, vectors = jnp.linalg.eigh(covariance)
    root = vectors / jnp.sqrt(values) @ vectors.T
    return (points - mean) @ root


def kuiper(first: jax.Array, second: jax.Array) -> jax.Array:
    """sup |P(A) - P'(A)| over intervals A of two samples, f[] in [0, 1].

    Intervals and their complements are the symmetric differences of half-lines.

    Args:
      first: f[M].
      second: f[M'].
    """
    every = jnp.concatenate([first, second])
    counts = [jnp.searchsorted(jnp.sort(x), every, side="right") for x in (first, second)]
    below, other = (n.astype(every.dtype) for n in counts)
    gap = below / len(first) - other / len(second)
    return jnp.maximum(gap.max(), 0) - jnp.minimum(gap.min(), 0)


def divergence(first: jax.Array, second: jax.Array, directions: jax.Array) -> jax.Array:
    """A lower estimate of the distance 2 sup |P(A) - P'(A)| of Theorem 3.7, f[] in [0, 2].

    The supremum is over slabs, the sets between two parallel hyperplanes and their complements,
    across the given directions; they are symmetric differences of two half-spaces.

    Args:
      first: f[M, d].
      second: f[M', d].
      directions: f[D, d], see `discriminant`.
    """
    return 2 * jax.vmap(kuiper, in_axes=(1, 1))(first @ directions.T, second @ directions.T).max()


def discriminant(first: jax.Array, second: jax.Array, ridge: float = 1e-6) -> jax.Array:
    """Fisher's direction f[d] between two samples: the best half-space where covariances are one.

    Args:
      first: f[M, d].
      second: f[M', d].
      ridge: added to the covariance's diagonal, as a share of its mean.
    """
    own = [jnp.cov(x, rowvar=False).reshape(x.shape[1], -1) for x in (first, second)]
    within = (own[0] + own[1]) / 2
    more = ridge * jnp.trace(within) / len(within) + jnp.finfo(within.dtype).tiny
    regular = within + more * jnp.eye(len(within), dtype=within.dtype)
    return jnp.linalg.solve(regular, first.mean(0) - second.mean(0))


def gaussian_divergence(mean: jax.Array, other: jax.Array, covariance: jax.Array) -> jax.Array:
    """The distance over half-spaces of two Gaussians with one covariance, f[] in [0, 2], exactly.

    2 (2 Phi(D / 2) - 1) with D the Mahalanobis distance of the means; over any larger class of sets
    it is the same (Eq. 30: d(N_i, N_u)).

    Args:
      mean, other: f[d].
      covariance: f[d, d], positive definite.
    """
    apart = mean - other
    distance = jnp.sqrt(apart @ jnp.linalg.solve(covariance, apart))
    return 2 * (2 * jax.scipy.stats.norm.cdf(distance / 2) - 1)


def mixture_divergence(weights: jax.Array, divergences: jax.Array) -> jax.Array:
    """The right side of Eq. 14: the mixture of seen clients is at most so far from the unseen one.

    Args:
      weights, divergences: f[N].
    """
    return weights @ divergences


def complexity(dimension: float, samples: int, delta: float) -> jax.Array:
    """4 sqrt((2 d log 2M + log 4/delta) / M), f[] (Eq. 13); with N clients, `samples` is N M.

    Args:
      dimension: VC dimension d of the hypotheses, at least 1.
      samples: M, at least 1.
      delta: probability that the bound fails, in (0, 1).

    Raises:
      ValueError: an argument is out of its range.
    """
    if dimension < 1 or samples < 1 or not 0 < delta < 1:
        raise ValueError(
            f"complexity: dimension={dimension} and samples={samples} must be at least 1, "
            f"delta={delta} between 0 and 1"
        )
    return 4 * jnp.sqrt((2 * dimension * jnp.log(2.0 * samples) + jnp.log(4 / delta)) / samples)


def averaged_bound(
    seen: Sequence[Client], unseen: Client, weights: jax.Array, dimension: float, delta: float
) -> Bound:
    """The bound with averaged batch norm (Eq. 16, 29, 30); of one seen client Eq. 13 and 28.

    The risk is that on the mixture of the seen clients, whose shares are the weights; divergences
    are `divergence` across Fisher's directions of all seen clients from the unseen one.

    Args:
      seen: N clients, whose features are normalized by the statistics that the unseen one gets too.
      unseen: the other client.
      weights: omega f[N], which sum to 1.
      dimension, delta: see `complexity`.
    """
    across = jnp.stack([discriminant(client.features, unseen.features) for client in seen])
    apart = jnp.stack([divergence(client.features, unseen.features, across) for client in seen])
    return _bound(seen, unseen, weights, apart, dimension, delta)


def specific_bound(
    seen: Sequence[Client], unseen: Client, weights: jax.Array, dimension: float, delta: float
) -> Bound:
    """The bound with client-specific batch norm (Eq. 18 and 31): `averaged_bound` with d_i = 0.

    That the divergences are 0 is the paper's assumption, which holds for Gaussian inputs. What is
    left of them on real features is `divergence` of features that each client's own statistics
    normalize.

    Args:
      seen, unseen, weights, dimension, delta: as of `averaged_bound`.
    """
    return _bound(seen, unseen, weights, jnp.zeros_like(weights), dimension, delta)


def _bound(
    seen: Sequence[Client],
    unseen: Client,
    weights: jax.Array,
    apart: jax.Array,
    dimension: float,
    delta: float,
) -> Bound:
    own = jnp.stack([empirical_risk(client.predicted, client.labels) for client in seen])
    errors = jnp.stack([empirical_risk(client.ideal, client.labels) for client in seen])
    errors = errors + empirical_risk(unseen.ideal, unseen.labels)
    samples = sum(len(client.labels) for client in seen)
    size = complexity(dimension, samples, delta)
    risk = weights @ own
    total = risk + mixture_divergence(weights, apart) / 2 + weights @ errors + size
    observed = empirical_risk(unseen.predicted, unseen.labels)
    return Bound(risk, apart, errors, size, total, observed)


def several_unseen(bounds: Sequence[Bound], weights: jax.Array) -> jax.Array:
    """The bound of N_u unseen clients together (Eq. 19 and its extension in Appendix B.1), f[].

    N_u J + sum_j sum_i omega_i (d_ij / 2 + epsilon_ij) + the square root, once, as it is printed:
    the sum of N_u bounds would have it N_u times.

    Args:
      bounds: of each unseen client, by the same seen clients and model.
      weights: omega f[N].
    """
    terms = [b.risk + weights @ (b.divergences / 2 + b.errors) for b in bounds]
    return sum(terms[1:], terms[0]) + bounds[0].complexity
