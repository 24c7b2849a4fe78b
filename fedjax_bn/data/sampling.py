"""Stores the training data of all clients on the device, and draws the samples of a round.

    draw = drawing([(images_a, labels_a), (images_b, labels_b)], batch_size=32)
    for number in range(20):
        state, metrics = method.round(state, draw(jax.random.fold_in(key, number)), key)

`fedjax_bn.engine.batches` describes the batches.

A `Sampler` is `draw(sizes i32[C], client i32[C], longest, key) -> Draw` for the numbers `client` of
the C clients that train; `longest` is N, the number of samples of the largest of all clients.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.labels import PyTree, as_labels, has_masks, stored
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.inputs import UNLABELLED, as_images, random_key


class _ClientData(NamedTuple):
    """Training data of K clients, padded to the largest."""

    images: jax.Array  # u8[K, N, H, W, C] or f32[K, N, F]
    labels: PyTree  # i32[K, N], or a tree of arrays [K, N, ...]
    sizes: jax.Array  # i32[K], each client's number of samples without padding


def stack_clients(splits: Sequence[Split]) -> _ClientData:
    """Puts the splits of K clients on the device, padded with zeros to the largest."""
    longest = max(len(split.images) for split in splits)
    return jax.tree.map(jnp.asarray, client_rows(splits, longest, 0, len(splits)))


def client_rows(splits: Sequence[Split], longest: int, start: int, stop: int) -> _ClientData:
    """Returns rows `start` to `stop` of `stack_clients` as NumPy arrays; rows K and above empty."""
    chosen = splits[start:stop]

    def stacked(form: Any, *arrays: Any) -> np.ndarray:
        # Zeros, so that padding is finite and the same in every run.
        rows = np.zeros((stop - start, longest, *form.shape[1:]), stored(form))
        for row, array in enumerate(arrays):
            rows[row, : len(array)] = np.asarray(array)
        return rows

    samples = ((split.images, split.labels) for split in (splits[0], *chosen))
    images, labels = jax.tree.map(stacked, *samples)
    sizes = np.zeros(stop - start, np.int32)
    sizes[: len(chosen)] = [len(split.images) for split in chosen]
    return _ClientData(images, labels, sizes)


class Draw(NamedTuple):
    """Which samples a round trains on."""

    # i32[C, S, B], positions among the client's samples; arbitrary where `valid` is False
    index: jax.Array  # type: ignore[assignment]  # a tuple has a method of this name
    valid: jax.Array  # bool[C, S, B], False for padding


Sampler = Callable[[jax.Array, jax.Array, int, jax.Array], Draw]


def by_epochs(batch_size: int, epochs: Sequence[int]) -> Sampler:
    """Returns a sampler of S = max(epochs) * ceil(N / B) steps; `epochs` has 1 or K numbers.

    Each epoch is reshuffled and holds every sample of a client once. Its last batch may be short,
    and clients with fewer samples or epochs end with empty batches.
    """
    most_epochs = max(epochs)

    def draw(sizes: jax.Array, client: jax.Array, longest: int, key: jax.Array) -> Draw:
        steps = math.ceil(longest / batch_size)
        orders = _orders(key, sizes, client, longest, most_epochs)
        # Padding points to sample 0, and `valid` is False there.
        orders = jnp.pad(orders, ((0, 0), (0, 0), (0, steps * batch_size - longest)))
        row = client if len(epochs) > 1 else jnp.zeros_like(client)
        client_epochs = jnp.asarray(epochs, jnp.int32)[row, None, None]
        valid = jnp.arange(steps * batch_size, dtype=sizes.dtype) < sizes[:, None, None]
        valid &= jnp.arange(most_epochs, dtype=jnp.int32)[:, None] < client_epochs
        shape = (sizes.shape[0], most_epochs * steps, batch_size)
        valid = jnp.broadcast_to(valid, orders.shape).reshape(shape)
        return Draw(orders.reshape(shape), valid)

    return draw


def by_steps(batch_size: int, steps: int, smallest: int) -> Sampler:
    """Returns a sampler of S = steps full batches for every client, the smallest of given size.

    A client runs through its reshuffled samples as often as needed (FedBN, Appendix E.6).
    """
    # The smallest client needs the most epochs; others use only the first of these.
    epochs = math.ceil(steps * batch_size / smallest)

    def draw(sizes: jax.Array, client: jax.Array, longest: int, key: jax.Array) -> Draw:
        orders = _orders(key, sizes, client, longest, epochs)
        # Position p of a client with n samples is sample p % n of its epoch p // n.
        position = jnp.arange(steps * batch_size)
        epoch, offset = jnp.divmod(position, sizes[:, None])
        index = jax.vmap(lambda order, e, o: order[e, o])(orders, epoch, offset)
        shape = (sizes.shape[0], steps, batch_size)
        return Draw(index.reshape(shape), jnp.ones(shape, bool))

    return draw


def rows_of(data: PyTree, client: jax.Array | None) -> PyTree:
    """Returns the rows of arrays [K, ...] for clients i32[C]; all rows for None."""
    return data if client is None else jax.tree.map(lambda leaf: leaf[client], data)


def label_forms(split: Split, place: tuple[int, ...]) -> PyTree:
    """Returns `jax.ShapeDtypeStruct`s of shape [*place, ...] for labels like the split's."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*place, *leaf.shape[1:]), stored(leaf)), split.labels
    )


def point_to(data: _ClientData, draw: Draw) -> dict[str, jax.Array]:
    """Returns batches whose `image` i32[C, S, B] are positions in the client's images, `source`."""
    look_up = jax.vmap(lambda rows, index: rows[index])
    labels = jax.tree.map(lambda leaf: look_up(leaf, draw.index), data.labels)
    # A round then gathers the images of one step at a time, not of all steps at once.
    pointers = {"image": draw.index, "source": data.images}
    return pointers | {"label": labels, "valid": draw.valid, "size": data.sizes}


def validation_batches(
    splits: Sequence[Split],
    batch_size: int,
    start: int = 0,
    stop: int | None = None,
    longest: int | None = None,
) -> dict[str, np.ndarray]:
    """Returns the validation samples of K clients in order, as batches of at most `batch_size`.

    {"image": [R, V, B, ...], "label": i32[R, V, B] or a tree, "valid": bool[R, V, B]} has rows
    `start` to `stop`, of which those from K on are empty, and room for `longest` samples, by
    default those of the largest split; zeros follow a client's last.
    """
    # Clients of several calls have room for the same number, so that one program serves all.
    longest = longest or max(len(split.images) for split in splits)
    batch_size = min(batch_size, longest)
    count = math.ceil(longest / batch_size)
    data = client_rows(splits, count * batch_size, start, len(splits) if stop is None else stop)
    valid = np.arange(count * batch_size) < data.sizes[:, None]
    batches = {"image": data.images, "label": data.labels, "valid": valid}
    return jax.tree.map(
        lambda leaf: leaf.reshape(len(leaf), count, batch_size, *leaf.shape[2:]), batches
    )


def _orders(
    key: jax.Array, sizes: jax.Array, client: jax.Array, longest: int, epochs: int
) -> jax.Array:
    """Returns i32[C, epochs, N]: random orders in which a client's real samples come first."""

    # The order of a client's samples in an epoch depends on the key, the client's number and the
    # epoch alone, so that a client draws the same in any cohort, also if it knows only its own size
    def order(size: jax.Array, client: jax.Array) -> jax.Array:
        # The first epoch draws with the client's key, as runs of one epoch always did.
        client_key = jax.random.fold_in(key, client)
        later_keys = jax.vmap(partial(jax.random.fold_in, client_key))(jnp.arange(1, epochs))
        keys = jnp.concatenate([client_key[None], later_keys])
        # Needs `jax_threefry_partitionable`, JAX's default, with which the first numbers of a
        # longer draw are those of a shorter one.
        draws = jax.vmap(lambda epoch_key: jax.random.uniform(epoch_key, (longest,)))(keys)
        # Draws are below 1, so samples that do not exist come last.
        exists = jnp.arange(longest, dtype=size.dtype) < size
        return jnp.argsort(jnp.where(exists, draws, 2), axis=-1)

    return jax.vmap(order)(sizes, client)


def drawing(
    clients: Sequence[tuple[np.ndarray, Any]], *, batch_size: int = 32, local_epochs: int = 1
) -> Callable[[jax.Array], Batches]:
    """Returns `draw(key) -> batches`, the batches of all clients for one round.

    The samples stay on the device, and batches are those of `by_epochs`. A ValueError says that the
    clients' samples do not suit each other, see `domain.check_dataset`.

    Args:
      clients: (images, labels) of each of K clients: images u8[N, H, W, C], which the method's
        `prepare` standardizes, or f[N, ...], which it only casts; labels as of `as_labels`.
      batch_size: B, cut to the number of samples of the largest client.
      local_epochs: the same as the method's.
    """
    splits, classes = [], 1
    for k, (images, labels) in enumerate(clients):
        labels = as_labels(labels, f"the labels of client {k}")
        splits.append(Split(as_images(images, f"the images of client {k}"), labels))
        # Only the check of labels needs it.
        classes = max(classes, UNLABELLED if has_masks(labels) else 1 + labels.max(initial=0))
    domains = tuple(Domain(f"client {k}", split, None, split) for k, split in enumerate(splits))
    check_dataset(Dataset("drawing", classes, domains, (0.5,), (0.5,)))
    data = stack_clients(splits)
    longest = data.images.shape[1]
    sample = by_epochs(min(batch_size, longest), (local_epochs,))
    number = jnp.arange(len(splits), dtype=jnp.int32)

    @jax.jit
    def draw(data: _ClientData, key: jax.Array) -> Batches:
        batches = point_to(data, sample(data.sizes, number, longest, key))
        del batches["source"]  # as an output of `jit`, the images would be copied
        return batches

    return lambda key: draw(data, random_key(key)) | {"source": data.images}
