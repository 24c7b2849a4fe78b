"""AlexNet with batch norm, FedBN's network for Office-Caltech10 and DomainNet (Table 9)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.models.layers import (
    Norm,
    adaptive_average_pool,
    conv_of,
    dense,
    max_pool,
    norm_of,
)


class AlexNet(nn.Module):
    """Five convolutions and three dense layers, batch norm after all but the last; no dropout.

    Li et al. 2021, appendix D.3, Table 9. Made for images of 256x256; any size from 63x63 works.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the two hidden dense layers.
      param_dtype: dtype in which the variables are created.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
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

    def classify(self, features: jax.Array) -> jax.Array:
        """f[B, hidden[-1]] -> logits f[B, num_classes]."""
        return self.head(features)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images f[B, H, W, C] -> logits f[B, num_classes]."""
        return self.classify(self.features(images))
