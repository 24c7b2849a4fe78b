"""A random latent between a network's features and its classifier (Nguyen et al. 2022, FedSR).

It is a collection of its own, `latent`, beside a model's, and serves any model:

    mu = f A + a,   s = softplus(f B + b),   z = mu + s e,   e ~ N(0, I),   logits = classify(z)

`models.hooks` applies it in every pass whose variables hold one. Training takes one draw a sample;
at test the outputs are the logarithm of the mean class probabilities over some fixed draws. z has
as many entries as the features, so that the classifier is the model's own.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.keys import stream
from fedjax_bn.models.classifier import Sizes, sizes_of
from fedjax_bn.models.features import Around, Classify
from fedjax_bn.models.hooks import Hooked
from fedjax_bn.sharing import Variables

PyTree = Any

COLLECTION = "latent"
SAMPLES = 20  # draws of a prediction, as in the authors' code
_TESTING = 20221128  # seed of the draws of predictions


def hook(tree: PyTree, images: jax.Array, key: jax.Array | None) -> Hooked:
    """Puts the latent between features and classifier, see `models.hooks`."""
    return Hooked(images, _around(tree, key))


def _around(latent: PyTree, key: jax.Array | None) -> Around:
    def drawn(classify: Classify, features: jax.Array) -> jax.Array:
        if "deviation" not in latent:
            return classify(mean_of(latent, features))
        if key is not None:
            return classify(draw(latent, features, key)[0])
        shape = (SAMPLES, 1, features.shape[-1])
        noise = jax.random.normal(jax.random.key(_TESTING), shape, features.dtype)
        mean, deviation = moments_of(latent, features)
        logits = classify((mean + deviation * noise).reshape(-1, features.shape[-1]))
        logs = jax.nn.log_softmax(logits).reshape(SAMPLES, len(features), -1)
        return jax.nn.logsumexp(logs, 0) - jnp.log(jnp.asarray(SAMPLES, logs.dtype))

    return drawn


def mean_of(latent: PyTree, features: jax.Array) -> jax.Array:
    """mu f[B, F] of features f[B, F]."""
    return _affine(latent["mean"], features)


def moments_of(latent: PyTree, features: jax.Array) -> tuple[jax.Array, jax.Array]:
    """mu and s, f[B, F] each."""
    return mean_of(latent, features), jax.nn.softplus(_affine(latent["deviation"], features))


def draw(
    latent: PyTree, features: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """z as a training pass with that key draws it, mu and s, f[B, F] each; mu, mu and None without
    a deviation.
    """
    if "deviation" not in latent:
        mean = mean_of(latent, features)
        return mean, mean, None
    mean, deviation = moments_of(latent, features)
    noise = jax.random.normal(stream(key, "latent noise"), mean.shape, mean.dtype)
    return mean + deviation * noise, mean, deviation


def with_latent(key: jax.Array, model: Any, variables: Variables, *, noise: bool) -> Variables:
    """The variables with the collection `latent`; one that is there stays as it is.

    Args:
      key: random key of its start, PyTorch's of a dense layer.
      model: a linen module, or what `from_nnx` makes.
      variables: its collections.
      noise: whether there is a deviation; without, z is mu.

    Raises:
      ValueError: the size of the model's features cannot be found.
    """
    if COLLECTION in variables:
        return variables
    sizes = sizes_of(model, variables)
    layers = ("mean", "deviation") if noise else ("mean",)
    keys = dict(zip(layers, jax.random.split(key, len(layers)), strict=True))
    return {**variables, COLLECTION: {name: _dense(k, sizes) for name, k in keys.items()}}


def _dense(key: jax.Array, sizes: Sizes) -> dict[str, jax.Array]:
    """A layer of as many outputs as inputs, U(-1/sqrt(F), 1/sqrt(F))."""
    size, bound = sizes.features, sizes.features**-0.5
    draw = partial(jax.random.uniform, dtype=sizes.dtype, minval=-bound, maxval=bound)
    kernel_key, bias_key = jax.random.split(key)
    return {"kernel": draw(kernel_key, (size, size)), "bias": draw(bias_key, (size,))}


def _affine(layer: PyTree, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype)
