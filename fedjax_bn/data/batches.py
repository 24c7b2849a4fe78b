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

    def pad(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, longest - len(array))] + [(0, 0)] * (array.ndim - 1))

    return ClientData(
        images=jnp.asarray(np.stack([pad(split.images) for split in splits])),
        labels=jnp.asarray(np.stack([pad(split.labels) for split in splits]).astype(np.int32)),
        sizes=jnp.asarray([len(split.labels) for split in splits], jnp.int32),
    )


def by_epochs(batch_size: int, epochs: int) -> Callable[[ClientData, jax.Array], Batches]:
    """Returns `sample(data, key)`: S = epochs * ceil(N / B) steps, reshuffled each epoch.

    Each epoch holds every sample of a client once; its last batch is short, and clients with fewer
    samples end it with empty batches (`valid` is False there).
    """

    def sample(data: ClientData, key: jax.Array) -> Batches:
        num_clients, longest = data.labels.shape
        steps = math.ceil(longest / batch_size)
        orders = _orders(key, data, epochs)
        padding = steps * batch_size - longest
        orders = jnp.pad(orders, ((0, 0), (0, 0), (0, padding)))
        valid = jnp.arange(steps * batch_size) < data.sizes[:, None, None]
        shape = (num_clients, epochs * steps, batch_size)
        valid = jnp.broadcast_to(valid, orders.shape).reshape(shape)
        return _gather(data, orders.reshape(shape), valid)

    return sample


def by_steps(
    batch_size: int, steps: int, smallest: int
) -> Callable[[ClientData, jax.Array], Batches]:
    """Returns `sample(data, key)`: S = steps full batches for every client.

    A client runs through its reshuffled samples as often as needed (FedBN, Appendix E.6: clients
    with less data repeat sampling).

    Args:
      batch_size: B.
      steps: S.
      smallest: samples of the smallest client.
    """
    epochs = math.ceil(steps * batch_size / smallest)

    def sample(data: ClientData, key: jax.Array) -> Batches:
        orders = _orders(key, data, epochs)
        position = jnp.arange(steps * batch_size)
        epoch, offset = jnp.divmod(position, data.sizes[:, None])
        index = jax.vmap(lambda order, e, o: order[e, o])(orders, epoch, offset)
        shape = (data.sizes.shape[0], steps, batch_size)
        return _gather(data, index.reshape(shape), jnp.ones(shape, bool))

    return sample


def check_batches(batches: Batches, num_clients: int, local_epochs: int) -> None:
    """Checks keys and shapes of a round's batches.

    Raises:
      ValueError: a key is missing or unknown, or a shape does not fit; the message names it.
    """
    missing = {"image", "label", "valid"} - set(batches)
    unknown = set(batches) - {"image", "label", "valid", "participates", "size"}
    if missing or unknown:
        raise ValueError(
            f"batches lack {sorted(missing)} and have unknown {sorted(unknown)}: give 'image', "
            "'label' and 'valid', optionally 'participates' and 'size'"
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


def _orders(key: jax.Array, data: ClientData, epochs: int) -> jax.Array:
    """i32[K, epochs, N]: random orders in which every client's real samples come first."""
    num_clients, longest = data.labels.shape
    draws = jax.random.uniform(key, (num_clients, epochs, longest))
    real = jnp.arange(longest) < data.sizes[:, None, None]
    return jnp.argsort(jnp.where(real, draws, 2), axis=-1)


def _gather(data: ClientData, index: jax.Array, valid: jax.Array) -> Batches:
    take = jax.vmap(lambda array, i: array[i])
    return {
        "image": take(data.images, index),
        "label": take(data.labels, index),
        "valid": valid,
        "size": data.sizes,
    }
