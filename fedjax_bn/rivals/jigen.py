"""JiGen (Carlucci et al., CVPR 2019): the network also solves jigsaw puzzles."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn.arguments.ranges import AtLeast0, Puzzles, UpTo1, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received
from fedjax_bn.task import cross_entropy, require_classifier

PyTree = Any
COLLECTION = "jigsaw"  # of the second head
_TILES = 3  # a side


@bounded
def jigen(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weight: AtLeast0 = 0.7,
    whole: UpTo1 = 0.9,
    permutations: Puzzles = 30,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Clients minimize CE(class) + weight CE(order) on images whose 3x3 tiles may be shuffled.

    An image stays whole, order 0, with probability `whole`; else its order is one of 0, ..., P,
    alike, where each order from 1 on is a permutation of the tiles. A second dense head reads the
    order from the features; it is the collection `jigsaw`, which travels with the model and is no
    part of what predicts. The reported loss is CE(class), on all images. With weight 0 and whole 1
    it is FedAvg.

    Differs from the authors' code: the permutations are maps x -> a x + b of the field of nine
    elements, of which two agree in at most one place; tiles are not made grey; where a side is no
    multiple of three, its last pixels stay where they are.

    Args:
      model: images -> logits; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      weight: of the order's cross entropy, at least 0; 0.7 to 0.9 in the authors' scripts.
      whole: probability that an image stays, in [0, 1]; 0.7 or 0.9 in the authors' scripts.
      permutations: how many there are, P, from 1 to 71; 30 in the authors' scripts.
      **options: those of `fedavg`.

    Raises:
      ValueError: an argument is out of its range, or the task is not classification; at `init`,
        where the size of the features cannot be found; at `round`, where samples are no images of
        at least 3x3.
    """
    learned, rest = learning(model, **options)
    require_classifier("jigen", learned.task)
    trained = ("params", COLLECTION)
    objective = puzzling(learned, weight, whole, orders(permutations))
    step = gradient_step(differentiate(objective, trained), optimizer, trained)
    method = method_of(step, **rest)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if COLLECTION not in variables:
            head = _head(stream(key, "puzzle head"), model, variables, permutations + 1)
            variables = {**variables, COLLECTION: head}
        return method.init(key, variables, num_clients)

    return method._replace(init=init)


def puzzling(learned: Learning, weight: float, whole: float, table: np.ndarray) -> Objective:
    """The objective of `jigen`, of variables with `jigsaw`; `table` i32[P + 1, 9] as `orders`."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images, valid = learned.read(variables, batch, key), batch["valid"]
        order = draw_orders(stream(key, "puzzles"), len(images), whole, len(table))
        shuffled = shuffle(images, jnp.asarray(table)[order])
        plain = {name: tree for name, tree in variables.items() if name != COLLECTION}
        out = forward(
            learned.model, plain, shuffled, train=True, valid=valid, key=key, wanted=["features"]
        )
        loss = learned.task.loss(out.outputs, batch["label"], valid)
        head = variables[COLLECTION]
        guess = out.features @ head["kernel"] + head["bias"]
        return loss + weight * cross_entropy(guess, order, valid), (loss, out.moved)

    return objective


def orders(count: int) -> np.ndarray:
    """i32[count + 1, 9]: the identity, and permutations of which two agree in at most one place.

    Entry [p, i] is the tile that stands at place i. The maps x -> a x + b, a not 0, of the field of
    nine elements u + v sqrt(-1), u and v modulo 3, of which there are 72, the identity among them.
    """
    field = [(u, v) for u in range(3) for v in range(3)]
    times = lambda x, y: (x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0])  # noqa: E731
    number = lambda x, y: (x[0] + y[0]) % 3 * 3 + (x[1] + y[1]) % 3  # noqa: E731
    maps = [[number(times(a, x), b) for x in field] for a in field[1:] for b in field]
    maps.sort(key=lambda one: one != list(range(9)))  # stable: the identity comes first
    return np.asarray(maps[: count + 1], np.int32)


def draw_orders(key: jax.Array, size: int, whole: float, count: int) -> jax.Array:
    """i32[size]: 0 with probability `whole`, else any of 0, ..., count - 1."""
    order_key, whole_key = jax.random.split(key)
    order = jax.random.randint(order_key, (size,), 0, count, jnp.int32)
    return jnp.where(jax.random.bernoulli(whole_key, whole, (size,)), 0, order)


def shuffle(images: jax.Array, tiles: jax.Array) -> jax.Array:
    """Images f[B, H, W, C] whose place i shows tile `tiles`[b, i] i32[B, 9], row by row.

    Raises:
      ValueError: they are no images of at least 3x3.
    """
    if images.ndim != 4 or min(images.shape[1:3]) < _TILES:
        raise ValueError(
            f"jigen shuffles the tiles of images f[B, H, W, C] of at least 3x3, not {images.shape}"
        )
    high, wide = (side // _TILES for side in images.shape[1:3])

    def one(image: jax.Array, tiles: jax.Array) -> jax.Array:
        inner = image[: _TILES * high, : _TILES * wide]
        cut = inner.reshape(_TILES, high, _TILES, wide, -1).swapaxes(1, 2)
        moved = cut.reshape(_TILES**2, high, wide, -1)[tiles].reshape(cut.shape)
        return image.at[: inner.shape[0], : inner.shape[1]].set(
            moved.swapaxes(1, 2).reshape(inner.shape)
        )

    return jax.vmap(one)(images, tiles)


def _head(key: jax.Array, model: Any, variables: Variables, outputs: int) -> PyTree:
    """A dense layer, U(-1/sqrt(F), 1/sqrt(F)) as PyTorch's."""
    sizes = sizes_of(model, variables)
    bound = sizes.features**-0.5
    kernel_key, bias_key = jax.random.split(key)
    return {
        "kernel": jax.random.uniform(
            kernel_key, (sizes.features, outputs), sizes.dtype, -bound, bound
        ),
        "bias": jax.random.uniform(bias_key, (outputs,), sizes.dtype, -bound, bound),
    }
