"""Densely connected networks (Huang et al. 2017) in torchvision's variant."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Units, bounded
from fedjax_bn.models.layers import (
    Classifier,
    Network,
    average_pool,
    fan_in_uniform,
    he_fan_in,
    max_pool,
)


class _DenseLayer(Network):
    """Appends `growth` channels: norm, ReLU, 1x1 to four times `growth`, norm, ReLU, 3x3."""

    growth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C + growth]."""
        new = nn.relu(self.normalize(x, "norm1"))
        new = self.convolve(new, 4 * self.growth, 1, kernel_init=he_fan_in, name="conv1")
        new = nn.relu(self.normalize(new, "norm2"))
        new = self.convolve(new, self.growth, 3, padding=1, kernel_init=he_fan_in, name="conv2")
        return jnp.concatenate([x, new], axis=-1)


class _Transition(Network):
    """Halves the channels and the map: norm, ReLU, 1x1, 2x2 mean."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H // 2, W // 2, C // 2]."""
        half = x.shape[-1] // 2
        x = nn.relu(self.normalize(x, "norm"))
        return average_pool(self.convolve(x, half, 1, kernel_init=he_fan_in, name="conv"), 2)


@bounded
class DenseNet(Classifier):
    """Stem, dense blocks with transitions between them, norm, ReLU, mean, classifier.

    Attributes:
      block_sizes: number of dense layers in each block.
      num_classes: number of logits.
      growth: channels that each dense layer appends.
      width: channels of the stem.
      param_dtype, norm: as in `layers.Network`.
    """

    block_sizes: Sequence[int]
    num_classes: int = 10
    growth: Units = 32
    width: Units = 64

    def setup(self) -> None:
        """Makes the classifier, whose bias starts at 0, as in torchvision."""
        self.head = nn.Dense(
            self.num_classes, kernel_init=fan_in_uniform, param_dtype=self.param_dtype
        )

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, F], the last map's mean over its pixels."""
        x = self.convolve(images, self.width, 7, 2, 3, kernel_init=he_fan_in, name="stem_conv")
        x = max_pool(nn.relu(self.normalize(x, "stem_norm")), 3, 2, 1)
        for block, size in enumerate(self.block_sizes, start=1):
            if block > 1:
                x = self.part(_Transition, name=f"transition{block - 1}")(x)
            for layer in range(1, size + 1):
                x = self.part(_DenseLayer, self.growth, name=f"block{block}_layer{layer}")(x)
        return nn.relu(self.normalize(x, "final_norm")).mean((1, 2))


def DenseNet121(num_classes: int = 10, **fields: Any) -> DenseNet:
    """DenseNet-121: 121 batch norms, 1024 features; `fields` of `DenseNet`."""
    usual: dict[str, Any] = {"block_sizes": (6, 12, 24, 16), "num_classes": num_classes}
    return DenseNet(**usual | fields)
