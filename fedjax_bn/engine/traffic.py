"""What a method sends, in bytes."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.batches import Batches
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.state import FederatedState, broadcast_of, own_of

PyTree = Any


def traffic(method: FederatedMethod, state: FederatedState, batches: Batches) -> dict[str, int]:
    """Returns {"down": bytes of a broadcast, "up": bytes of an upload} of one client and round.

    Args:
      method: the method.
      state: its state; only shapes count, here and in the batches.
      batches: a round's, without the axis K.
    """
    sent = jax.eval_shape(broadcast_of, state)
    own = jax.eval_shape(lambda state: own_of(state, 0), state)
    batches = batches | {"client": jax.ShapeDtypeStruct((), jnp.int32)}
    key = jax.eval_shape(jax.random.key, 0)
    _, upload = jax.eval_shape(method.client, sent, own, batches, key)
    return {"down": _bytes(sent), "up": _bytes(upload)}


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
