"""The zero-shot adapter of FedIG-A (Eq. 7 to 9), which weighs each sample's own statistics.

The collection `adapter` contains its parameters, layer name -> {"hidden": dense, "out": dense}. The
model itself does not change.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once
from fedjax_bn.normalization.calls import network_name, spatial_layers
from fedjax_bn.normalization.instance import deviations, handed_over
from fedjax_bn.normalization.layer import Layer, Statistics, StatisticsRule, is_spatial
from fedjax_bn.normalization.mixig import mix_statistics

COLLECTION = "adapter"
_REDUCTION = 16
_START = (0.1, 0.1)  # initial delta and epsilon: inside (0, 1), where clipping passes gradients

_Dense = dict[str, jax.Array]
Adapter = dict[str, dict[str, _Dense]]


def init(key: jax.Array, layers: dict[str, int], dtype: Any = jnp.float32) -> Adapter:
    """Initializes an adapter for each layer; every alpha starts near a small positive value.

    `layers` is name -> channels C, as from `calls.spatial_layers`. An adapter has `hidden` with
    kernel f[2C, H], H = max(C // 16, 1), and `out` with kernel f[H, 2], both with biases.
    """
    kernel = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # PyTorch's
    # The last layer starts at 0, so that every alpha starts at `_START` whatever the sample is.
    adapter = {}
    for i, (name, channels) in enumerate(layers.items()):
        width = max(channels // _REDUCTION, 1)
        drawn = kernel(jax.random.fold_in(key, i), (2 * channels, width), dtype)
        adapter[name] = {
            "hidden": {"kernel": drawn, "bias": jnp.zeros(width, dtype)},
            "out": {"kernel": jnp.zeros((width, 2), dtype), "bias": jnp.asarray(_START, dtype)},
        }
    return adapter


def with_adapter(
    key: jax.Array, model: Any, variables: dict[str, Any], images: jax.Array | jax.ShapeDtypeStruct
) -> dict[str, Any]:
    """Adds the collection `adapter`, with an adapter for every spatial batch norm.

    Of the images f[B, ...] only the shape counts. A model without such batch norms raises
    ValueError.
    """
    layers = spatial_layers(model, variables, images)
    if not layers:
        name, shape = network_name(model), tuple(images.shape)
        raise ValueError(f"{name} has no spatial batch norm for images {shape}: leave adapter out")
    dtype = jax.tree.leaves(variables["params"])[0].dtype
    return {**variables, COLLECTION: init(key, layers, dtype)}


def estimate(adapter: dict[str, _Dense], distance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns delta, epsilon f[B] = G([mean_i - mean_G; std_i - std_G]), distances f[B, 2C]."""
    adapter = jax.tree.map(lambda leaf: leaf.astype(distance.dtype), adapter)
    hidden, out = adapter["hidden"], adapter["out"]
    features = jax.nn.relu(distance @ hidden["kernel"] + hidden["bias"])
    # For two columns, sums are faster than a matrix product, because XLA fuses them.
    delta, epsilon = ((features * column).sum(-1) for column in out["kernel"].T)
    return delta + out["bias"][0], epsilon + out["bias"][1]


def adapted_statistics(adapter: Adapter, key: jax.Array | None = None) -> StatisticsRule:
    """Returns the rule of Eq. 7, which mixes a sample's own and the running statistics by alpha.

    In training alpha = clip(delta z + epsilon, 0, 1), with z ~ N(0, 1) drawn per sample and layer
    (Eq. 9); at test alpha = clip(epsilon, 0, 1). The model's running statistics serve as the global
    ones. A spatial layer records its `alpha` f[B]. Other layers use the running statistics.

    Args:
      adapter: parameters as from `init`; a spatial layer without raises ValueError.
      key: random key of a training pass; None at test.
    """

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return Statistics(layer.mean, layer.var)
        if layer.name not in adapter:
            remedy = "train with fediga, or with_adapter for this model and image size"
            raise ValueError(f"batch norm {layer.name!r} has no zero-shot adapter: {remedy}")
        instance, received = deviations(layer, x)
        distances = [own - running for own, running in zip(instance, received, strict=True)]
        delta, epsilon = estimate(adapter[layer.name], jnp.concatenate(distances, axis=-1))
        if key is not None:
            z = jax.random.normal(layer.key(key), delta.shape, delta.dtype)
            epsilon += delta * computed_once(z)  # else XLA:CPU draws again in every loop that reads
        alpha = computed_once(jnp.clip(epsilon, 0, 1))
        mean, std = mix_statistics(instance, received, alpha[:, None])
        return handed_over(mean, std, layer, x)._replace(recorded={"alpha": alpha})

    return rule
