"""Adaptations that learn by gradients from unlabelled images: Tent, SAR, SHOT's objective and ATP.

Each client starts from the received model, and a batch without a valid sample changes nothing.
Tent, SAR and SHOT normalize by the statistics of the batch, if the network has batch norms, and
predict a batch before they learn from it, as Tent's and SAR's codes do: the first batch is
predicted as by `batch`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.adaptation.adaptation import Adaptation, logits_and_seen
from fedjax_bn.arguments.ranges import AtLeast0, Fraction, Rounds, bounded
from fedjax_bn.engine.backend import all_finite, where_tree
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.models.classifier import classifier_path, entropy
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import batch_statistics
from fedjax_bn.normalization.calls import network_name
from fedjax_bn.normalization.layer import Layer, Statistics, moments, moving
from fedjax_bn.sharing import (
    STATISTICS,
    PyTree,
    Variables,
    batch_norm_paths,
    join,
    norm_paths,
    path_names,
)

_MOMENTUM = 0.9


class _Learned(NamedTuple):
    """The carry: the parameters that learn (None elsewhere) and the optimizer's state."""

    parameters: PyTree
    optimizer: PyTree


@bounded
def tent(model: Any, rate: AtLeast0 = 0.001) -> Adaptation:
    r"""Learns scale and bias of the norms by the entropy of predictions (Tent, ICLR 2021).

    $H = - \sum_c p_c \log p_c$, a mean over the valid samples, or over their pixels

    One step of Adam for each batch. With rate 0 it is `batch`. The norms are those of
    `sharing.norm_paths`.

    Args:
      rate: the learning rate, at least 0; 0.001 in Tent, except on ImageNet.
    """
    learns = partial(_norms, "tent", model)
    return _by_gradient(model, learns, lambda x, seen: _mean(entropy(x), seen), optax.adam(rate))


@bounded
def shot(model: Any, rate: AtLeast0 = 0.001) -> Adaptation:
    r"""Learns all parameters but the classifier's by information maximization (SHOT, ICML 2020).

    $\frac{1}{n} \sum_i H(p_i) - H(\frac{1}{n} \sum_i p_i)$

    One step of SGD with momentum 0.9 for each batch. With rate 0 it is `batch`. A batch of one
    sample gives the gradient 0. The second term expects classes to be equally frequent.

    Differs from the paper: learns on the stream, without epochs, pseudo-labels, weight decay, decay
    of the rate and Nesterov's step, which are in its code (tim-learn/SHOT).

    Args:
      rate: the learning rate, at least 0; SHOT has 0.001 for a pretrained backbone.
    """

    def objective(logits: jax.Array, seen: jax.Array) -> jax.Array:
        logs, weight = jax.nn.log_softmax(logits), seen.astype(logits.dtype)
        # The mean is taken in logs, because the gradient of p log p is not finite at 0.
        sums = jax.nn.logsumexp(logs, axis=0, b=weight[:, None])
        average = sums - jnp.log(jnp.maximum(weight.sum(), 1))
        return _mean(entropy(logits), seen) + (jnp.exp(average) * average).sum()

    def learns(variables: Variables) -> PyTree:
        path = classifier_path("shot", model, variables)
        return _chosen(variables, lambda leaf: leaf[:-1] != path)

    return _by_gradient(model, learns, objective, optax.sgd(rate, _MOMENTUM))


def _by_gradient(
    model: Any,
    learns: Callable[[Variables], PyTree],
    objective: Callable[[jax.Array, jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
) -> Adaptation:
    """Returns the adaptation that takes a step along the gradient of an objective per batch."""

    def init(variables: Variables) -> _Learned:
        learned = learns(variables)
        return _Learned(learned, optimizer.init(learned))

    def predict(
        variables: Variables, carry: _Learned, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Learned]:
        def loss(learned: PyTree) -> tuple[jax.Array, jax.Array]:
            outputs, logits, seen = _passed(model, variables, learned, images, valid)
            return objective(logits, seen), outputs

        # The outputs are those before the step, as in Tent's code.
        gradient, outputs = jax.grad(loss, has_aux=True)(carry.parameters)
        moved = _stepped(optimizer, gradient, carry)
        return outputs, moved if valid is None else where_tree(valid.any(), moved, carry)

    return Adaptation(init, predict)


class _Guarded(NamedTuple):
    """The carry of `sar`; `average` f[] is the moving average of entropies, 0 before the first."""

    learned: _Learned
    average: jax.Array


@bounded
def sar(
    model: Any,
    rate: AtLeast0 = 0.00025,
    *,
    margin: Fraction = 0.4,
    rho: AtLeast0 = 0.05,
    reset: AtLeast0 = 0.2,
) -> Adaptation:
    r"""Tent with sharpness, a filter of samples and a reset (SAR, ICLR 2023, Eq. 2 and 4).

    $\nabla H(w + e)$ with $e = \rho g / \Vert g \Vert$ and $g = \nabla H(w)$

    H is the mean entropy of the samples below $E_0$ = margin ln C at w; at w + e those above $E_0$
    are left out too. SGD with momentum 0.9 takes one step for each batch. If the moving average of
    H(w + e), with weight 0.9 for the past, falls below `reset`, the client starts again from the
    received model. A batch whose samples are all left out changes nothing.

    Differs from the code (mr-eggplant/SAR): no layer is frozen by its name, a batch without a
    certain sample takes no step of momentum, and after a reset momentum and average start again.

    Args:
      model, rate: as in `tent`; 0.00025 in SAR, for ResNet-50 and batches of 64.
      margin: E_0 as a share of ln C, in (0, 1].
      rho: distance of the point from w.
      reset: the least average entropy; 0 for no reset.
    """
    optimizer = optax.sgd(rate, _MOMENTUM)

    def init(variables: Variables) -> _Guarded:
        learned = _norms("sar", model, variables)
        average = jnp.zeros((), promote(parameter_dtype(variables), jnp.float32))
        return _Guarded(_Learned(learned, optimizer.init(learned)), average)

    def predict(
        variables: Variables, carry: _Guarded, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Guarded]:
        def certain(learned: PyTree, counted: jax.Array | None) -> tuple[jax.Array, tuple]:
            outputs, logits, seen = _passed(model, variables, learned, images, valid)
            entropies = entropy(logits)
            below = seen & (entropies < margin * math.log(logits.shape[-1]))
            counted = below if counted is None else below & counted
            return _mean(entropies, counted), (outputs, counted)

        learned = carry.learned.parameters
        gradient, (outputs, counted) = jax.grad(certain, has_aux=True)(learned, None)
        # The constant keeps a gradient of 0 from giving 0 / 0.
        length = rho / (optax.tree.norm(gradient) + 1e-12)
        point = jax.tree.map(lambda w, g: w + (length * g).astype(w.dtype), learned, gradient)
        (level, (_, counted)), gradient = jax.value_and_grad(certain, has_aux=True)(point, counted)
        level = level.astype(carry.average.dtype)
        # 0 means that there was no batch yet.
        average = jnp.where(carry.average == 0, level, 0.9 * carry.average + 0.1 * level)
        moved = _Guarded(_stepped(optimizer, gradient, carry.learned), average)
        # Low entropy for long means collapse, so the client starts again.
        moved = where_tree(average < reset, init(variables), moved)
        return outputs, where_tree(counted.any(), moved, carry)

    return Adaptation(init, predict)


def _passed(
    model: Any, variables: Variables, learned: PyTree, images: jax.Array, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs with the parameters `learned`, by batch statistics, and `logits_and_seen` of them."""
    moved_model = {**variables, "params": join(learned, variables["params"])}
    rule = batch_statistics if batch_norm_paths(variables) else None
    # NaN in padding would reach the gradients of all, although no loss counts it.
    images = _without_padding(images, valid)
    outputs = forward(model, moved_model, images, statistics=rule, valid=valid).outputs
    return outputs, *logits_and_seen(model, outputs, valid)


def _norms(method: str, model: Any, variables: Variables) -> PyTree:
    """The scale and bias of norms, with None elsewhere."""
    layers = norm_paths(variables)
    learned = _chosen(variables, lambda path: path[:-1] in layers and path[-1] in ("scale", "bias"))
    if not jax.tree.leaves(learned):
        name = network_name(model)
        raise ValueError(f"{method} learns norms, and {name} has none: use running, shot or t3a")
    return learned


def _chosen(variables: Variables, learns: Callable[[tuple[str, ...]], bool]) -> PyTree:
    """The parameters for whose path `learns` holds; None elsewhere."""
    return jax.tree.map_with_path(
        lambda path, leaf: leaf if learns(path_names(path)) else None, variables["params"]
    )


def _stepped(
    optimizer: optax.GradientTransformation, gradient: PyTree, carry: _Learned
) -> _Learned:
    with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
        updates, state = optimizer.update(gradient, carry.optimizer, carry.parameters)
    return _Learned(optax.apply_updates(carry.parameters, updates), state)


class _Direction(NamedTuple):
    """The carry of `atp`: the mean direction over the samples so far, and their number f[]."""

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
    for every batch it moves along the batch's own h (ATP-batch). The authors' code (baowenxuan/ATP)
    takes the plain mean of the moved models, whose variances are clipped at 0 one by one.

    Args:
      rates: a number f[] for each leaf, as from `learn_rates`; None for the other two arguments.
      rate: the rate of all parameters, at least 0.
      statistics: the rate of all running means and variances, at least 0.
    """

    def init(variables: Variables) -> _Direction:
        nowhere = jax.tree.map(jnp.zeros_like, _moving(variables))
        return _Direction(nowhere, jnp.zeros((), promote(parameter_dtype(variables), jnp.float32)))

    def predict(
        variables: Variables, carry: _Direction, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Direction]:
        images = _without_padding(images, valid)
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
    never moves. Unlike in the authors' code, a variance clipped at 0 gives its rate no derivative.

    Args:
      variables: the received model, as from `federation.global_variables`.
      batches: {"image": f[K, S, B, ...], "label": i32[K, S, B], "valid": bool[K, S, B]} of K
        clients, as for a round. The paper takes samples that did not train the model.
      rate: eta, at least 0; 0.1 in the authors' scripts, which diverges on our scanners.
      rounds: number of rounds.

    Returns:
      A number f[] for each leaf of `params` and `batch_stats`; ValueError if one is not finite.
    """

    def step(rates: Variables, batch: dict[str, jax.Array]) -> tuple[Variables, None]:
        valid = batch["valid"]
        images = _without_padding(batch["image"], valid)
        towards = _direction(model, variables, images, valid)

        def loss(rates: Variables) -> jax.Array:
            outputs = forward(model, _moved(variables, rates, towards), images).outputs
            logits, seen = logits_and_seen(model, outputs, valid)
            # Padding may hold labels outside the classes, whose loss would be NaN.
            label = jnp.where(seen, batch["label"], 0)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return _mean(losses, seen)

        def stepped(leaf_rate: jax.Array, g: jax.Array, leaf: jax.Array) -> jax.Array:
            # Large leaves have large gradients: the root of the size keeps rates comparable.
            return leaf_rate - (rate / leaf.size**0.5 * g).astype(leaf_rate.dtype)

        return jax.tree.map(stepped, rates, jax.grad(loss)(rates), towards), None

    @jax.jit  # one compiled round, called again
    def one_round(rates: Variables, batches: dict[str, jax.Array]) -> Variables:
        client_rates = jax.lax.map(lambda client: jax.lax.scan(step, rates, client)[0], batches)
        return jax.tree.map(partial(jnp.mean, axis=0), client_rates)

    rates = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), _moving(variables))
    for _ in range(rounds):
        rates = one_round(rates, batches)
    if not all_finite(rates):
        raise ValueError(f"learn_rates: not finite with rate={rate}: give a smaller rate")
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
        return _mean(entropy(logits), seen), passed.moved

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

    return {**variables, **jax.tree.map_with_path(moved, _moving(variables), rates, towards)}


def _mean(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean f[] of the values f[...] where `counts` bool[...]; 0 if it is nowhere."""
    return jnp.where(counts, values, 0).sum() / jnp.maximum(counts.sum(dtype=values.dtype), 1)


def _without_padding(images: jax.Array, valid: jax.Array | None) -> jax.Array:
    """The images f[B, ...] with zeros in padding."""
    if valid is None:
        return images
    return blank_padding({"image": images, "label": (), "valid": valid})["image"]
