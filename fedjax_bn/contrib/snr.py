"""SNR (Jin, Lan, Zeng & Chen, TMM 2021): removes styles, and restores what separates classes."""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Unpack
from zlib import crc32

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.contrib.parts import draw_dense, require_maps, stages_of
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.models.classifier import entropy, sizes_of
from fedjax_bn.models.hooks import Hooked, register
from fedjax_bn.normalization.calls import changing_outputs
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import is_spatial
from fedjax_bn.sharing import PyTree, Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import cross_entropy, masked_mean

COLLECTION = "restitution"  # collection: path of a module -> its layer
HEADS = "restitution_heads"  # collection: a classifier for each place, in training only
_REDUCTION = 16  # channels for each hidden unit of a gate
_EPSILON = 1e-5  # PyTorch's default for instance norm


@bounded
def snr(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weight: AtLeast0 = 0.01,
    names: str = "",
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedAvg of a network that restores a part of the style that instance norm removes (SNR).

    The output x f[B, ..., C] of some modules becomes x+:

    $n = IN(x)$, $r = x - n$, $a = \mathrm{sigmoid}(W_2 \mathrm{relu}(W_1 \mathrm{pool}(r)))$

    $x^+ = n + a r$ and $x^- = n + (1 - a) r$, where pool is the mean over positions

    $CE + weight \sum (l(H(n) - H(x^+)) + l(H(x^-) - H(n))) + weight \; CE_{last}(x^+)$

    is the loss, a sum over places, with l(t) = log(1 + exp(-t)). Each place's dense head predicts
    classes from the map's mean over positions; H is the mean entropy of these predictions over
    samples. x+ should separate the classes better than the normalized n, and x-, the rest, worse.
    CE_last is the cross entropy of the last place's head. The layers, the collection `restitution`,
    travel with the model and predict with it; the heads, `restitution_heads`, travel too. The
    reported loss is CE.

    Defaults are those of the authors' code (microsoft/SNR, MIT). Differs from it: batch norms
    train, where theirs keep ImageNet's statistics.

    Args:
      weight: weight of the heads' terms, at least 0; 0.01 in the authors' code.
      names: modules whose outputs are restored, see `contrib.parts.stages_of`. "" means the first
        that the model has: the ends of layer1 to layer3, as in the authors' code; a DenseNet's
        transitions; all batch norms that see maps.
    """
    learned, federate_options = learning(model, classifier="snr", **options)

    def start(key: jax.Array, variables: Variables) -> Variables:
        places, sizes = stages_of("snr", variables, names), sizes_of(model, variables)
        layers, heads, key = {}, {}, stream(key, "restitution")
        for name, size in places.items():
            # By the name's checksum, so that a place draws the same whatever the other places are.
            place_key = jax.random.fold_in(key, crc32(name.encode()))
            layer_key, head_key = jax.random.split(place_key)
            layers[name] = _draw_layer(layer_key, size, sizes.dtype)
            heads[name] = draw_dense(head_key, size, sizes.classes, sizes.dtype)
        return {COLLECTION: layers, HEADS: heads} | variables

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, label, valid = learned.read(variables, batch, key), batch["label"], batch["valid"]
        means: dict[str, jax.Array] = {}
        # Here and not by `_hook`, because the loss needs each layer's n, x+ and x-.
        with _restoring(variables[COLLECTION], means):
            loss, out = learned.trained(without(variables, COLLECTION, HEADS), images, batch, key)
        require_maps("snr", variables[COLLECTION], means)
        heads = variables[HEADS]
        terms = head_losses(means, heads, label, valid, lambda x, *_: learned.loss(x, batch))
        return loss + weight * terms.astype(loss.dtype), (loss, out.moved)

    step = minimizing(objective, optimizer, ("params", COLLECTION, HEADS))
    return method_of(step, start=start, **federate_options)


def head_losses(
    means: Mapping[str, jax.Array], heads: PyTree, label: jax.Array, valid: jax.Array,
    loss: Callable[..., jax.Array] = cross_entropy,
) -> jax.Array:  # fmt: skip
    """Returns the sum over places plus the last place's loss, f[]; see `snr`.

    `means` has for each place those of n, x+ and x- over positions, f[3, B, C].
    """
    total: Any = 0.0
    last_logits: Any = None
    for name, place_means in means.items():
        logits = place_means @ heads[name]["kernel"] + heads[name]["bias"]
        normalized, restored, complement = (masked_mean(entropy(x), valid) for x in logits)
        # log(1 + exp(-t)) is softplus(-t), which does not overflow.
        total += jax.nn.softplus(restored - normalized) + jax.nn.softplus(normalized - complement)
        last_logits = logits[1]
    return total + loss(last_logits, label, valid)


def _hook(tree: Mapping[str, PyTree], images: jax.Array, key: jax.Array | None) -> Hooked:
    """Restores the outputs of the modules named in the tree, see `models.hooks`."""
    return Hooked(images, contexts=(_restoring(tree, {}),))


register(COLLECTION, _hook)


def _restoring(
    layers: Mapping[str, PyTree], means: MutableMapping[str, jax.Array]
) -> AbstractContextManager:
    """Returns a context in which modules have restored outputs; `means` is filled by calls."""

    def restored(name: str, x: jax.Array) -> jax.Array:
        if not is_spatial(x):
            return x  # no positions to normalize over
        restored_map, means[name] = restore_style(layers[name], x)
        return restored_map.astype(x.dtype)

    return changing_outputs(layers, restored)


def restore_style(layer: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x+ of a map f[B, ..., C] in at least float32, and the means of n, x+, x- f[3, B, C].

    x+ is an affine map of x: the gate needs only the map's mean, because that of n is its bias.
    """
    # At least float32: moments of 16-bit maps would lose their digits.
    x = x.astype(promote(x.dtype, jnp.float32))
    weights = jax.tree.map(lambda leaf: leaf.astype(x.dtype), layer)
    mean, var = instance_moments(x)
    scale = weights["scale"] * jax.lax.rsqrt(var + _EPSILON)
    shift = weights["bias"] - mean * scale
    # The mean of n over positions is the instance norm's bias, whatever x is.
    residual_mean = mean - weights["bias"]  # the mean of r over positions
    hidden = jax.nn.relu(residual_mean @ weights["down"] + weights["down_bias"])
    gate = jax.nn.sigmoid(hidden @ weights["up"] + weights["up_bias"])
    scale, shift = (positioned(t, x) for t in (scale + gate * (1 - scale), shift * (1 - gate)))
    means = weights["bias"] + jnp.stack([jnp.zeros_like(gate), gate, 1 - gate]) * residual_mean
    return x * scale + shift, means


def _draw_layer(key: jax.Array, channels: int, dtype: Any) -> PyTree:
    """Draws an instance norm and the two dense layers of a gate as PyTorch does."""
    hidden = max(channels // _REDUCTION, 1)
    keys = jax.random.split(key, 4)

    def draw(key: jax.Array, inputs: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return {
        "scale": jnp.ones(channels, dtype),
        "bias": jnp.zeros(channels, dtype),
        "down": draw(keys[0], channels, (channels, hidden)),
        "down_bias": draw(keys[1], channels, (hidden,)),
        "up": draw(keys[2], hidden, (hidden, channels)),
        "up_bias": draw(keys[3], hidden, (channels,)),
    }
