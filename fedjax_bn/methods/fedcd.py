"""FedCD (Ma et al., ACM MM 2024): SCI's feature masks at the clients, REA at the server."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    ServerUpdate,
    Uploads,
    WeighingRule,
    averaging,
    risk_extrapolation,
    weighted_mean,
)
from fedjax_bn.client import Batch, LocalStep, Received, Trained, wait_for_all
from fedjax_bn.data.pixels.images import Prepare, standardize
from fedjax_bn.federation import FederatedMethod, federate
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models.masks import COLLECTION, FEATURES, keep_masks, with_masks
from fedjax_bn.sharing import SharingRule, Variables, everything, join

PyTree = Any


def fedcd(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    lambda_sci: float = 0.7,
    eta: float = 0.5,
    names: Sequence[str] = (FEATURES,),
    mask_optimizer: optax.GradientTransformation | None = None,
    share: SharingRule = everything,
    weigh: WeighingRule | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> FederatedMethod:
    """Clients minimize L_e = L + lambda ||g_e - g_g||^2 (SCI, Eq. 15), averaged by their risks.

        g_e = dL / dmask_e,    g_g = sum_e p_e g_e,    c = softmax(eta w + p)   (REA, Eq. 18)

    A client uploads the mean of its g_e over the samples of its last local epoch, and their mean
    with the sizes' shares p_e (not c_e) is g_g in the next round; the first round has no penalty.
    Every client keeps its mask, whatever `share` says: only gradients of masks travel. The
    reported loss, and so the risk in REA, is L_e.

    The masks are the collection `mask`, which `init` adds (see `fedjax_bn.models.masks`);
    adaptations and evaluation apply it, with the mean mask for an unseen client. The rows of Table
    1 are `weigh=by_size` (SCI alone) and `fedavg(..., weigh=risk_extrapolation(eta))` (REA alone).
    With lambda = 0, `mask_optimizer=optax.set_to_zero()` and `weigh=by_size` it is FedAvg.

    Args:
      model: linen module, images -> logits; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      lambda_sci: lambda, at least 0; the paper takes 0.5, 0.7, 0.8, 0.9 and 1.
      eta: as in `risk_extrapolation`; the paper takes 0.3, 0.5 and 0.8.
      names: what is masked, "features" or paths of modules; several have a mask each.
      mask_optimizer: that of the masks; `optimizer` by default, with a state of its own.
      share: which leaves are averaged.
      weigh: the weighing rule; `risk_extrapolation(eta)` by default.
      prepare: as in `fedavg`.
      **options: those of `fedavg` but `server`.

    Raises:
      ValueError: `lambda_sci` or `eta` is out of its range, or nothing is named; at `init`, where
        the model has no intermediate of a name.
    """
    if not 0 <= lambda_sci < float("inf"):
        raise ValueError(f"fedcd: lambda_sci={lambda_sci} must be finite and at least 0")
    if not names:
        raise ValueError(f"fedcd: names={names!r} must name something to mask, such as 'features'")
    objective = aligned_objective(model, prepare or standardize(), lambda_sci)
    method = federate(
        masked_step(objective, optimizer, mask_optimizer or optimizer),
        share=keep_masks(share),
        weigh=weigh or risk_extrapolation(eta),
        server=averaging_gradients(),
        finish=send_gradient,
        **options,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        return method.init(key, with_masks(model, variables, names), num_clients)

    return method._replace(init=init)


class Progress(NamedTuple):
    """The state of the local step.

    Attributes:
      params, masks: the optimizers' states.
      total: sum of g_e over the valid samples of the last local epoch so far.
      count: i32[], how many these are.
      rounds: i32[], the server's `rounds` when the sum began.
    """

    params: PyTree
    masks: PyTree
    total: PyTree
    count: jax.Array
    rounds: jax.Array


def masked_step(
    objective: Callable[..., tuple[jax.Array, Any]],
    optimizer: optax.GradientTransformation,
    mask_optimizer: optax.GradientTransformation,
) -> LocalStep:
    """One step of parameters and masks along the gradient of L_e; it sums up g_e."""

    def init(variables: Variables) -> Progress:
        params, masks = variables["params"], variables[COLLECTION]
        zero = jax.tree.map(jnp.zeros_like, masks)
        none = jnp.zeros((), jnp.int32)
        return Progress(optimizer.init(params), mask_optimizer.init(masks), zero, none, none)

    def update(
        variables: Variables, state: Progress, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, Progress, jax.Array]:
        def value(trained: Variables) -> tuple[jax.Array, Any]:
            return objective({**variables, **trained}, batch, received, key)

        trained = {name: variables[name] for name in ("params", COLLECTION)}
        (loss, aligned), gradients = jax.value_and_grad(value, has_aux=True)(trained)
        gradients = wait_for_all(gradients)
        params, own = trained["params"], trained[COLLECTION]
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            step, state_of_params = optimizer.update(gradients["params"], state.params, params)
            change, state_of_masks = mask_optimizer.update(gradients[COLLECTION], state.masks, own)
        new = {"params": optax.apply_updates(params, step)}
        new[COLLECTION] = optax.apply_updates(own, change)
        total, count = add_gradient(state, aligned.gradient, batch, received.server.rounds)
        state = Progress(state_of_params, state_of_masks, total, count, received.server.rounds)
        return {**variables, **aligned.moved, **new}, state, loss

    return LocalStep(init, update)


def add_gradient(
    state: Progress, gradient: PyTree, batch: Batch, rounds: jax.Array
) -> tuple[PyTree, jax.Array]:
    """The sum of g_e over valid samples of the last local epoch, and their number.

    A sum that another round began, of a client that keeps its local state, starts anew.
    """
    old = state.rounds == rounds
    count = jnp.where(batch["last_epoch"], batch["valid"].sum(dtype=jnp.int32), 0)

    def add(total: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.where(old, total, 0) + jnp.where(count > 0, g, 0) * count.astype(g.dtype)

    return jax.tree.map(add, state.total, gradient), jnp.where(old, state.count, 0) + count


def send_gradient(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """A client's last act: it sends its mean g_e beside the shared leaves."""
    count = jnp.maximum(trained.state.count, 1)
    mean = jax.tree.map(lambda total: total / count.astype(total.dtype), trained.state.total)
    return trained.variables, received.memory, mean


def averaging_gradients() -> ServerUpdate:
    """Averaging whose state is g_g, the mean of the clients' g_e with the shares of their sizes."""
    plain = averaging()

    def init(shared: PyTree, personal: PyTree) -> Alignment:
        own = join(shared, personal)[COLLECTION]
        return Alignment(jax.tree.map(jnp.zeros_like, own), jnp.zeros((), jnp.int32))

    def update(shared: PyTree, uploads: Uploads, state: Alignment) -> tuple[PyTree, Alignment]:
        mean, _ = plain.update(shared, uploads, ())
        return mean, Alignment(weighted_mean(uploads.messages, uploads.sizes), state.rounds + 1)

    return ServerUpdate(init, update)
