"""The six-layer network of FedBN's digits benchmark (Li et al. 2021, Table 3)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Units, bounded
from fedjax_bn.models.layers import Norm, conv_of, dense, max_pool, norm_of


@bounded
class DigitCNN(nn.Module):
    """Three 5x5 convolutions and three dense layers, batch norm after all but the last.

    Made for images of 28x28; any size from 4x4 works. Differs from the paper: Table 3 prints
    layer 3 twice; the authors' code has it once.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the two hidden dense layers.
      width: channels of the first two convolutions, half of the third's.
      param_dtype: dtype in which the variables are created.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
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

    def classify(self, features: jax.Array) -> jax.Array:
        """f[B, hidden[-1]] -> logits f[B, num_classes]."""
        return self.head(features)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images f[B, H, W, C] -> logits f[B, num_classes]."""
        return self.classify(self.features(images))
