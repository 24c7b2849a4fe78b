"""A small network with batch norm for images of 32x32, for runs that two CPU cores carry."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.models.layers import Norm, conv_of, dense, norm_of


class SmallCNN(nn.Module):
    """Three 3x3 convolutions of stride 2, each with batch norm and ReLU; mean over the map.

    Ours, of no paper: 24 thousand parameters and 0.7 million multiplications an image of 32x32.
    Any size from 1x1 works.

    Attributes:
      num_classes: number of logits.
      widths: channels of the convolutions.
      param_dtype: dtype in which the variables are created.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
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

    def classify(self, features: jax.Array) -> jax.Array:
        """f[B, widths[-1]] -> logits f[B, num_classes]."""
        return self.head(features)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images f[B, H, W, C] -> logits f[B, num_classes]."""
        return self.classify(self.features(images))
