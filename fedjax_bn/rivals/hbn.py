"""HBN (Chen, Xu, Wu & Kittler, ICML 2025): hybrid batch normalisation."""

from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    averaging,
    cast_like,
    messages_by_size,
)
from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, look_up
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning, method_of, supervised
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.batch_instance import GATE, with_gates
from fedjax_bn.normalization.layer import Layer, Statistics, moments
from fedjax_bn.sharing import (
    STATISTICS,
    SharingRule,
    Variables,
    everything,
    join,
    path_names,
)
from fedjax_bn.state import Received

PyTree = Any


@bounded
def hbn(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    momentum: UpTo1 = 0.002,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """FedAvg whose batch norms mix the federation's moments with the batch's, by a learned share.

        mean = (1 - a) m_g + a m_B,   var = (1 - a) v_g + a v_B,   a = sigmoid(t), t f[C], from 0

    In training, gradients flow through a and the batch's own moments; m_g and v_g, the running
    statistics, do not move there. t stays with its client, whatever `share` says. Before it trains,
    a client passes the round's batches through the received model and uploads the pooled hybrid
    moments of every layer, over its batches: the means of `mean` and of `var + mean^2`. The server
    pools those of all clients,

        m = sum_k n_k mean_k / n,   v = sum_k n_k (var_k + (mean_k - m)^2) / n,   n = sum_k n_k

    and moves m_g <- (1 - momentum) m_g + momentum m, and likewise v_g. Predictions are normalized
    by m_g and v_g. A round costs a forward pass more.

    The equations are those of the authors' code (Hongyao-Chen/HybridBN, FedBaseline/models/FedHBN).
    Differs from it: the moments are those of all batches of the round, where it takes one of 64
    samples; v is divided by n, not n - 1; its tests normalize by m and v, measured again, in place
    of m_g and v_g.

    Args:
      model: one with at least one batch norm, images -> outputs.
      optimizer: the local optimizer.
      momentum: of the server's step, in [0, 1]; 0.002 as in the authors' code.
      **options: those of `fedavg` but `server`.

    Raises:
      ValueError: `momentum` is out of its range; at `init`, where the model has no batch norm.
    """
    load = options.get("load")
    learned, rest = learning(model, **options)
    objective = supervised(learned, hybrid_statistics)
    method = method_of(
        gradient_step(differentiate(objective), optimizer),
        around=lambda client: _measuring(client, learned, load or look_up),
        share=_keeping_shares(rest.pop("share", everything)),
        server=_moving_statistics(momentum),
        **rest,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if STATISTICS not in variables:
            raise ValueError(
                "hbn mixes the statistics of batch norms, but the model has no batch norm: build "
                "it with fedjax_bn.normalization.BatchNorm or flax's own, or use fedavg"
            )
        return method.init(key, _with_shares(variables), num_clients)

    return method._replace(init=init)


def hybrid_statistics(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
    """The rule of `hbn`, with t in the place of the layer's gate; records the hybrid moments.

    The running statistics stay, and a pass that may not move them takes them alone.
    """
    if not layer.training:
        return Statistics(layer.mean, layer.var)
    mean, var, count = moments(x, valid)
    share = jax.nn.sigmoid(cast(jax.Array, layer.gate).astype(mean.dtype))

    def mixed(kept: jax.Array, new: jax.Array) -> jax.Array:
        return (1 - share) * kept.astype(mean.dtype) + share * new

    mean, var = mixed(layer.mean, mean), mixed(layer.var, var)
    found = {"seen_count": count, "seen_mean": mean, "seen_square": var + jnp.square(mean)}
    return Statistics(mean, var, recorded=found)


def _measuring(client: Client, learned: Learning, load: Load) -> Client:
    """The client, which first passes the round's data through the received model."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        found = _moments_of_round(learned, load, received, batches, key)
        return client.run(received, batches, key)._replace(message=found)

    return client._replace(run=run)


def _moments_of_round(
    learned: Learning, load: Load, received: Received, batches: Batch, key: jax.Array
) -> PyTree:
    """Layer -> {"mean", "square"} f[C] over all valid positions of a round; zeros for none."""
    variables, source = join(received.shared, received.personal), batches.get("source")
    steps = {name: leaf for name, leaf in batches.items() if name != "source"}
    keys = jax.random.split(stream(key, "moments of a round"), len(batches["valid"]))

    def one(inputs: tuple) -> PyTree:
        batch, key = inputs
        batch = blank_padding(load(source, batch, key))
        images = learned.read(variables, batch, key)
        out = forward(
            learned.model,
            variables,
            images,
            train=True,
            statistics=hybrid_statistics,
            valid=batch["valid"],
            key=key,
            wanted=["recorded"],
        )
        return out.recorded

    found = jax.lax.map(one, (steps, keys))
    return _each_layer(_mean_of_steps, found)


def _mean_of_steps(layer: PyTree) -> PyTree:
    count = layer["seen_count"]  # f[S]
    share = (count / jnp.maximum(count.sum(), 1))[:, None]
    return {name: (share * layer[f"seen_{name}"]).sum(0) for name in ("mean", "square")}


def _each_layer(function: Any, *trees: PyTree) -> PyTree:
    """`function` of every layer's dict of arrays, in a tree of modules."""
    if not all(isinstance(leaf, dict) for leaf in trees[0].values()):
        return function(*trees)
    return {name: _each_layer(function, *(tree[name] for tree in trees)) for name in trees[0]}


def _layers(found: PyTree) -> int:
    return len(jax.tree.leaves(found)) // 2


def _moving_statistics(momentum: float) -> ServerUpdate:
    """Averaging that moves the statistics towards the pooled moments of all clients."""
    plain = averaging()

    def moved(old: PyTree, found: PyTree) -> PyTree:
        mean = found["mean"]
        new = {"mean": mean, "var": jnp.maximum(found["square"] - jnp.square(mean), 0)}
        return {
            name: (1 - momentum) * old[name] + (momentum * new[name]).astype(old[name].dtype)
            for name in old
        }

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, state = plain.update(shared, aggregate, state)
        if len(jax.tree.leaves(shared[STATISTICS])) < 2 * _layers(aggregate.message):
            return mean, state  # clients keep them
        statistics = _each_layer(moved, shared[STATISTICS], aggregate.message)
        return {**mean, STATISTICS: cast_like(statistics, shared[STATISTICS])}, state

    return ServerUpdate(plain.init, update, message_weight=messages_by_size)


def _with_shares(variables: Variables) -> Variables:
    """The variables with t = 0 where they have none."""
    had = {path for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])}
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path in had else jnp.zeros_like(leaf),
        with_gates(variables)["params"],
    )
    return {**variables, "params": params}


def _keeping_shares(share: SharingRule) -> SharingRule:
    def rule(variables: Variables) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, shared: shared and path_names(path)[-1] != GATE, share(variables)
        )

    return rule
