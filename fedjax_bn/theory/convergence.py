"""The theory of client-specific batch norm, in numbers: kernels, eigenvalues, rates.

A two-layer network with batch norm is trained by N clients on P points, each of one client i_p,
with square loss (FedBN, Section 4 and Appendix B; UniFed, Eq. 7 and Appendix A):

    f(x_p) = 1/sqrt(m) sum_k c_k phi(gamma_{k,i} v_k.x_p / |v_k|_{S_i})  with i = i_p

with phi = ReLU, |v|_S = sqrt(v^T S v) and S_i the covariance of client i's inputs. Averaged batch
norm has one gamma_k for all clients, client-specific batch norm one a client. Predictions move as
df/dt = -Lambda (f - y) with Lambda = V / alpha^2 + G, so that the least eigenvalue of the magnitude
part G bounds the rate from below.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def gram(points: ArrayLike, alpha: float = 1.0) -> np.ndarray:
    """Returns G_pq = E phi(v.x_p) phi(v.x_q) for v ~ N(0, alpha^2 I) (FedBN, Eq. 4; UniFed, 10).

    In closed form by the arc-cosine kernel of degree 1 (Cho & Saul 2009), with theta the angle
    between x_p and x_q: alpha^2 |x_p| |x_q| (sin theta + (pi - theta) cos theta) / (2 pi).

    Args:
      points: f[P, d].
      alpha: standard deviation of v, above 0.

    Returns:
      f[P, P], symmetric and positive semi-definite; definite where no two points are parallel.
    """
    points = np.asarray(points)
    norms = np.linalg.norm(points, axis=1)
    # The origin has no direction; its entries are 0 by its norm.
    unit = points / np.where(norms > 0, norms, 1)[:, None]
    # The half-angle formula: arccos of the product loses half the digits near parallel points.
    apart, across = (np.linalg.norm(unit[:, None] + s * unit, axis=-1) for s in (-1, 1))
    theta = 2 * np.arctan2(apart, across)
    kernel = np.sin(theta) + (np.pi - theta) * (unit @ unit.T)
    return alpha**2 * norms[:, None] * norms * kernel / (2 * np.pi)


def same_client(gram: ArrayLike, client: ArrayLike) -> np.ndarray:
    """Returns G*_pq = G_pq where i_p = i_q, else 0 (FedBN, Eq. 5; UniFed, Eq. 11).

    Sorted by client it is the block diagonal of `gram`, so that its least eigenvalue is at least
    as large (FedBN, Corollary 4.6).

    Args:
      gram: f[P, P].
      client: i32[P], the client of each point.
    """
    client = np.asarray(client)
    return np.where(client[:, None] == client, gram, 0)


def sampled_gram(
    key: jax.Array, points: ArrayLike, samples: int, alpha: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `gram` by Monte Carlo, f[P, P], and its standard error, f[P, P].

    Args:
      key: random key.
      points: f[P, d].
      samples: how many v are drawn, at least 2.
      alpha: standard deviation of v.
    """
    points = np.asarray(points)
    v = alpha * np.asarray(jax.random.normal(key, (samples, points.shape[1]), points.dtype))
    active = np.maximum(v @ points.T, 0)
    mean, square = (a.T @ a / samples for a in (active, active**2))
    return mean, np.sqrt((square - mean**2) / (samples - 1))


def least_eigenvalue(matrix: ArrayLike) -> float:
    """Returns the least eigenvalue of a symmetric f[P, P]."""
    return np.linalg.eigvalsh(np.asarray(matrix))[0]


class Network(NamedTuple):
    """The two-layer network; its last layer stays as it was drawn.

    Attributes:
      directions: v f[m, d].
      scale: gamma f[m, N], client-specific, or f[m, 1], averaged.
      signs: c f[m], each 1 or -1.
    """

    directions: jax.Array
    scale: jax.Array
    signs: jax.Array


class Data(NamedTuple):
    """All clients' points.

    Attributes:
      points: f[P, d], of mean zero in each client.
      client: i32[P].
      covariances: S f[N, d, d], positive definite.
      targets: y f[P].
    """

    points: jax.Array
    client: jax.Array
    covariances: jax.Array
    targets: jax.Array


def initialize(
    key: jax.Array, width: int, dimension: int, scales: int, alpha: float = 1.0
) -> Network:
    """Draws v_k ~ N(0, alpha^2 I), c_k = 1 or -1; gamma = |v_k| / alpha (UniFed, Eq. 8 and 9).

    Args:
      key: random key.
      width: m.
      dimension: d.
      scales: N for client-specific batch norm, 1 for averaged.
      alpha: magnitude of v, above 0; above 1 the magnitudes G dominate the rate.
    """
    ours, theirs = jax.random.split(key)
    directions = alpha * jax.random.normal(ours, (width, dimension))
    gamma = jnp.linalg.norm(directions, axis=1) / alpha
    signs = jax.random.rademacher(theirs, (width,), directions.dtype)
    return Network(directions, jnp.repeat(gamma[:, None], scales, 1), signs)


def predict(network: Network, data: Data) -> jax.Array:
    """Returns f(x_p) for all points, f[P] (UniFed, Eq. 7)."""
    directions, scale, signs = network
    norms = jnp.sqrt(jnp.einsum("ka,nab,kb->kn", directions, data.covariances, directions))
    normalized = directions @ data.points.T / norms[:, data.client]  # [m, P]
    # an averaged scale, f[m, 1], is broadcast over the points
    gamma = scale[:, data.client] if scale.shape[1] > 1 else scale
    return signs @ jax.nn.relu(gamma * normalized) / jnp.sqrt(signs.shape[0])


@jax.jit
def evolution(network: Network, data: Data) -> tuple[jax.Array, jax.Array]:
    """Returns the two parts of Lambda, V / alpha^2 and G, both f[P, P] (UniFed, Eq. 22 to 25).

    Each is the Gram matrix of the predictions' gradients, with respect to the directions v and to
    the scales gamma.
    """
    jacobian = jax.jacrev(predict)(network, data)
    # The signs stay as drawn, so their part of the Jacobian does not belong to Lambda.
    ways = (way.reshape(way.shape[0], -1) for way in (jacobian.directions, jacobian.scale))
    direction, magnitude = (way @ way.T for way in ways)
    return direction, magnitude


def train(network: Network, data: Data, rate: float, steps: int) -> tuple[Network, jax.Array]:
    """Minimizes 1/2 |f - y|^2 over directions and scales by gradient descent.

    With one local step a round it is federated averaging of v and, with averaged batch norm, gamma.

    Args:
      network: the start.
      data: all clients' points.
      rate: step size eta, below 2 / |Lambda| to converge.
      steps: number of steps.

    Returns:
      The trained network and |f(t) - y|^2, f[steps + 1], the first before any step.
    """

    def loss(moving: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.square(predict(Network(*moving, network.signs), data) - data.targets).sum() / 2

    def step(moving: tuple, _: None) -> tuple[tuple, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(moving)
        # the loss is half of |f - y|^2
        return jax.tree.map(lambda w, g: w - rate * g, moving, gradient), 2 * value

    moving, losses = jax.lax.scan(step, (network.directions, network.scale), length=steps)
    return Network(*moving, network.signs), jnp.append(losses, 2 * loss(moving))


def predicted(start: float, rate: float, eigenvalue: float, steps: int) -> np.ndarray:
    """Returns (1 - eta e / 2)^t |f(0) - y|^2 for t = 0 to `steps` (UniFed, Theorem 3.4).

    Differs from the paper: give it the least eigenvalue e of the network's own G at the start, see
    `evolution`. G divides by |v_k|_S where G of Definition 3.2 (`gram`) does not, so that theirs
    is alpha^2 d times too large where all S are the identity.
    """
    return start * (1 - rate * eigenvalue / 2) ** np.arange(steps + 1.0)


class Course(NamedTuple):
    """How a network learned.

    Attributes:
      losses: |f(t) - y|^2, f[steps + 1].
      bound: the same as `predicted`, f[steps + 1].
      eigenvalue: the least of the magnitude part G at the start, f[].
      slowest: the least of Lambda = V / alpha^2 + G at the end, f[]; at least eigenvalue / 2 where
        the theorem holds.
    """

    losses: np.ndarray
    bound: np.ndarray
    eigenvalue: float
    slowest: float


def race(
    key: jax.Array, data: Data, width: int, steps: int, alpha: float = 8.0
) -> dict[str, Course]:
    """Trains the network with averaged and client-specific scale from one start (Corollary 3.6).

    Both make steps of eta = 1 / (2 |Lambda|), with the larger norm of the two at the start.

    Args:
      key: random key.
      data: all clients' points.
      width: m, large against the number of points.
      steps: of gradient descent.
      alpha: magnitude of v at the start, above 1.

    Returns:
      "averaged" and "client-specific".
    """
    scales = {"averaged": 1, "client-specific": data.covariances.shape[0]}
    dimension = data.points.shape[1]
    networks = {
        name: initialize(key, width, dimension, count, alpha) for name, count in scales.items()
    }
    starts = {name: evolution(network, data) for name, network in networks.items()}
    rate = 0.5 / max(float(np.linalg.norm(v + g, 2)) for v, g in starts.values())
    courses = {}
    for name, network in networks.items():
        trained, losses = jax.jit(train, static_argnums=3)(network, data, rate, steps)
        losses, eigenvalue = np.asarray(losses), least_eigenvalue(starts[name][1])
        bound = predicted(losses[0], rate, eigenvalue, steps)
        slowest = least_eigenvalue(sum(evolution(trained, data)))
        courses[name] = Course(losses, bound, eigenvalue, slowest)
    return courses


def data_from(points: ArrayLike, client: ArrayLike, targets: ArrayLike) -> Data:
    """Returns points centred in each client, with the covariance of each client.

    Args:
      points: f[P, d].
      client: i32[P], numbers from 0 on; each client needs more than d points for a covariance that
        is positive definite.
      targets: f[P].
    """
    points, client = np.array(points, float), np.asarray(client)
    covariances = []
    for i in range(client.max() + 1):
        own = client == i
        points[own] -= points[own].mean(0)
        covariances.append(np.cov(points[own], rowvar=False, bias=True))
    return Data(*map(jnp.asarray, (points, client, np.stack(covariances), targets)))
