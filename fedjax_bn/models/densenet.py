"""Densely connected networks (Huang et al. 2017) in torchvision's variant."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Units, bounded
from fedjax_bn.models.layers import (
    Classifier,
    Norm,
    average_pool,
    conv_of,
    fan_in_uniform,
    he_fan_in,
    max_pool,
    norm_of,
)


class _DenseLayer(nn.Module):
    """Appends `growth` channels: norm, ReLU, 1x1 to four times `growth`, norm, ReLU, 3x3.

    Attributes:
      growth: number of channels appended.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
    """

    growth: int
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C + growth]."""
        convolve = conv_of(self.norm, kernel_init=he_fan_in, param_dtype=self.param_dtype)
        norm = norm_of(self.norm, self.param_dtype)
        new = nn.relu(norm(name="norm1")(x))
        new = convolve(new, 4 * self.growth, 1, name="conv1")
        new = nn.relu(norm(name="norm2")(new))
        new = convolve(new, self.growth, 3, padding=1, name="conv2")
        return jnp.concatenate([x, new], axis=-1)


class _Transition(nn.Module):
    """Halves the channels and the map: norm, ReLU, 1x1, 2x2 mean.

    Attributes:
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
    """

    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H // 2, W // 2, C // 2]."""
        half = x.shape[-1] // 2
        x = nn.relu(norm_of(self.norm, self.param_dtype)(name="norm")(x))
        convolve = conv_of(self.norm, kernel_init=he_fan_in, param_dtype=self.param_dtype)
        x = convolve(x, half, 1, name="conv")
        return average_pool(x, 2)


@bounded
class DenseNet(Classifier):
    """Stem, dense blocks with transitions between them, norm, ReLU, mean, classifier.

    Attributes:
      block_sizes: number of dense layers in each block.
      num_classes: number of logits.
      growth: channels that each dense layer appends.
      width: channels of the stem.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
    """

    block_sizes: Sequence[int]
    num_classes: int = 10
    growth: Units = 32
    width: Units = 64
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    def setup(self) -> None:
        """Makes the classifier, whose bias starts at 0."""
        self.head = nn.Dense(
            self.num_classes, kernel_init=fan_in_uniform, param_dtype=self.param_dtype
        )

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, F], the last map's mean over its pixels."""
        dtype = self.param_dtype
        norm = norm_of(self.norm, dtype)
        convolve = conv_of(self.norm, kernel_init=he_fan_in, param_dtype=dtype)
        x = convolve(images, self.width, 7, 2, 3, name="stem_conv")
        x = max_pool(nn.relu(norm(name="stem_norm")(x)), 3, 2, 1)
        for block, size in enumerate(self.block_sizes, start=1):
            if block > 1:
                x = _Transition(dtype, self.norm, name=f"transition{block - 1}")(x)
            for layer in range(1, size + 1):
                x = _DenseLayer(self.growth, dtype, self.norm, name=f"block{block}_layer{layer}")(x)
        return nn.relu(norm(name="final_norm")(x)).mean((1, 2))


def DenseNet121(num_classes: int = 10, **fields: Any) -> DenseNet:
    """DenseNet-121: 121 batch norms, 1024 features; `fields` of `DenseNet`."""
    usual: dict[str, Any] = {"block_sizes": (6, 12, 24, 16), "num_classes": num_classes}
    return DenseNet(**usual | fields)
