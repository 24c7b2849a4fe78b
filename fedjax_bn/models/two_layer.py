"""The network of FedBN's synthetic experiment: one hidden layer, drawn with a large variance."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Above0, Units, bounded
from fedjax_bn.models.layers import Norm, norm_of


@bounded
class TwoLayer(nn.Module):
    """Dense, batch norm, ReLU, then the classifier.

    Li et al. 2021, Appendix F: 100 hidden neurons with weights and biases from N(0, alpha^2), whose
    large alpha makes the magnitudes of the neurons learn before their directions (section 4.3).

    Attributes:
      num_classes: number of logits.
      hidden: neurons of the hidden layer.
      alpha: standard deviation of the weights and biases of both layers at the start.
      param_dtype: dtype in which the variables are created.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
    """

    num_classes: int = 2
    hidden: Units = 100
    alpha: Above0 = 10.0
    param_dtype: Any = jnp.float32
    norm: Norm = "batch"

    def setup(self) -> None:
        """Makes the layers."""
        draw = nn.initializers.normal(self.alpha)
        dense = {"kernel_init": draw, "bias_init": draw, "param_dtype": self.param_dtype}
        self.dense1 = nn.Dense(self.hidden, **dense)
        self.norm1 = norm_of(self.norm, self.param_dtype)()
        self.head = nn.Dense(self.num_classes, **dense)

    def features(self, images: jax.Array) -> jax.Array:
        """f[B, ...] -> f[B, hidden], what the classifier sees."""
        return nn.relu(self.norm1(self.dense1(images.reshape(images.shape[0], -1))))

    def classify(self, features: jax.Array) -> jax.Array:
        """f[B, hidden] -> logits f[B, num_classes]."""
        return self.head(features)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Inputs f[B, ...] -> logits f[B, num_classes]."""
        return self.classify(self.features(images))
