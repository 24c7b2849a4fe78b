"""SCI, FedCD's spurious correlation intervener (Ma et al., ACM MM 2024, Section 3.2 and 3.3).

A client multiplies its features by a mask of its own, which is trained with the model, and
minimizes

    L_e = L + lambda ||g_e - g_g||^2,    g_e = dL / dmask                       (Eq. 14 and 15)

where g_g is the mean of what all clients' g_e were in the round before. The penalty is
differentiated through: with respect to weights and mask, g_e is a function of both.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn.client import Batch, Received, masked_mean, parameter_dtype
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.models import masks
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables

PyTree = Any
Masks = Mapping[str, jax.Array]


class Alignment(NamedTuple):
    """The server's part of the method state.

    Attributes:
      gradient: g_g, in the form of one client's masks; zeros before the first round.
      rounds: i32[], how many rounds have been averaged into it; 0 means that there is none yet.
    """

    gradient: Masks
    rounds: jax.Array


class Aligned(NamedTuple):
    """What a pass with the penalty reports.

    Attributes:
      loss: L f[], without the penalty.
      gradient: g_e, in the form of the masks.
      moved: what the loss reports besides, usually the moved `batch_stats`.
    """

    loss: jax.Array
    gradient: Masks
    moved: PyTree


def align(
    loss: Callable[[Masks], tuple[jax.Array, PyTree]],
    masks: Masks,
    global_gradient: Masks,
    strength: float | jax.Array,
) -> tuple[jax.Array, Aligned]:
    """L + strength ||dL/dmasks - global_gradient||^2, a pure function that may be differentiated.

    The norm is over all masks together. Only what lies behind the first mask is differentiated
    twice: with one mask before the classifier, the classifier alone.

    Args:
      loss: masks -> (L f[], what else it reports).
      masks: name -> f[C].
      global_gradient: g_g, in the same form.
      strength: lambda, at least 0.
    """
    (value, moved), gradient = jax.value_and_grad(loss, has_aux=True)(masks)
    gaps = jax.tree.map(lambda a, b: jnp.square(a - b).sum(), gradient, global_gradient)
    penalty = jax.tree.reduce(jnp.add, gaps)
    return value + strength * penalty, Aligned(value, gradient, moved)


def aligned_objective(
    model: nn.Module, prepare: Prepare, strength: float
) -> Callable[..., tuple[jax.Array, Aligned]]:
    """Returns `objective(variables, batch, received, key) -> (L_e f[], Aligned)`.

    L is the mean cross entropy over valid samples of the masked model. `received.server` is an
    `Alignment`; as long as it holds no round there is no penalty.

    Args:
      model: linen module, images -> logits.
      prepare: stored images -> what the model reads.
      strength: lambda, at least 0.
    """

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, Aligned]:
        images = prepare(batch["image"], parameter_dtype(variables))
        plain, own = masks.take(variables)

        def loss(own: Masks) -> tuple[jax.Array, Variables]:
            masked = {**plain, masks.COLLECTION: own}
            logits, _, moved = forward(
                model, masked, images, train=True, valid=batch["valid"], key=key
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return masked_mean(losses, batch["valid"]), moved

        server = received.server
        return align(loss, own, server.gradient, jnp.where(server.rounds > 0, strength, 0.0))

    return objective


def mask_gradient(
    features: jax.Array,
    mask: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    valid: jax.Array | None = None,
) -> jax.Array:
    """dL/dmask f[F] in closed form, where a dense layer reads the masked features.

    With logits (mask * f_i) W + b and residuals r_i = softmax(logits_i) - onehot(y_i), the mean
    cross entropy L over n samples has dL/dmask_j = 1/n sum_i f_ij (W r_i)_j.

    Args:
      features: f[B, F], before the mask.
      mask: f[F].
      kernel, bias: W f[F, classes] and b f[classes].
      labels: i32[B].
      valid: bool[B], the samples that count; None for all.
    """
    logits = (features * mask) @ kernel + bias
    residuals = jax.nn.softmax(logits) - jax.nn.one_hot(labels, len(bias), dtype=logits.dtype)
    parts = features * (residuals @ kernel.T)
    if valid is None:
        return parts.mean(0)
    count = jnp.maximum(valid.sum(dtype=parts.dtype), 1)
    return jnp.where(valid[:, None], parts, 0).sum(0) / count
