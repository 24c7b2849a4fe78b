"""Plain convolutional networks: a small one of ours, FedBN's DigitCNN and its AlexNet."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Units, bounded
from fedjax_bn.models.layers import (
    Classifier,
    Norm,
    adaptive_average_pool,
    conv_of,
    dense,
    max_pool,
    norm_of,
)


class SmallCNN(Classifier):
    """Three 3x3 convolutions of stride 2, each with batch norm and ReLU; mean over the map.

    Ours, from no paper: 24 thousand parameters and 0.7 million multiplications an image of 32x32,
    for runs on two CPU cores. Any size from 1x1 works.

    Attributes:
      num_classes: number of logits.
      widths: channels of the convolutions.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
    """

    num_classes: int = 10
    widths: Sequence[int] = (16, 32, 64)
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.widths[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, widths[-1]], what the classifier sees."""
        convolve = conv_of(self.norm, kernel=3, strides=2, padding=1, param_dtype=self.param_dtype)
        x = images
        for i, width in enumerate(self.widths, start=1):
            x = convolve(x, width, name=f"conv{i}")
            x = nn.relu(norm_of(self.norm, self.param_dtype)(name=f"norm{i}")(x))
        return x.mean((1, 2))


@bounded
class DigitCNN(Classifier):
    """Three 5x5 convolutions and three dense layers, batch norm after all but the last.

    FedBN's network for digits (Li et al. 2021, Table 3). Made for images of 28x28; any size from
    4x4 works. Differs from the paper: Table 3 prints layer 3 twice; the authors' code has it once.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the two hidden dense layers.
      width: channels of the first two convolutions, half of the third's.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
    """

    num_classes: int = 10
    hidden: Sequence[int] = (2048, 512)
    width: Units = 64
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.hidden[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, hidden[-1]], what the classifier sees."""
        conv5x5 = conv_of(
            self.norm, kernel=5, padding=2, use_bias=True, param_dtype=self.param_dtype
        )
        norm = norm_of(self.norm, self.param_dtype)

        x = nn.relu(norm(name="norm1")(conv5x5(images, self.width, name="conv1")))
        x = max_pool(x, 2, 2)
        x = nn.relu(norm(name="norm2")(conv5x5(x, self.width, name="conv2")))
        x = max_pool(x, 2, 2)
        x = nn.relu(norm(name="norm3")(conv5x5(x, 2 * self.width, name="conv3")))
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden):
            layer = dense(width, x.shape[-1], param_dtype=self.param_dtype, name=f"dense{i + 1}")
            x = nn.relu(norm(name=f"norm{i + 4}")(layer(x)))
        return x


def SmallDigitCNN(num_classes: int = 10, **fields: Any) -> DigitCNN:
    """DigitCNN with dense layers of 256 and 128: 2.0 instead of 14.2 million parameters."""
    usual: dict[str, Any] = {"num_classes": num_classes, "hidden": (256, 128)}
    return DigitCNN(**usual | fields)


class AlexNet(Classifier):
    """Five convolutions and three dense layers, batch norm after all but the last; no dropout.

    FedBN's network for Office-Caltech10 and DomainNet (Li et al. 2021, appendix D.3, Table 9). Made
    for images of 256x256; any size from 63x63 works.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the two hidden dense layers.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
    """

    num_classes: int = 10
    hidden: Sequence[int] = (4096, 4096)
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.hidden[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, hidden[-1]], what the classifier sees."""
        convolve = conv_of(self.norm, use_bias=True, param_dtype=self.param_dtype)
        norm = norm_of(self.norm, self.param_dtype)

        x = convolve(images, 64, kernel=11, strides=4, padding=2, name="conv1")
        x = max_pool(nn.relu(norm(name="norm1")(x)), 3, 2)
        x = convolve(x, 192, kernel=5, padding=2, name="conv2")
        x = max_pool(nn.relu(norm(name="norm2")(x)), 3, 2)
        for i, width in ((3, 384), (4, 256), (5, 256)):
            x = convolve(x, width, kernel=3, padding=1, name=f"conv{i}")
            x = nn.relu(norm(name=f"norm{i}")(x))
        x = adaptive_average_pool(max_pool(x, 3, 2), 6)
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden):
            layer = dense(width, x.shape[-1], param_dtype=self.param_dtype, name=f"dense{i + 1}")
            x = nn.relu(norm(name=f"norm{i + 6}")(layer(x)))
        return x
