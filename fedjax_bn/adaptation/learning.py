"""Adaptations that learn by gradients from unlabelled images: Tent, SAR and SHOT's objective.

Each client starts from the received model, and a batch without a valid sample changes nothing. All
three normalize by the statistics of the batch, if the network has batch norms, and predict a batch
before they learn from it, as Tent's and SAR's codes do: the first batch is predicted as by `batch`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.adaptation.adaptation import Adaptation
from fedjax_bn.adaptation.centres import entropy, logits_and_seen, mean, without_padding
from fedjax_bn.arguments.ranges import AtLeast0, Fraction, bounded
from fedjax_bn.engine.backend import where_tree
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.models.classifier import classifier_path
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import batch_statistics
from fedjax_bn.normalization.calls import network_name
from fedjax_bn.sharing import Variables, batch_norm_paths, join, norm_paths, path_names, split

PyTree = Any
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
    return _by_gradient(model, learns, lambda x, seen: mean(entropy(x), seen), optax.adam(rate))


@bounded
def shot(model: Any, rate: AtLeast0 = 0.001) -> Adaptation:
    r"""Learns all parameters but the classifier's by information maximization (SHOT, ICML 2020).

    $\frac{1}{n} \sum_i H(p_i) - H(\frac{1}{n} \sum_i p_i)$

    One step of SGD with momentum 0.9 for each batch. With rate 0 it is `batch`. A batch of one
    sample gives the gradient 0. The second term expects frequent classes in each batch to be
    equally frequent.

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
        return mean(entropy(logits), seen) + (jnp.exp(average) * average).sum()

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

    Differs from the code (mr-eggplant/SAR): no layer is frozen by its name, and a batch without a
    certain sample takes no step of momentum. After a reset momentum and average start again, where
    theirs continue, so that it resets after every batch until the average is above `reset`.

    Args:
      model, rate: as in `tent`; 0.00025 in SAR, for ResNet-50 and batches of 64.
      margin: E_0 as a share of ln C, in (0, 1].
      rho: distance of the point from w, at least 0.
      reset: the least average entropy, at least 0; 0 for no reset.
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
            return mean(entropies, counted), (outputs, counted)

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
    images = without_padding(images, valid)
    outputs = forward(model, moved_model, images, statistics=rule, valid=valid).outputs
    return outputs, *logits_and_seen(model, outputs, valid)


def _norms(method: str, model: Any, variables: Variables) -> PyTree:
    """The scale and bias of norms, with None elsewhere; raises ValueError without a norm."""
    layers = norm_paths(variables)
    learned = _chosen(variables, lambda path: path[:-1] in layers and path[-1] in ("scale", "bias"))
    if not jax.tree.leaves(learned):
        raise ValueError(
            f"{method} learns norms, of which {network_name(model)} has none: "
            "use running, shot or t3a"
        )
    return learned


def _chosen(variables: Variables, learns: Callable[[tuple[str, ...]], bool]) -> PyTree:
    """The parameters for whose path `learns` holds; None elsewhere."""
    asked = jax.tree.map_with_path(lambda path, _: learns(path_names(path)), variables["params"])
    return split(variables["params"], asked)[0]


def _stepped(
    optimizer: optax.GradientTransformation, gradient: PyTree, carry: _Learned
) -> _Learned:
    """The carry after a step of the optimizer."""
    with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
        updates, state = optimizer.update(gradient, carry.optimizer, carry.parameters)
    return _Learned(optax.apply_updates(carry.parameters, updates), state)
