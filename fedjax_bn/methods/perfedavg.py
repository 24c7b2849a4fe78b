"""Per-FedAvg (Fallah, Mokhtari & Ozdaglar, NeurIPS 2020): a model that adapts in one step."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.engine.images import Prepare
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.models.hooks import predicting
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.sharing import FROZEN, OWN, PyTree, Variables, complete, trainable
from fedjax_bn.state import Received
from fedjax_bn.task import Task

_LABELLED = 16  # samples of a test client: half a batch of 32, as in training


@bounded
def perfedavg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    inner_rate: AtLeast0 = 0.01,
    second_order: bool = False,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients adapt by one step on half of a batch, and minimize the loss on the other half.

    $F_k(w - \alpha \nabla F_k(w))$ with the rate $\alpha$ of the adapting step, `inner_rate`

    The first ceil(n/2) valid samples of a batch adapt all parameters by one step. The others give
    the gradient at the adapted point, which the optimizer applies to the unadapted parameters
    (in first order, the adapted point counts as w plus a constant). Running statistics move in both
    passes. The reported loss is the second half's at the adapted point. Test it with `personalize`.

    Args:
      optimizer: the local optimizer, which applies the gradient.
      inner_rate: learning rate of the adapting step, at least 0, alpha in the paper.
      second_order: whether to differentiate through the adapting step (the paper's Eq. 6).
    """
    learned, federate_options = learning(model, **options)
    gradient = _meta_gradient(supervised(learned), inner_rate, second_order)
    method = method_of(gradient_step(gradient, optimizer), **federate_options)
    return method._replace(personalize=(_LABELLED, inner_rate))


@bounded
def personalize(
    model: Any,
    variables: Variables,
    images: jax.Array,
    labels: PyTree,
    valid: jax.Array | None = None,
    *,
    inner_rate: AtLeast0 = 0.01,
    steps: int = 1,
    frozen: PyTree = (),
    prepare: Prepare | None = None,
    task: Task | None = None,
    statistics: StatisticsRule | None = None,
    key: jax.Array | None = None,
) -> Variables:
    """Adapts a model to a client, seen or unseen, with a few of its labelled samples.

    Makes `steps` steps w <- w - inner_rate grad F(w) over all parameters in training mode, as
    `perfedavg` does before its gradient. Running statistics move too.

    Args:
      variables: the received model, such as `global_variables(state)`, or one client's model from
        `client_variables(state)`.
      images, labels: u8|f[B, ...] as they are stored, and i32[B] or a tree of arrays [B, ...].
      valid: bool[B], marks the samples that count; all by default.
      inner_rate: learning rate, at least 0.
      steps: number of steps, at least 0.
      frozen: `state.frozen`, the leaves that no step moves; () for none.
      prepare, task, statistics: as in `fedavg`, the last one the method's own.
      key: random key, for a model with dropout.
    """
    received, variables = variables, predicting(variables)
    if frozen:
        variables = {**trainable(variables, frozen), FROZEN: frozen}
    learned, _ = learning(model, prepare=prepare, task=task)
    valid = jnp.ones(len(images), bool) if valid is None else valid
    batch = blank_padding({"image": images, "label": labels, "valid": valid})
    adapt = _adapting(differentiate(supervised(learned, statistics)), inner_rate)
    # A fixed key serves models without dropout, which draw nothing.
    keys = jax.random.split(jax.random.key(0) if key is None else key, steps)
    for i in range(steps):
        variables = adapt(variables, batch, Received((), ()), keys[i])
    if frozen:
        variables = complete(variables)
    if OWN in received:
        # Zeros, so that the adapted collections predict and not the client's own model.
        variables = {**variables, OWN: jax.tree.map(jnp.zeros_like, received[OWN])}
    return variables


def _adapting(gradient: Gradient, inner_rate: float) -> Callable[..., Variables]:
    """Returns a gradient step over all parameters, which keeps the statistics that it moved."""

    def adapt(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Variables:
        grads, (_, moved) = gradient(variables, batch, received, key)
        variables = trainable(variables)
        params = jax.tree.map(lambda w, g: w - inner_rate * g, variables["params"], grads["params"])
        return {**variables, **moved, "params": params}

    return adapt


def _meta_gradient(objective: Objective, inner_rate: float, second_order: bool) -> Gradient:
    """Returns the gradient of w -> F(w - inner_rate grad F(w; half); other half)."""
    gradient = differentiate(objective)
    adapt = _adapting(gradient, inner_rate)

    def adapted_by(of_query: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an objective or a gradient of the other half at the adapted point."""

        def adapted(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Any:
            support, query = _split_valid(batch)
            # Dropout of the query must not repeat that of the support.
            support_key, query_key = jax.random.split(key)
            point = adapt(variables, support, received, support_key)
            return of_query(point, query, received, query_key)

        return adapted

    # In first order the gradient of the adapted point is applied at the unadapted point.
    return differentiate(adapted_by(objective)) if second_order else adapted_by(gradient)


def _split_valid(batch: Batch) -> tuple[Batch, Batch]:
    """Returns the first ceil(n/2) of the n valid samples, and the others, as half batches."""
    valid = batch["valid"]
    size, count = valid.shape[0], valid.sum(dtype=jnp.int32)
    order = jnp.argsort(~valid, stable=True)  # the valid samples first, in order
    middle = (count + 1) // 2  # splits the valid samples; shapes are halves of a full batch

    def part(start: jax.Array | int, end: jax.Array, length: int) -> Batch:
        position = start + jnp.arange(length, dtype=jnp.int32)
        index = order[jnp.minimum(position, size - 1)]
        samples = {name: batch[name] for name in ("image", "label")}
        chosen = jax.tree.map(lambda x: x[index], samples)
        return batch | chosen | {"valid": position < end}

    support = part(0, middle, (size + 1) // 2)
    return support, part(jnp.where(count > 1, middle, 0), count, max(size // 2, 1))
