"""Plain networks: FedBN's MLP, TwoLayer, DigitCNN and AlexNet, and a small one of ours."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from fedjax_bn.arguments.ranges import Above0, Units, bounded
from fedjax_bn.models.layers import (
    Classifier,
    adaptive_average_pool,
    dense,
    max_pool,
    norm_of,
    require_floats,
)


def _hidden_layers(net: Classifier, x: jax.Array, norms: int = 0) -> jax.Array:
    """Dense, norm, ReLU for each width of `net.hidden`, on f[B, ...], after `norms` norms."""
    x = x.reshape(x.shape[0], -1)
    for i, width in enumerate(net.hidden, start=1):
        layer = dense(width, x.shape[-1], param_dtype=net.param_dtype, name=f"dense{i}")
        x = nn.relu(net.normalize(layer(x), f"norm{norms + i}"))
    return x


class MLP(Classifier):
    """Dense, batch norm, ReLU for each hidden layer, then the classifier.

    Li et al. 2021, section 5.3 (ABIDE, 5995 inputs, two classes). Inputs with more axes are
    flattened.

    Attributes:
      num_classes: number of logits.
      hidden: widths of the hidden layers.
      param_dtype, norm: as in `layers.Network`.
    """

    num_classes: int = 2
    hidden: Sequence[int] = (16, 16)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.hidden[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, ...] -> f[B, hidden[-1]], what the classifier sees."""
        require_floats(images)
        return _hidden_layers(self, images)


@bounded
class TwoLayer(Classifier):
    """Dense, batch norm, ReLU, then the classifier, drawn with a large variance.

    Li et al. 2021, Appendix F: 100 hidden neurons with weights and biases from N(0, alpha^2), whose
    large alpha makes the magnitudes of the neurons learn before their directions (section 4.3).

    Attributes:
      num_classes: number of logits.
      hidden: neurons of the hidden layer.
      alpha: standard deviation of the weights and biases of both layers at the start.
      param_dtype, norm: as in `layers.Network`.
    """

    num_classes: int = 2
    hidden: Units = 100
    alpha: Above0 = 10.0

    def setup(self) -> None:
        """Makes the layers."""
        draw = nn.initializers.normal(self.alpha)
        drawn = {"kernel_init": draw, "bias_init": draw, "param_dtype": self.param_dtype}
        self.dense1 = nn.Dense(self.hidden, **drawn)
        self.norm1 = norm_of(self.norm, self.param_dtype)()
        self.head = nn.Dense(self.num_classes, **drawn)

    def features(self, images: jax.Array) -> jax.Array:
        """f[B, ...] -> f[B, hidden], what the classifier sees."""
        return nn.relu(self.norm1(self.dense1(images.reshape(images.shape[0], -1))))


class SmallCNN(Classifier):
    """Three 3x3 convolutions of stride 2, each with batch norm and ReLU; mean over the map.

    Ours, from no paper: 24 thousand parameters and 0.7 million multiplications an image of 32x32,
    for runs on two CPU cores. Any size from 1x1 works.

    Attributes:
      num_classes: number of logits.
      widths: channels of the convolutions.
      param_dtype, norm: as in `layers.Network`.
    """

    num_classes: int = 10
    widths: Sequence[int] = (16, 32, 64)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.widths[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, widths[-1]], what the classifier sees."""
        x = images
        for i, width in enumerate(self.widths, start=1):
            x = self.convolve(x, width, 3, 2, 1, name=f"conv{i}")
            x = nn.relu(self.normalize(x, f"norm{i}"))
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
      param_dtype, norm: as in `layers.Network`.
    """

    num_classes: int = 10
    hidden: Sequence[int] = (2048, 512)
    width: Units = 64

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.hidden[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, hidden[-1]], what the classifier sees."""
        x = images
        for i, width in enumerate((self.width, self.width, 2 * self.width), start=1):
            if i > 1:
                x = max_pool(x, 2, 2)
            # Padding 2 on all sides, as in PyTorch; the bias is one of the published weights.
            x = self.convolve(x, width, 5, padding=2, use_bias=True, name=f"conv{i}")
            x = nn.relu(self.normalize(x, f"norm{i}"))
        return _hidden_layers(self, x, norms=3)


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
      param_dtype, norm: as in `layers.Network`.
    """

    num_classes: int = 10
    hidden: Sequence[int] = (4096, 4096)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = dense(self.num_classes, self.hidden[-1], param_dtype=self.param_dtype)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, hidden[-1]], what the classifier sees."""
        x = images
        # channels, kernel, strides, padding, and whether a pool follows
        layers = [(64, 11, 4, 2, True), (192, 5, 1, 2, True)]
        layers += [(384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True)]
        for i, (width, kernel, strides, padding, pool) in enumerate(layers, start=1):
            x = self.convolve(x, width, kernel, strides, padding, use_bias=True, name=f"conv{i}")
            x = nn.relu(self.normalize(x, f"norm{i}"))
            x = max_pool(x, 3, 2) if pool else x
        return _hidden_layers(self, adaptive_average_pool(x, 6), norms=5)
