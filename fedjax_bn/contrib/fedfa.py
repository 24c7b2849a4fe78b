"""FedFA (Zhou & Konukoglu, ICLR 2023): redraws the statistics of feature maps."""

import re
from math import prod
from typing import Any, Unpack
from zlib import crc32

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, averaging, equal_messages
from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.client import Trained
from fedjax_bn.contrib.parts import STAGES, require_maps, stages_of
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.normalization.calls import changing_outputs
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import is_spatial, moments
from fedjax_bn.sharing import PyTree, Variables, without
from fedjax_bn.state import Received

COLLECTION = "feature_statistics"  # path of a module -> {"mean", "std"} f[C]
_EPSILON = 1e-6  # added to variances, as in the authors' code
# Where stages of a residual and of a densely connected network end.
_ENDS = ((*STAGES[0], "layer4"), STAGES[1])


@bounded
def fedfa(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    names: str = "",
    probability: UpTo1 = 0.5,
    momentum: UpTo1 = 0.99,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""FedAvg whose clients, in training, redraw the statistics of feature maps.

    $x' = s' (x - m) / s + m'$ with $m' \sim N(m, (1 + g_m) v_m)$ and $s' \sim N(s, (1 + g_s) v_s)$

    $g_m = C t / \sum_c t_c$ with $t = u_m / (1 + u_m)$ for each of C channels, likewise $g_s$

    m and s are the mean and deviation over the positions of each sample's channel, and v their
    variances over the valid samples of the batch; gradients flow through all of them. u are the
    variances over clients of averages of m and s, in which every client averages over its batches
    (`momentum` is the weight of the past). At first u is 1, so that g is 1. Each module redraws or
    not, independently. With probability 0 it is FedAvg.

    The averages, the collection `feature_statistics`, travel with the model. Clients also send the
    changes of their averages and their squares, from which the server computes the next round's u.

    As in the authors' code (tfzhou/FedFA), variances over a batch are unbiased, averages continue
    from the mean over clients (in the paper they start again in each round), and only redrawn
    batches enter them. Differs from the code: u is by channel, as in the paper, where the code's g
    is always 1; u divides by the number of clients, not by one less; maps are redrawn where a
    module ends, before a pooling, so that skip connections of a U-Net carry redrawn maps.

    Args:
      names: modules whose outputs are redrawn if they are maps, see `contrib.parts.stages_of`. ""
        means the first of these that the model has: encoders and bottleneck of a U-Net, as in the
        paper; the ends of layer1 to layer4; a DenseNet's transitions; all batch norms.
      probability: probability that a module redraws in a pass, in [0, 1]; 0.5 as in the paper.
      momentum: weight of the past in averages of statistics, in [0, 1]; 0.99 as in the paper.
    """
    learned, federate_options = learning(model, **options)
    plain = supervised(learned)

    def start(key: jax.Array, variables: Variables) -> Variables:
        unet = re.compile(r"encoder\d+|bottleneck")
        # The skip connections of a U-Net carry the encoders' maps, so these are redrawn too.
        encoders = tuple(filter(unet.fullmatch, variables["params"]))
        ends = (encoders, *_ENDS) if encoders else _ENDS
        statistics = {
            name: {"mean": jnp.zeros(size), "std": jnp.ones(size)}
            for name, size in stages_of("fedfa", variables, names, ends).items()
        }
        return {COLLECTION: statistics} | variables

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        tracked, own_key = variables[COLLECTION], stream(key, "redrawn statistics")
        seen: dict[str, PyTree] = {}

        def redrawn(name: str, x: jax.Array) -> jax.Array:
            if not is_spatial(x):
                return x  # no positions to take statistics over
            # Each place has its own key, derived from its name.
            keys = jax.random.split(jax.random.fold_in(own_key, crc32(name.encode())))
            acts = jax.random.bernoulli(keys[0], probability)
            redrawn_map, measured = redraw_map(keys[1], x, batch["valid"], received.server[name])
            # A batch that is not redrawn moves no average.
            past = jnp.where(acts, momentum, 1)

            def move(old: jax.Array, new: jax.Array) -> jax.Array:
                return (past * old + (1 - past) * new).astype(old.dtype)

            seen[name] = jax.tree.map(move, tracked[name], measured)
            return jnp.where(acts, redrawn_map, x)

        with changing_outputs(tracked, redrawn):
            value, (loss, moved) = plain(without(variables, COLLECTION), batch, received, key)
        require_maps("fedfa", tracked, seen)
        return value, (loss, {**moved, COLLECTION: {**tracked, **seen}})

    return method_of(
        minimizing(objective, optimizer),
        finish=_send_changes,
        server=averaging(
            lambda shared, personal: jax.tree.map(jnp.ones_like, shared[COLLECTION]),
            _variances_over_clients,
            equal_messages,
        ),
        travels=COLLECTION,
        start=start,
        **federate_options,
    )


def redraw_map(
    key: jax.Array, x: jax.Array, valid: jax.Array, over_clients: PyTree
) -> tuple[jax.Array, PyTree]:
    """Returns x' f[B, ..., C], and the means {"mean", "std"} f[C] of its statistics in the batch.

    `over_clients` is {"mean", "std"} f[C], the variances u of `fedfa`.
    """
    positions = prod(x.shape[1:-1])
    mean, var = instance_moments(x)
    std = jnp.sqrt(var * (positions / max(positions - 1, 1)) + _EPSILON)
    drawn, means = {}, {}
    statistics = {"mean": mean, "std": std}
    for own_key, (name, statistic) in zip(jax.random.split(key), statistics.items(), strict=True):
        means[name], spread, count = moments(statistic, valid)
        # Unbiased over the valid samples, as PyTorch's `var` is.
        spread = spread * (count / jnp.maximum(count - 1, 1)) + _EPSILON
        wide = over_clients[name].astype(statistic.dtype) + _EPSILON
        share = wide / (1 + wide)
        factors = len(share) * share / share.sum()  # g, whose mean over channels is 1
        wider = 1 + factors
        noise = jax.random.normal(own_key, statistic.shape, statistic.dtype)
        drawn[name] = statistic + noise * jnp.sqrt(wider * spread)
    factor = drawn["std"] / std
    dtype = promote(x.dtype, mean.dtype)
    scale, shift = (positioned(t, x) for t in (factor, drawn["mean"] - factor * mean))
    return (x.astype(dtype) * scale + shift).astype(x.dtype), means


def _send_changes(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """Sends the changes of the averaged statistics in a round, and their squares."""
    before, after = received.shared[COLLECTION], trained.variables[COLLECTION]
    # A variance of changes is that of the values, and loses no digits where these are large.
    change = jax.tree.map(jnp.subtract, after, before)
    message = {"change": change, "square": jax.tree.map(jnp.square, change)}
    return trained.variables, received.memory, message


def _variances_over_clients(sent: PyTree, aggregate: Aggregate) -> PyTree:
    """Returns u of the next round, over the clients that count in this one."""
    change, square = (aggregate.message[name] for name in ("change", "square"))
    # Without the maximum, rounding could make a variance negative.
    return jax.tree.map(lambda c, s: jnp.maximum(s - jnp.square(c), 0), change, square)
