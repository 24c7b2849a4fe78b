"""The theory of client-specific batch norm, in numbers: kernels, eigenvalues, rates.

N clients train a two-layer network with batch norm on P points with square loss; point p belongs to
client i_p (FedBN, Section 4 and Appendix B; UniFed, Eq. 7 and Appendix A):

    f(x_p) = 1/sqrt(m) sum_k c_k phi(gamma_{k,i} v_k.x_p / |v_k|_{S_i})  with i = i_p

with phi = ReLU, |v|_S = sqrt(v^T S v) and S_i the covariance of client i's inputs. Averaged batch
norm has one gamma_k for all clients; client-specific batch norm has one for each client.
Predictions move as df/dt = -Lambda (f - y) with Lambda = V / alpha^2 + G, so that the least
eigenvalue of the magnitude part G bounds the rate from below.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def gram(points: ArrayLike, alpha: float = 1.0) -> np.ndarray:
    """Returns G_pq = E phi(v.x_p) phi(v.x_q) for v ~ N(0, alpha^2 I) (FedBN, Eq. 4; UniFed, 10).

    The closed form is the arc-cosine kernel of degree 1 (Cho & Saul 2009). If theta is the angle
    between x_p and x_q, it is alpha^2 |x_p| |x_q| (sin theta + (pi - theta) cos theta) / (2 pi).

    Args:
      points: f[P, d].
      alpha: standard deviation of v, above 0.

    Returns:
      f[P, P], symmetric and positive semi-definite; definite if no two points are parallel.
    """
    points = np.asarray(points)
    norms = np.linalg.norm(points, axis=1)
    # The origin has no direction; its norm of 0 makes its entries 0.
    unit = points / np.where(norms > 0, norms, 1)[:, None]
    # By half angles, because arccos of the product loses half the digits near parallel points.
    apart, across = (np.linalg.norm(unit[:, None] + s * unit, axis=-1) for s in (-1, 1))
    theta = 2 * np.arctan2(apart, across)
    kernel = np.sin(theta) + (np.pi - theta) * (unit @ unit.T)
    return alpha**2 * norms[:, None] * norms * kernel / (2 * np.pi)


def same_client(gram: ArrayLike, client: ArrayLike) -> np.ndarray:
    """Returns G*_pq = G_pq where i_p = i_q, else 0 (FedBN, Eq. 5; UniFed, Eq. 11).

    For points sorted by client, this is the block diagonal of `gram`. Its least eigenvalue is at
    least that of `gram` (FedBN, Corollary 4.6).

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
      samples: number of draws of v, at least 2.
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
    """The two-layer network; its last layer is not trained."""

    directions: jax.Array  # v f[m, d]
    scale: jax.Array  # gamma, f[m, N] if client-specific, f[m, 1] if averaged
    signs: jax.Array  # c f[m], each 1 or -1


class Data(NamedTuple):
    """All clients' points."""

    points: jax.Array  # f[P, d], with mean zero in each client
    client: jax.Array  # i32[P]
    covariances: jax.Array  # S f[N, d, d], positive definite
    targets: jax.Array  # y f[P]


def initialize(
    key: jax.Array, width: int, dimension: int, scales: int, alpha: float = 1.0
) -> Network:
    """Draws v_k ~ N(0, alpha^2 I) and c_k = 1 or -1; gamma = |v_k| / alpha (UniFed, Eq. 8, 9).

    Args:
      key: random key.
      width: m.
      dimension: d.
      scales: N for client-specific batch norm, 1 for averaged.
      alpha: magnitude of v, above 0; if it is above 1, the magnitude part G dominates the rate.
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
    # An averaged scale f[m, 1] is broadcast over the points.
    gamma = scale[:, data.client] if scale.shape[1] > 1 else scale
    return signs @ jax.nn.relu(gamma * normalized) / jnp.sqrt(signs.shape[0])


@jax.jit
def evolution(network: Network, data: Data) -> tuple[jax.Array, jax.Array]:
    """Returns the two parts of Lambda, V / alpha^2 and G, both f[P, P] (UniFed, Eq. 22 to 25).

    They are the Gram matrices of the predictions' gradients with respect to the directions v, and
    with respect to the scales gamma.
    """
    jacobian = jax.jacrev(predict)(network, data)
    # The signs are not trained, so their part of the Jacobian does not belong to Lambda.
    ways = (way.reshape(way.shape[0], -1) for way in (jacobian.directions, jacobian.scale))
    direction, magnitude = (way @ way.T for way in ways)
    return direction, magnitude


def train(network: Network, data: Data, rate: float, steps: int) -> tuple[Network, jax.Array]:
    """Minimizes 1/2 |f - y|^2 over directions and scales by gradient descent.

    This is federated averaging with one local step a round, of v and, if averaged, of gamma.

    Args:
      network: the initial network.
      data: all clients' points.
      rate: step size eta, below 2 / |Lambda| to converge.
      steps: number of steps.

    Returns:
      The trained network, and |f(t) - y|^2 f[steps + 1], where t = 0 is before the first step.
    """

    def loss(moving: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.square(predict(Network(*moving, network.signs), data) - data.targets).sum() / 2

    def step(moving: tuple, _: None) -> tuple[tuple, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(moving)
        # The loss is half of |f - y|^2.
        return jax.tree.map(lambda w, g: w - rate * g, moving, gradient), 2 * value

    moving, losses = jax.lax.scan(step, (network.directions, network.scale), length=steps)
    return Network(*moving, network.signs), jnp.append(losses, 2 * loss(moving))


def predicted(start: float, rate: float, eigenvalue: float, steps: int) -> np.ndarray:
    """Returns (1 - eta e / 2)^t |f(0) - y|^2 for t = 0 to `steps` (UniFed, Theorem 3.4).

    Differs from the paper: `eigenvalue` is the least eigenvalue e of the network's own G at the
    start, see `evolution`. That G divides each phi by |v_k|_S, but G of Definition 3.2 (`gram`)
    does not: if all S are the identity, the paper's e is alpha^2 d times too large.
    """
    return start * (1 - rate * eigenvalue / 2) ** np.arange(steps + 1.0)


class Course(NamedTuple):
    """The training of one network."""

    losses: np.ndarray  # |f(t) - y|^2, f[steps + 1]
    bound: np.ndarray  # the bound of |f(t) - y|^2 by `predicted`, f[steps + 1]
    eigenvalue: float  # the least eigenvalue of the magnitude part G at the start, f[]
    # the least eigenvalue of Lambda = V / alpha^2 + G at the end, f[]; at least eigenvalue / 2
    # where the theorem holds
    slowest: float


def race(
    key: jax.Array, data: Data, width: int, steps: int, alpha: float = 8.0
) -> dict[str, Course]:
    """Trains networks with averaged and client-specific scale from one start (Corollary 3.6).

    Both use eta = 1 / (2 |Lambda|), with the larger initial norm of the two.

    Args:
      key: random key.
      data: all clients' points.
      width: m, which should be large compared to the number of points.
      steps: number of gradient steps.
      alpha: magnitude of v at the start, above 1.

    Returns:
      The courses by name, "averaged" and "client-specific".
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
    """Returns the points, centred in each client, with the covariance of each client.

    Args:
      points: f[P, d].
      client: i32[P], numbered from 0; each client needs more than d points for a positive definite
        covariance.
      targets: f[P].
    """
    points, client = np.array(points, float), np.asarray(client)
    covariances = []
    for i in range(client.max() + 1):
        own = client == i
        points[own] -= points[own].mean(0)
        covariances.append(np.cov(points[own], rowvar=False, bias=True))
    return Data(*map(jnp.asarray, (points, client, np.stack(covariances), targets)))
