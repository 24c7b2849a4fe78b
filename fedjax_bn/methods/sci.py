"""SCI, FedCD's spurious correlation intervener (Ma et al., ACM MM 2024, Sections 3.2 and 3.3).

`fedcd` has its equations.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.local_step import Batch
from fedjax_bn.methods.learning import Learning
from fedjax_bn.models.feature_masks import COLLECTION
from fedjax_bn.sharing import PyTree, Variables
from fedjax_bn.state import Received

Masks = Mapping[str, jax.Array]


class Alignment(NamedTuple):
    """The server's part of the method state."""

    gradient: Masks  # g_g, a tree like one client's masks; zeros before the first round
    rounds: jax.Array  # i32[], the number of rounds that have replaced it; 0 before the first


class _Aligned(NamedTuple):
    """What a pass with the penalty reports."""

    loss: jax.Array  # L f[], without the penalty
    gradient: Masks  # g_e, a tree like the masks
    moved: PyTree  # what else the loss reports, usually the moved `batch_stats`


def align(
    loss: Callable[[Masks], tuple[jax.Array, PyTree]],
    masks: Masks,
    global_gradient: Masks,
    strength: float | jax.Array,
) -> tuple[jax.Array, _Aligned]:
    """Returns L + strength ||dL/dmasks - global_gradient||^2, which may be differentiated.

    `loss` maps masks, name -> f[C], to L f[] and what else it reports. The norm is over all masks
    together. Only the layers after the first mask are differentiated twice.
    """
    # The value contains the inner gradient, so the outer one differentiates it a second time.
    (value, moved), gradient = jax.value_and_grad(loss, has_aux=True)(masks)
    gaps = jax.tree.map(lambda a, b: jnp.square(a - b).sum(), gradient, global_gradient)
    penalty = jax.tree.reduce(jnp.add, gaps)
    return value + strength * penalty, _Aligned(value, gradient, moved)


def aligned_objective(
    learned: Learning, strength: float
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, _Aligned]]]:
    """Returns `objective(variables, batch, received, key) -> (L_e f[], (L_e, _Aligned))`.

    L is the task's loss of the masked model, lambda the `strength`. `received.server` is an
    `Alignment`; the penalty is 0 while its `rounds` is 0.
    """

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, _Aligned]]:
        images = learned.read(variables, batch, key)

        def loss(masks: Masks) -> tuple[jax.Array, Variables]:
            value, out = learned.trained({**variables, COLLECTION: masks}, images, batch, key)
            return value, out.moved

        server = received.server
        # A factor, not a branch, so that the first round and the others share one program.
        strong = jnp.where(server.rounds > 0, strength, 0.0)
        value, aligned = align(loss, variables[COLLECTION], server.gradient, strong)
        return value, (value, aligned)

    return objective
