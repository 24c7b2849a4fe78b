"""ATP (Bao et al., NeurIPS 2023): each module adapts at a rate that source clients have learned."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.adaptation.adaptation import Adaptation
from fedjax_bn.adaptation.centres import entropy, logits_and_seen, mean, without_padding
from fedjax_bn.arguments.ranges import AtLeast0, Rounds, bounded
from fedjax_bn.engine.backend import all_finite
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.layer import Layer, Statistics, moments, moving
from fedjax_bn.sharing import STATISTICS, PyTree, Variables, batch_norm_paths, path_names, without


class _Direction(NamedTuple):
    """The carry: the mean direction over the samples so far, and their number `size` f[]."""

    mean: Variables
    size: jax.Array


@bounded
def atp(
    model: Any,
    rates: Variables | None = None,
    *,
    rate: AtLeast0 = 0.001,
    statistics: AtLeast0 = 0.1,
) -> Adaptation:
    r"""Moves each module along its direction by a rate of its own (ATP, NeurIPS 2023).

    $w_m + \alpha_m h_m$ for every leaf m

    h is minus the gradient of the mean entropy for a parameter, and the batch's statistic minus the
    running one for a running mean or variance; the model is evaluated with running statistics.
    Variances are at least 0. The batch is predicted after the move. All rates 0 give `running`.

    Every batch's h is taken at the received model. The model moves along the mean of h over the
    stream so far, each batch weighted by its valid samples (ATP-online). With the carry of `init`
    for every batch it moves along the batch's own h (ATP-batch).

    Differs from the authors' code (baowenxuan/ATP, its test `online_avg`): that takes the plain
    mean of the moved models, whose variances are clipped at 0 one by one. As long as nothing is
    clipped and batches are full, both are the same.

    Args:
      rates: a number f[] for each leaf of the collections `params` and `batch_stats`, as from
        `learn_rates`; None for `rate` and `statistics`.
      rate: the rate of all parameters, at least 0; unused with `rates`.
      statistics: the rate of all running means and variances, at least 0; unused with `rates`.
    """

    def init(variables: Variables) -> _Direction:
        nowhere = jax.tree.map(jnp.zeros_like, _moving(variables))
        return _Direction(nowhere, jnp.zeros((), promote(parameter_dtype(variables), jnp.float32)))

    def predict(
        variables: Variables, carry: _Direction, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Direction]:
        images = without_padding(images, valid)
        towards = _direction(model, variables, images, valid)
        kinds = {"params": rate, STATISTICS: statistics}
        leaf_rates = rates or {
            kind: jax.tree.map(lambda _, r=kinds[kind]: r, tree) for kind, tree in towards.items()
        }
        batch_count = len(images) if valid is None else valid.sum(dtype=carry.size.dtype)
        size = carry.size + batch_count

        def averaged(mean_before: jax.Array, h: jax.Array) -> jax.Array:
            # The mean over all samples so far, updated without their sum.
            change = batch_count / jnp.maximum(size, 1) * (h - mean_before)
            return mean_before + change.astype(mean_before.dtype)

        towards = jax.tree.map(averaged, carry.mean, towards)
        outputs = forward(model, _moved(variables, leaf_rates, towards), images).outputs
        return outputs, _Direction(towards, size)

    return Adaptation(init, predict)


@bounded
def learn_rates(
    model: Any,
    variables: Variables,
    batches: dict[str, jax.Array],
    *,
    rate: AtLeast0,
    rounds: Rounds = 1,
) -> Variables:
    r"""Returns the rates of `atp`, learned on labelled clients of the federation.

    $\alpha_m \leftarrow \alpha_m - (\eta / \sqrt{d_m}) \, \partial L(\alpha) / \partial \alpha_m$

    In a round each client starts from the rates of the last round and takes one step for each of
    its batches. L is the cross entropy of the batch at w + alpha h, and d_m the size of leaf m. The
    server takes the mean over the clients. The rates start at 0 and may become negative; the model
    never moves. A variance that is clipped at 0 gives its rate no derivative; in the authors' code
    the derivative passes the clipping.

    Args:
      variables: the received model, as from `federation.global_variables`.
      batches: {"image": f[K, S, B, ...], "label": i32[K, S, B], "valid": bool[K, S, B]} of K
        clients, as for a round. The paper takes samples that did not train the model.
      rate: eta, at least 0; 0.1 in the authors' scripts, which diverges on our scanners.
      rounds: number of rounds.

    Returns:
      A number f[] for each leaf of the collections `params` and `batch_stats`; one that is not
      finite raises ValueError.
    """

    def step(rates: Variables, batch: dict[str, jax.Array]) -> tuple[Variables, None]:
        valid = batch["valid"]
        images = without_padding(batch["image"], valid)
        towards = _direction(model, variables, images, valid)

        def loss(rates: Variables) -> jax.Array:
            outputs = forward(model, _moved(variables, rates, towards), images).outputs
            logits, seen = logits_and_seen(model, outputs, valid)
            # Padding may hold labels outside the classes, whose loss would be NaN.
            label = jnp.where(seen, batch["label"], 0)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return mean(losses, seen)

        def stepped(leaf_rate: jax.Array, g: jax.Array, leaf: jax.Array) -> jax.Array:
            # Large leaves have large gradients: the root of the size keeps rates comparable.
            return leaf_rate - (rate / leaf.size**0.5 * g).astype(leaf_rate.dtype)

        return jax.tree.map(stepped, rates, jax.grad(loss)(rates), towards), None

    def one_round(rates: Variables, batches: dict[str, jax.Array]) -> Variables:
        client_rates = jax.lax.map(lambda client: jax.lax.scan(step, rates, client)[0], batches)
        return jax.tree.map(partial(jnp.mean, axis=0), client_rates)

    rates = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), _moving(variables))
    # One compiled round, called again, because the number of rounds should not unroll.
    learn = jax.jit(one_round)
    for _ in range(rounds):
        rates = learn(rates, batches)
    if not all_finite(rates):
        raise ValueError(f"learn_rates: rates are not finite with rate={rate}: give a smaller rate")
    return rates


def _moving(variables: Variables) -> Variables:
    return {name: tree for name, tree in variables.items() if name in ("params", STATISTICS)}


def _direction(
    model: Any, variables: Variables, images: jax.Array, valid: jax.Array | None
) -> Variables:
    """h of every leaf that moves; 0 for parameters and finite for statistics without samples."""

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        # The batch's own statistics are what running ones with momentum 0 become.
        moved_layer = layer._replace(momentum=0.0, training=True)
        fresh = moving(moved_layer, *moments(x, valid, layer.columns))
        return Statistics(layer.mean, layer.var, fresh.moved)

    def loss(params: PyTree) -> tuple[jax.Array, Variables]:
        model_variables = {**variables, "params": params}
        options: dict[str, Any] = {}
        if batch_norm_paths(variables):
            options = {"statistics": rule, "valid": valid, "wanted": ["moved"]}
        passed = forward(model, model_variables, images, **options)
        logits, seen = logits_and_seen(model, passed.outputs, valid)
        return mean(entropy(logits), seen), passed.moved

    gradient, moved = jax.grad(loss, has_aux=True)(variables["params"])
    direction = {"params": jax.tree.map(jnp.negative, gradient)}
    if STATISTICS in variables:
        received = variables[STATISTICS]
        fresh = moved.get(STATISTICS, received)
        direction[STATISTICS] = jax.tree.map(jnp.subtract, fresh, received)
    return direction


def _moved(variables: Variables, rates: Variables, towards: Variables) -> Variables:
    def moved(path: tuple, leaf: jax.Array, rate: Any, h: jax.Array) -> jax.Array:
        leaf = leaf + (rate * h).astype(leaf.dtype)
        name = path_names(path)
        return jnp.maximum(leaf, 0) if name[0] == STATISTICS and name[-1] == "var" else leaf

    received = _moving(variables)
    moved_leaves = jax.tree_util.tree_map_with_path(moved, received, rates, towards)
    return without(variables, *moved_leaves) | moved_leaves
