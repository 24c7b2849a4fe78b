"""Device-resident data of all clients, and the batches of a round drawn from it on the device."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.domain import Split

Batches = dict[str, jax.Array]


class ClientData(NamedTuple):
    """Training data of K clients, padded to the largest.

    Attributes:
      images: u8[K, N, H, W, C] or f32[K, N, F].
      labels: i32[K, N].
      sizes: i32[K], samples that each client really has.
    """

    images: jax.Array
    labels: jax.Array
    sizes: jax.Array


def stack_clients(splits: Sequence[Split]) -> ClientData:
    """Puts the clients' splits on the device as one array, zeros behind the shorter ones."""
    longest = max(len(split.labels) for split in splits)
    first = splits[0].images
    images = np.zeros((len(splits), longest, *first.shape[1:]), first.dtype)
    labels = np.zeros((len(splits), longest), np.int32)
    for k, split in enumerate(splits):
        images[k, : len(split.labels)] = np.asarray(split.images)
        labels[k, : len(split.labels)] = split.labels
    sizes = jnp.asarray([len(split.labels) for split in splits], jnp.int32)
    return ClientData(jnp.asarray(images), jnp.asarray(labels), sizes)


class Draw(NamedTuple):
    """Which samples a round trains on.

    Attributes:
      index: i32[K, S, B], numbers among the client's samples; any where `valid` is False.
      valid: bool[K, S, B].
    """

    index: jax.Array
    valid: jax.Array


def by_epochs(
    batch_size: int, epochs: Sequence[int]
) -> Callable[[jax.Array, int, jax.Array], Draw]:
    """Returns `draw(sizes, longest, key)`: S = max(epochs) * ceil(N / B) steps.

    Each epoch, reshuffled, holds every sample of a client once; its last batch is short, and
    clients with fewer samples end it with empty batches (`valid` is False there). A client that
    makes fewer epochs than others has empty ones behind them. `sizes` i32[K] are the clients'
    numbers of samples, `longest` the largest of them, N.

    Args:
      batch_size: B.
      epochs: of each client, or one number for all; each at least 1.
    """
    most = max(epochs)

    def draw(sizes: jax.Array, longest: int, key: jax.Array) -> Draw:
        steps = math.ceil(longest / batch_size)
        orders = _orders(key, sizes, longest, most)
        padding = steps * batch_size - longest
        orders = jnp.pad(orders, ((0, 0), (0, 0), (0, padding)))
        valid = jnp.arange(steps * batch_size) < sizes[:, None, None]
        valid &= jnp.arange(most)[:, None] < jnp.asarray(epochs)[:, None, None]
        shape = (sizes.shape[0], most * steps, batch_size)
        valid = jnp.broadcast_to(valid, orders.shape).reshape(shape)
        return Draw(orders.reshape(shape), valid)

    return draw


def by_steps(
    batch_size: int, steps: int, smallest: int
) -> Callable[[jax.Array, int, jax.Array], Draw]:
    """Returns `draw(sizes, longest, key)`: S = steps full batches for every client.

    A client runs through its reshuffled samples as often as needed (FedBN, Appendix E.6: clients
    with less data repeat sampling).

    Args:
      batch_size: B.
      steps: S.
      smallest: samples of the smallest client.
    """
    epochs = math.ceil(steps * batch_size / smallest)

    def draw(sizes: jax.Array, longest: int, key: jax.Array) -> Draw:
        orders = _orders(key, sizes, longest, epochs)
        position = jnp.arange(steps * batch_size)
        epoch, offset = jnp.divmod(position, sizes[:, None])
        index = jax.vmap(lambda order, e, o: order[e, o])(orders, epoch, offset)
        shape = (sizes.shape[0], steps, batch_size)
        return Draw(index.reshape(shape), jnp.ones(shape, bool))

    return draw


def point_to(data: ClientData, draw: Draw) -> Batches:
    """Batches whose `image` i32[K, S, B] are numbers of samples, for `look_up`.

    So a round holds the images of one step at a time, not of all its steps.
    """
    longest = data.labels.shape[1]
    first = jnp.arange(data.labels.shape[0], dtype=draw.index.dtype) * longest
    return {
        "image": draw.index + first[:, None, None],
        "label": jax.vmap(lambda labels, index: labels[index])(data.labels, draw.index),
        "valid": draw.valid,
        "size": data.sizes,
    }


def look_up(data: ClientData) -> Callable[[jax.Array], jax.Array]:
    """Returns `images(numbers i32[B]) -> [B, ...]` for the numbers that `point_to` gives."""
    every = data.images.reshape(-1, *data.images.shape[2:])
    return lambda numbers: every[numbers]


def point_to_validation(
    splits: Sequence[Split], batch_size: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clients' validation samples, stored once each, and batches that point to them.

    Args:
      splits: of the K clients; those of one domain may have the same one.
      batch_size: B at most.

    Returns:
      The images [N, ...] of all different splits, and {"image": i32[K, V, B] numbers of images,
      "label": i32[K, V, B], "valid": bool[K, V, B]}.
    """
    stored = {id(split): split for split in splits}
    sizes = {name: len(split.labels) for name, split in stored.items()}
    first = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    longest = max(sizes.values())
    batch_size = min(batch_size, longest)
    shape = (len(splits), math.ceil(longest / batch_size) * batch_size)
    image, label = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    valid = np.arange(shape[1]) < np.array([sizes[id(split)] for split in splits])[:, None]
    for k, split in enumerate(splits):
        count = sizes[id(split)]
        image[k, :count] = first[id(split)] + np.arange(count)
        label[k, :count] = split.labels
    images = np.concatenate([np.asarray(split.images) for split in stored.values()])
    batches = {"image": image, "label": label, "valid": valid}
    cut = {
        name: jnp.asarray(leaf.reshape(len(splits), -1, batch_size))
        for name, leaf in batches.items()
    }
    return jnp.asarray(images), cut


def check_batches(batches: Batches, num_clients: int, local_epochs: int) -> None:
    """Checks keys and shapes of a round's batches.

    Raises:
      ValueError: a key is missing or unknown, or a shape does not fit; the message names it.
    """
    missing = {"image", "label", "valid"} - set(batches)
    unknown = set(batches) - {"image", "label", "valid", "participates", "size", "validation"}
    if missing or unknown:
        raise ValueError(
            f"batches lack {sorted(missing)} and have unknown {sorted(unknown)}: give 'image', "
            "'label' and 'valid', optionally 'participates', 'size' and 'validation'"
        )
    shape = batches["label"].shape
    if len(shape) != 3 or shape[0] != num_clients:
        raise ValueError(f"batches['label'] has shape {shape}, not [K={num_clients}, S, B]")
    for name in ("image", "valid"):
        if batches[name].shape[:3] != shape:
            raise ValueError(
                f"batches['{name}'] has shape {batches[name].shape}, which does not begin with "
                f"that of 'label', {shape}"
            )
    for name in ("participates", "size"):
        if name in batches and batches[name].shape != (num_clients,):
            raise ValueError(
                f"batches['{name}'] has shape {batches[name].shape}, not [K={num_clients}]"
            )
    for leaf in jax.tree.leaves(batches.get("validation", ())):
        if leaf.shape[:1] != (num_clients,):
            raise ValueError(
                f"batches['validation'] has an array of shape {leaf.shape}, not [K={num_clients}, "
                "...]"
            )
    if shape[1] % local_epochs:
        raise ValueError(
            f"{shape[1]} steps are not {local_epochs} equal local epochs: pad every epoch to the "
            "same number of steps with valid=False"
        )


def blank_padding(batches: Batches) -> Batches:
    """Image, label and valid, with zeros where `valid` is False.

    Whatever padding holds, NaN included, cannot reach a gradient: 0 times NaN would be NaN there.
    """
    image, label, valid = (batches[name] for name in ("image", "label", "valid"))
    mask = valid.reshape(*valid.shape, *(1,) * (image.ndim - valid.ndim))
    zero = jnp.zeros((), image.dtype)
    return {
        "image": jnp.where(mask, image, zero),
        "label": jnp.where(valid, label, 0),
        "valid": valid,
    }


def _orders(key: jax.Array, sizes: jax.Array, longest: int, epochs: int) -> jax.Array:
    """i32[K, epochs, N]: random orders in which every client's real samples come first."""
    draws = jax.random.uniform(key, (sizes.shape[0], epochs, longest))
    real = jnp.arange(longest) < sizes[:, None, None]
    return jnp.argsort(jnp.where(real, draws, 2), axis=-1)
