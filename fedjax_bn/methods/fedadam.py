r"""Optimizers at the server: FedAvgM, FedAdam, FedYogi and FedAdagrad.

FedAvgM is by Hsu, Qi & Brown (2019). The three adaptive optimizers are by Reddi et al. (ICLR 2021,
Algorithm 2). With the clients' mean change $\Delta = \sum_k p_k y_k - x$ their step is:

$m' = \beta_1 m + (1 - \beta_1) \Delta$

$v' = \beta_2 v + (1 - \beta_2) \Delta^2$ (FedAdam)

$v' = v - (1 - \beta_2) \Delta^2 \mathrm{sign}(v - \Delta^2)$ (FedYogi)

$v' = v + \Delta^2$ (FedAdagrad)

$x' = x + \eta m' / (\sqrt{v'} + \tau)$

m starts at 0 and v at tau^2, without bias correction. Only shared parameters have moments; the
server averages running statistics.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate
from fedjax_bn.arguments.ranges import Above0, Share, UpTo1, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import OptionsButServer

PyTree = Any


@bounded
def fedadam(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    eta: Above0 = 0.01,
    beta1: Share = 0.9,
    beta2: UpTo1 = 0.99,
    tau: Above0 = 1e-3,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """FedAvg with Adam at the server. With beta1 = 0, beta2 = 1 and eta = 2 tau it is FedAvg.

    Args:
      eta: the server's learning rate, above 0.
      beta1: decay of the first moment, in [0, 1).
      beta2: decay of the second moment, in [0, 1].
      tau: degree of adaptivity, above 0, in units of the parameters.
    """
    server = _adaptive(lambda v, square: beta2 * v + (1 - beta2) * square, eta, beta1, tau)
    return fedavg(model, optimizer, server=server, **options)


@bounded
def fedyogi(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    eta: Above0 = 0.01,
    beta1: Share = 0.9,
    beta2: UpTo1 = 0.99,
    tau: Above0 = 1e-3,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """FedAvg with Yogi at the server, where v rises or falls by (1 - beta2) Delta^2.

    Arguments and errors are those of `fedadam`.
    """

    def second_moment(v: jax.Array, square: jax.Array) -> jax.Array:
        return v - (1 - beta2) * square * jnp.sign(v - square)

    server = _adaptive(second_moment, eta, beta1, tau)
    return fedavg(model, optimizer, server=server, **options)


@bounded
def fedadagrad(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    eta: Above0 = 0.01,
    beta1: Share = 0.0,
    tau: Above0 = 1e-3,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """FedAvg with Adagrad at the server, where v only grows.

    Arguments and errors are those of `fedadam`, without `beta2`.
    """
    server = _adaptive(jnp.add, eta, beta1, tau)
    return fedavg(model, optimizer, server=server, **options)


@bounded
def fedavgm(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    eta: Above0 = 1.0,
    beta: Share = 0.9,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""FedAvg with momentum at the server (FedAvgM).

    $v' = \beta v + (x - \sum_k p_k y_k)$ and $x' = x - \eta v'$

    With beta = 0 and eta = 1 it is FedAvg.

    Args:
      eta: the server's learning rate, above 0.
      beta: the server's momentum, in [0, 1).
    """
    return fedavg(model, optimizer, server=_server_optimizer(optax.sgd(eta, beta)), **options)


class _Moments(NamedTuple):
    """The moments m and v, trees like the shared parameters."""

    first: PyTree
    second: PyTree


def _adaptive(
    second_moment: Callable[[jax.Array, jax.Array], jax.Array], eta: float, beta1: float, tau: float
) -> ServerUpdate:
    """Returns the server's step; `second_moment(v, Delta^2)` updates v."""

    def init(params: PyTree) -> _Moments:
        # As in Reddi et al.; Adam's usual 0 with a bias correction would be another method.
        start = partial(jnp.full_like, fill_value=tau**2)
        return _Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(start, params))

    def update(gradients: PyTree, state: _Moments, _: PyTree = None) -> tuple[PyTree, _Moments]:
        # The gradient is -Delta and optax adds the update, hence the minus sign.
        m = jax.tree.map(lambda m, g: beta1 * m - (1 - beta1) * g, state.first, gradients)
        v = jax.tree.map(lambda v, g: second_moment(v, jnp.square(g)), state.second, gradients)
        return jax.tree.map(lambda m, v: eta * m / (jnp.sqrt(v) + tau), m, v), _Moments(m, v)

    return _server_optimizer(optax.GradientTransformation(init, update))


def _server_optimizer(optimizer: optax.GradientTransformation) -> ServerUpdate:
    r"""Returns the step of an optimizer whose gradient is $x - \sum_k p_k y_k$."""

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        del personal
        return ServerState(kept=optimizer.init(shared["params"]))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        params = shared["params"]
        gradient = jax.tree.map(jnp.subtract, params, aggregate.mean["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            updates, moments = optimizer.update(gradient, state.kept, params)
        params = optax.apply_updates(params, updates)
        # Statistics take the mean: a step of Adam could make a variance negative.
        return {**aggregate.mean, "params": params}, ServerState(kept=moments)

    return ServerUpdate(init, update)
