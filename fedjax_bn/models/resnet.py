"""Residual networks (He et al. 2016) in torchvision's variant: stride in a bottleneck's 3x3."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from fedjax_bn.arguments.ranges import Units, bounded
from fedjax_bn.engine.backend import computed_once
from fedjax_bn.models.layers import Classifier, Network, dense, he_fan_out, max_pool


class _ResidualBlock(Network):
    """ReLU of the sum of a shortcut and a branch of convolutions, each followed by batch norm.

    The branch is 3x3, 3x3, or as a bottleneck 1x1, 3x3, 1x1 with four times `width` channels out.
    If the shape changes, the shortcut is a 1x1 convolution with its own batch norm.
    """

    width: int
    strides: int = 1
    bottleneck: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / strides, W / strides, width or 4 width]."""
        # (channels, kernel, strides) of each convolution in the branch.
        branch: tuple[tuple[int, int, int], ...]
        branch = ((self.width, 3, self.strides), (self.width, 3, 1))
        if self.bottleneck:
            branch = ((self.width, 1, 1), branch[0], (4 * self.width, 1, 1))
        out = branch[-1][0]

        shortcut = x
        if self.strides != 1 or x.shape[-1] != out:
            shortcut = self.convolve(
                x, out, 1, self.strides, kernel_init=he_fan_out, name="shortcut_conv"
            )
            shortcut = self.normalize(shortcut, "shortcut_norm")
        for i, (width, kernel, strides) in enumerate(branch, start=1):
            x = self.convolve(
                x, width, kernel, strides, kernel // 2, kernel_init=he_fan_out, name=f"conv{i}"
            )
            x = self.normalize(x, f"norm{i}")
            x = nn.relu(x if i < len(branch) else x + shortcut)
        # XLA:CPU would compute the sums of all blocks before it in every later block.
        return computed_once(x)


@bounded
class ResNet(Classifier):
    """Stem, stages of residual blocks that halve the map and double the channels, mean, classifier.

    The stem is ImageNet's, 7x7 with stride 2 and max-pooling with stride 2, at every image size.

    Attributes:
      stage_sizes: number of blocks in each stage.
      bottleneck: whether the blocks are bottlenecks.
      num_classes: number of logits.
      width: channels of the stem and inside the blocks of the first stage.
      param_dtype, norm: as in `layers.Network`.
    """

    stage_sizes: Sequence[int]
    bottleneck: bool = False
    num_classes: int = 10
    width: Units = 64

    def setup(self) -> None:
        """Makes the classifier."""
        pooled = self.width * 2 ** (len(self.stage_sizes) - 1) * (4 if self.bottleneck else 1)
        self.head = dense(self.num_classes, pooled, param_dtype=self.param_dtype)

    @nn.compact
    def maps(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / 32, W / 32, F], the last block's output."""
        x = self.convolve(images, self.width, 7, 2, 3, kernel_init=he_fan_out, name="conv1")
        x = max_pool(nn.relu(self.normalize(x, "norm1")), 3, 2, 1)
        for stage, size in enumerate(self.stage_sizes):
            for block in range(size):
                strides = 2 if stage > 0 and block == 0 else 1
                name, width = f"layer{stage + 1}_{block}", self.width * 2**stage
                x = self.part(_ResidualBlock, width, strides, self.bottleneck, name=name)(x)
        return x

    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, F], the last map's mean over its pixels."""
        return self.maps(images).mean((1, 2))


def ResNet10(num_classes: int = 10, **fields: Any) -> ResNet:
    """ResNet-10, for small experiments: 12 batch norms, 512 features; `fields` of `ResNet`."""
    usual: dict[str, Any] = {"stage_sizes": (1, 1, 1, 1), "num_classes": num_classes}
    return ResNet(**usual | fields)


def ResNet18(num_classes: int = 10, **fields: Any) -> ResNet:
    """ResNet-18: 20 batch norms, three of them in shortcuts; 512 features; `fields` of `ResNet`."""
    usual: dict[str, Any] = {"stage_sizes": (2, 2, 2, 2), "num_classes": num_classes}
    return ResNet(**usual | fields)


def ResNet50(num_classes: int = 10, **fields: Any) -> ResNet:
    """ResNet-50: bottlenecks, 53 batch norms, 2048 features; `fields` of `ResNet`."""
    usual: dict[str, Any] = {"stage_sizes": (3, 4, 6, 3), "num_classes": num_classes}
    return ResNet(**usual | {"bottleneck": True} | fields)
