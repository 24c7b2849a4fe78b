"""HBN (Chen, Xu, Wu & Kittler, ICML 2025): hybrid batch normalisation."""

from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate, averaging, messages_by_size
from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, look_up
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.engine.keys import step_keys, stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, minimizing
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning, method_of, supervised
from fedjax_bn.normalization.batch_instance import GATE, with_gates
from fedjax_bn.normalization.calls import require_batch_norm
from fedjax_bn.normalization.layer import Layer, Statistics, moments
from fedjax_bn.sharing import STATISTICS, PyTree, Variables, everything, join, without
from fedjax_bn.state import Received


@bounded
def hbn(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    momentum: UpTo1 = 0.002,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""FedAvg whose batch norms mix the federation's moments with the batch's by a learned weight.

    $m = (1 - a) m_g + a m_B$ and $v = (1 - a) v_g + a v_B$ with $a = \mathrm{sigmoid}(t)$

    t f[C] starts at 0. In training, gradients flow through a and the batch's own moments, and the
    running statistics m_g and v_g do not move. t stays with its client, whatever `share` is. Before
    training, a client passes the round's batches through the received model and uploads the hybrid
    moments of every layer, pooled over its batches: the means of m and of v + m^2. The server pools
    the moments of all clients, which own n_k of n samples,

    $m = \sum_k n_k m_k / n$ and $v = \sum_k n_k (v_k + (m_k - m)^2) / n$

    and moves m_g <- (1 - momentum) m_g + momentum m, and likewise v_g. Predictions are normalized
    by m_g and v_g. A round costs an additional forward pass.

    Differs from the authors' code (Hongyao-Chen/HybridBN): the moments are of all batches of the
    round, not of one; v is divided by n, not n - 1; tests normalize by m_g and v_g.

    Args:
      momentum: weight of new moments at the server, in [0, 1]; 0.002 as in the authors' code.
    """
    load, frozen = options.get("load"), options.get("frozen")
    learned, federate_options = learning(model, **options)
    objective = supervised(learned, _hybrid_statistics)

    def start(key: jax.Array, variables: Variables) -> Variables:
        require_batch_norm("hbn", variables)
        if frozen and any(jax.tree.leaves(frozen(variables)[STATISTICS])):
            remedy = "leave them out, as in sharing.at('layer1', statistics=False)"
            raise ValueError(f"hbn moves running statistics, but frozen freezes some: {remedy}")
        existing = {path for path, _ in jax.tree.leaves_with_path(variables["params"])}

        # `with_gates` starts gates at 1, but t starts at 0; existing gates stay.
        def start_at_0(path: Any, leaf: jax.Array) -> jax.Array:
            return leaf if path in existing else jnp.zeros_like(leaf)

        params = jax.tree.map_with_path(start_at_0, with_gates(variables)["params"])
        return {**variables, "params": params}

    share = federate_options.pop("share", everything)

    def is_shared(path: Any, shared: bool) -> bool:
        return shared and path[-1].key != GATE

    return method_of(
        minimizing(objective, optimizer),
        around=lambda client: _measuring(client, learned, load or look_up),
        share=lambda variables: jax.tree.map_with_path(is_shared, share(variables)),
        server=_moving_statistics(momentum),
        start=start,
        **federate_options,
    )


def _hybrid_statistics(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
    """Normalizes by the rule of `hbn`, with t as the layer's gate, and records hybrid moments."""
    if not layer.training:
        return Statistics(layer.mean, layer.var)
    mean, var, count = moments(x, valid, layer.columns)
    share = jax.nn.sigmoid(cast(jax.Array, layer.gate).astype(mean.dtype))

    def mixed(tracked: jax.Array, measured: jax.Array) -> jax.Array:
        return (1 - share) * tracked.astype(mean.dtype) + share * measured

    mean, var = mixed(layer.mean, mean), mixed(layer.var, var)
    # The mean square, because unlike variances it may be averaged over batches and clients.
    statistics = {"seen_count": count, "seen_mean": mean, "seen_square": var + jnp.square(mean)}
    return Statistics(mean, var, recorded=statistics)


def _measuring(client: Client, learned: Learning, load: Load) -> Client:
    """Returns the client that first passes the round's data through the received model."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        variables, source = join(received.shared, received.personal), batches.get("source")
        steps = without(batches, "source")
        keys = step_keys(stream(key, "moments of a round"), batches["valid"])

        def recorded(inputs: tuple) -> PyTree:
            batch, key = inputs
            batch = blank_padding(load(source, batch, key))
            images = learned.read(variables, batch, key)
            options: dict[str, Any] = {"statistics": _hybrid_statistics, "wanted": ["recorded"]}
            return learned.trained(variables, images, batch, key, **options)[1].recorded

        def mean_of_steps(layer: PyTree) -> PyTree:
            count = layer["seen_count"]  # f[S]; 0 in steps of padding
            share = (count / jnp.maximum(count.sum(), 1))[:, None]
            return {name: (share * layer[f"seen_{name}"]).sum(0) for name in ("mean", "square")}

        measured = _each_layer(mean_of_steps, jax.lax.map(recorded, (steps, keys)))
        return client.run(received, batches, key)._replace(message=measured)

    return client._replace(run=run)


def _each_layer(function: Any, *trees: PyTree) -> PyTree:
    """Applies a function to every layer's dict of arrays in a tree of modules."""
    if not all(isinstance(leaf, dict) for leaf in trees[0].values()):
        return function(*trees)
    return {name: _each_layer(function, *(tree[name] for tree in trees)) for name in trees[0]}


def _moving_statistics(momentum: float) -> ServerUpdate:
    """Returns averaging that moves the statistics towards the pooled moments of all clients."""

    def moved(before: PyTree, measured: PyTree) -> PyTree:
        mean = measured["mean"]
        # Without the maximum, rounding could make the variance negative.
        statistics = {"mean": mean, "var": jnp.maximum(measured["square"] - jnp.square(mean), 0)}

        def moved_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
            return ((1 - momentum) * old + (momentum * new).astype(old.dtype)).astype(old.dtype)

        return {name: moved_leaf(leaf, statistics[name]) for name, leaf in before.items()}

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, message = aggregate.mean, aggregate.message
        # If clients keep their statistics by the sharing rule, there is nothing to move.
        if len(jax.tree.leaves(shared[STATISTICS])) < len(jax.tree.leaves(message)):
            return mean, state
        return {**mean, STATISTICS: _each_layer(moved, shared[STATISTICS], message)}, state

    return ServerUpdate(averaging().init, update, message_weight=messages_by_size)
