"""FedRDN (Yan et al., CVPR 2025): images normalized by the statistics of random clients."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Channels, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, look_up
from fedjax_bn.contrib.parts import exchanging, in_row, require_images
from fedjax_bn.engine.backend import where_tree
from fedjax_bn.engine.batches import blank_padding, first_epoch
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning
from fedjax_bn.models.hooks import Hooked, register
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.sharing import MEASURED, PyTree, Variables, without
from fedjax_bn.state import Received, stack

_LEAST = 1e-6  # of a deviation; a channel with less is constant and is divided by 1


@bounded
def fedrdn(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    channels: Channels = 3,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""FedAvg on images that are normalized, in training, by the statistics of random clients.

    $x' = (x - m_j) / s_j$ for each channel of an image, with a client j drawn for each image

    m_j and s_j are the means over the images of client j of an image's mean and deviation over its
    pixels. A client's own model predicts with its own m and s.

    **It reveals means and deviations of images.** When a client first takes part, it measures m and
    s of all images of its first local epoch. It sends these 2 C numbers to the server, which sends
    those of all clients to every client. j is uniform over the clients that have sent theirs and
    the client itself, so that in the first round every client uses its own.

    An unseen client, and one that has not taken part yet, measures its own m and s on the images
    that it predicts: in a stream (`evaluate`, `predict`, `serve`, a predictor) on all images so
    far with those of the batch, in any other pass on each image alone. It sends nothing.

    This follows the paper; the authors' code (IAMJackYan/FedRDN) draws a mean and a deviation for
    each batch, independently. Differs from both: clients may join later; deviations divide by the
    number of pixels, not by one less; a constant channel is divided by 1, not by 0.

    Args:
      channels: C of the images that the model reads.
    """
    learned, federate_options = learning(model, **options)

    def start(key: jax.Array, variables: Variables) -> Variables:
        return {**variables, MEASURED: _nothing(channels, parameter_dtype(variables))}

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        own_key = stream(key, "normalizing clients")
        images = normalized_by_random_clients(own_key, images, variables[MEASURED], received)
        # Without the collection, because `_hook` would normalize the images again.
        loss, out = learned.trained(without(variables, MEASURED), images, batch, key)
        return loss, (loss, out.moved)

    method = exchanging(
        minimizing(objective, optimizer),
        "count",
        lambda variables, k: stack(_nothing(channels, parameter_dtype(variables)), k),
        around=lambda client: _measuring(client, learned, options.get("load") or look_up),
        keeps=MEASURED,
        start=start,
        **federate_options,
    )
    shown = "the mean and deviation of each channel of its images"
    return method._replace(notes=(f"fedrdn: each client sends the server and all others {shown}",))


def _hook(tree: Variables, images: jax.Array, key: jax.Array | None) -> Hooked:
    """Normalizes images f[B, H, W, C] by the client's statistics, see `models.hooks`."""
    is_measured = tree["count"] > 0
    image_statistics = _statistics_of(images, tree["mean"])
    measured = tree["mean"], tree["std"]

    def choose(leaf: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(is_measured, leaf, x.astype(leaf.dtype))

    return Hooked(_normalize(images, *map(choose, measured, image_statistics)))


def _follow(received: PyTree, so_far: PyTree, images: jax.Array, valid: jax.Array | None) -> PyTree:
    """Returns an unseen client's statistics with those of its next batch, see `models.hooks`."""
    valid = jnp.ones(len(images), bool) if valid is None else valid
    return where_tree(received["count"] > 0, received, _measure(so_far, images, valid))


register(MEASURED, _hook, _follow)


def _nothing(channels: int, dtype: Any) -> PyTree:
    """Returns the statistics of no images, in at least float32."""
    dtype = promote(dtype, jnp.float32)
    mean, std = jnp.zeros((2, channels), dtype)
    return {"mean": mean, "std": std, "count": jnp.zeros((), dtype)}


def _statistics_of(images: jax.Array, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and deviation f[B, C] of each image; `like` is f[C]."""
    require_images("fedrdn", images, len(like))
    mean, var = instance_moments(images)
    return mean, jnp.sqrt(var)


def _measure(tracked: PyTree, images: jax.Array, valid: jax.Array) -> PyTree:
    """Returns the statistics of a client's images so far, with those of one more batch."""
    dtype = tracked["count"].dtype
    count = tracked["count"] + valid.sum(dtype=dtype)
    weight = (valid.astype(dtype) / jnp.maximum(count, 1))[:, None]

    def moved(mean_before: jax.Array, value: jax.Array) -> jax.Array:
        # By differences, so that means of many images lose no digits.
        change = jnp.where(valid[:, None], value.astype(dtype) - mean_before, 0)
        return mean_before + (weight * change).sum(0)

    mean, std = _statistics_of(images, tracked["mean"])
    return {"mean": moved(tracked["mean"], mean), "std": moved(tracked["std"], std), "count": count}


def _normalize(images: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    """Returns (x - m) / s in the dtype of x; m and s are f[C] or f[B, C]."""
    mean, std = (
        jnp.broadcast_to(t, (len(images), t.shape[-1])).astype(images.dtype) for t in (mean, std)
    )
    # A constant channel has nothing to scale, and 1 / 0 would spoil all others.
    std = jnp.where(std < _LEAST, 1, std)
    return (images - positioned(mean, images)) / positioned(std, images)


def normalized_by_random_clients(
    key: jax.Array, images: jax.Array, personal: PyTree, received: Received
) -> jax.Array:
    """Returns images, each normalized by a random client's statistics."""
    bank = received.server
    is_this_client = jnp.arange(len(bank["count"]), dtype=jnp.int32) == received.client
    has_sent = is_this_client | (bank["count"] > 0)
    # Uniform over the clients that have sent: the logits are 0 or minus infinity.
    chosen = jax.random.categorical(key, jnp.where(has_sent, 0.0, -jnp.inf), shape=(len(images),))

    def of_chosen(name: str) -> jax.Array:
        return jnp.where(is_this_client[chosen][:, None], personal[name], bank[name][chosen])

    return _normalize(images, of_chosen("mean"), of_chosen("std"))


def _measuring(client: Client, learned: Learning, load: Load) -> Client:
    """Returns the client that measures its images when it first takes part."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        before, source = received.personal[MEASURED], batches.get("source")
        # Later epochs have the same images.
        steps = without(first_epoch(batches, client.epochs), "source")
        keys = jax.random.split(stream(key, "image statistics"), len(steps["valid"]))

        def measured_batch(tracked: PyTree, inputs: tuple) -> tuple[PyTree, None]:
            batch = blank_padding(load(source, *inputs))
            images = learned.prepare(batch["image"], tracked["mean"].dtype)
            return _measure(tracked, images, batch["valid"]), None

        nothing = jax.tree.map(jnp.zeros_like, before)
        measured, _ = jax.lax.scan(measured_batch, nothing, (steps, keys))
        # Always measured and then chosen: where devices share a client, a branch could not.
        statistics = where_tree(before["count"] > 0, before, measured)
        personal = {**received.personal, MEASURED: statistics}
        update = client.run(received._replace(personal=personal), batches, key)
        sent = statistics | {"count": (statistics["count"] > 0).astype(statistics["count"].dtype)}
        place = functools.partial(in_row, received.client)
        return update._replace(message=jax.tree.map(place, received.server, sent))

    return client._replace(run=run)
