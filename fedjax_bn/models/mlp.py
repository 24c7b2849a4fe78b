"""FedBN's networks of dense layers: for vectors such as ABIDE's, and for its synthetic data."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Above0, Units, bounded
from fedjax_bn.models.layers import Classifier, Norm, dense, norm_of, require_floats


class MLP(Classifier):
    """Dense, batch norm, ReLU for each hidden layer, then the classifier.

    Li et al. 2021, section 5.3 (ABIDE, 5995 inputs, two classes). Inputs with more axes are
    flattened.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the hidden layers.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
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


@bounded
class TwoLayer(Classifier):
    """Dense, batch norm, ReLU, then the classifier, drawn with a large variance.

    Li et al. 2021, Appendix F: 100 hidden neurons with weights and biases from N(0, alpha^2), whose
    large alpha makes the magnitudes of the neurons learn before their directions (section 4.3).

    Attributes:
      num_classes: number of logits.
      hidden: neurons of the hidden layer.
      alpha: standard deviation of the weights and biases of both layers at the start.
      param_dtype: dtype in which the variables are created.
      norm: which norm, see `layers.norm_of`.
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
