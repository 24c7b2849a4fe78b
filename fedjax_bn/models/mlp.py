"""The network of FedBN's ABIDE experiment: vectors in, two hidden layers with batch norm."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.models.layers import Norm, dense, norm_of, require_floats


class MLP(nn.Module):
    """Dense, batch norm, ReLU for each hidden layer, then the classifier.

    Li et al. 2021, section 5.3 (5995 inputs, two classes). Inputs with more axes are flattened.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the hidden layers.
      param_dtype: dtype in which the variables are created.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
    """

    num_classes: int = 2
    hidden: Sequence[int] = (16, 16)
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.hidden[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, ...] -> f[B, hidden[-1]], what the classifier sees."""
        require_floats(images)
        norm = norm_of(self.norm, self.param_dtype)
        x = images.reshape(images.shape[0], -1)
        for i, width in enumerate(self.hidden, start=1):
            layer = dense(width, x.shape[-1], param_dtype=self.param_dtype, name=f"dense{i}")
            x = nn.relu(norm(name=f"norm{i}")(layer(x)))
        return x

    def classify(self, features: jax.Array) -> jax.Array:
        """f[B, hidden[-1]] -> logits f[B, num_classes]."""
        return self.head(features)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Inputs f[B, ...] -> logits f[B, num_classes]."""
        return self.classify(self.features(images))
