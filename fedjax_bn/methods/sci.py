"""SCI, FedCD's spurious correlation intervener (Ma et al., ACM MM 2024, Section 3.2 and 3.3).

A client multiplies its features by a mask of its own, which is trained with the model, and
minimizes

    L_e = L + lambda ||g_e - g_g||^2,    g_e = dL / dmask                       (Eq. 14 and 15)

where g_g is the mean of what all clients' g_e were in the round before. The penalty is
differentiated through: with respect to weights and mask, g_e is a function of both.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.local_step import Batch
from fedjax_bn.methods.learning import Learning
from fedjax_bn.models.forward import forward
from fedjax_bn.models.masks import COLLECTION
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received

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
    learned: Learning, strength: float
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Aligned]]]:
    """Returns `objective(variables, batch, received, key) -> (L_e f[], (L_e, Aligned))`.

    L is the task's loss of the masked model. `received.server` is an `Alignment`; as long as it
    holds no round there is no penalty.

    Args:
      learned: what is learned.
      strength: lambda, at least 0.
    """

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Aligned]]:
        images, valid = learned.read(variables, batch, key), batch["valid"]

        def loss(masks: Masks) -> tuple[jax.Array, Variables]:
            masked = {**variables, COLLECTION: masks}
            out = forward(learned.model, masked, images, train=True, valid=valid, key=key)
            return learned.task.loss(out.outputs, batch["label"], valid), out.moved

        server = received.server
        strong = jnp.where(server.rounds > 0, strength, 0.0)
        value, aligned = align(loss, variables[COLLECTION], server.gradient, strong)
        return value, (value, aligned)

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
