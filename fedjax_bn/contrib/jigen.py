"""JiGen (Carlucci et al., CVPR 2019): the network also solves jigsaw puzzles."""

from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn.arguments.ranges import AtLeast0, UpTo1, between, bounded
from fedjax_bn.contrib.parts import draw_dense
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.sharing import Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import cross_entropy

COLLECTION = "jigsaw"  # the second head
_TILES = 3  # on each side


@bounded
def jigen(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weight: AtLeast0 = 0.7,
    whole: UpTo1 = 0.9,
    permutations: Annotated[int, between(1, 71)] = 30,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Clients minimize CE(class) + weight CE(order) on images whose 3x3 tiles may be shuffled.

    An image stays whole (order 0) with probability `whole`; otherwise its order is uniform over
    0, ..., P, where orders 1 to P are permutations of the tiles. A second dense head predicts the
    order from the features. The head is the collection `jigsaw`, which travels with the model and
    does not predict classes. The reported loss is CE(class) on all images. With weight 0 and whole
    1 it is FedAvg.

    Differs from the authors' code: the permutations are those of `distant_orders`; tiles do not
    become grey; if a side is not a multiple of three, its last pixels stay in place.

    Args:
      weight: weight of the order's cross entropy, at least 0; 0.7 to 0.9 in the authors' scripts.
      whole: probability that an image stays whole, in [0, 1]; 0.7 or 0.9 in the authors' scripts.
      permutations: their number P, from 1 to 71; 30 in the authors' scripts.
    """
    learned, federate_options = learning(model, classifier="jigen", **options)
    # Row 0 is the whole image, so its label is an order like all others.
    table = distant_orders(permutations)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        order_key, whole_key = jax.random.split(stream(key, "puzzles"))
        shape, head = (len(images),), variables[COLLECTION]
        order = jax.random.randint(order_key, shape, 0, len(table), jnp.int32)
        order = jnp.where(jax.random.bernoulli(whole_key, whole, shape), 0, order)
        shuffled = shuffle_tiles(images, jnp.asarray(table)[order])
        plain = without(variables, COLLECTION)
        loss, out = learned.trained(plain, shuffled, batch, key, wanted=["features"])
        guess = out.features @ head["kernel"] + head["bias"]
        return loss + weight * cross_entropy(guess, order, batch["valid"]), (loss, out.moved)

    def start(key: jax.Array, variables: Variables) -> Variables:
        sizes, key = sizes_of(model, variables), stream(key, "puzzle head")
        head = draw_dense(key, sizes.features, permutations + 1, sizes.dtype)
        return {COLLECTION: head} | variables

    step = minimizing(objective, optimizer, ("params", COLLECTION))
    return method_of(step, start=start, **federate_options)


def distant_orders(count: int) -> np.ndarray:
    """Returns i32[count + 1, 9]: the identity, and permutations that agree in at most one place.

    Entry [p, i] is the tile at place i. The permutations are the 72 maps x -> a x + b with a != 0,
    including the identity, of the field of nine elements u + v sqrt(-1), u and v modulo 3.
    """
    field = [(u, v) for u in range(3) for v in range(3)]

    def times(x: Any, y: Any) -> tuple[int, int]:
        return (x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0])

    def number(x: Any, y: Any) -> int:
        return (x[0] + y[0]) % 3 * 3 + (x[1] + y[1]) % 3

    maps = [[number(times(a, x), b) for x in field] for a in field[1:] for b in field]
    # Two such maps agree in at most one x, because a x + b = c x + d has at most one solution.
    maps.sort(key=lambda order: order != list(range(9)))  # stable: the identity comes first
    return np.asarray(maps[: count + 1], np.int32)


def shuffle_tiles(images: jax.Array, tiles: jax.Array) -> jax.Array:
    """Returns images f[B, H, W, C] with tile `tiles[b, i]` i32[B, 9] at place i, row by row."""
    if images.ndim != 4 or min(images.shape[1:3]) < _TILES:
        raise ValueError(f"jigen needs images f[B, H, W, C] of at least 3x3, not {images.shape}")
    high, wide = (side // _TILES for side in images.shape[1:3])

    # Each image has its own order; pixels after the last whole tile stay.
    def shuffled(image: jax.Array, tiles: jax.Array) -> jax.Array:
        inner = image[: _TILES * high, : _TILES * wide]
        cut = inner.reshape(_TILES, high, _TILES, wide, -1).swapaxes(1, 2)
        moved = cut.reshape(_TILES**2, high, wide, -1)[tiles].reshape(cut.shape)
        moved = moved.swapaxes(1, 2).reshape(inner.shape)
        return image.at[: inner.shape[0], : inner.shape[1]].set(moved)

    return jax.vmap(shuffled)(images, tiles)
