"""The papers' networks for classification, and small networks of our own.

MLP, TwoLayer, DigitCNN and AlexNet are FedBN's. Residual networks (He et al. 2016) and densely
connected ones (Huang et al. 2017) follow torchvision, where the 3x3 convolution of a bottleneck has
the stride. All also have the attributes `num_classes`, and `param_dtype` and `norm` of
`layers.Network`.
"""

import math
from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Above0, Units, bounded
from fedjax_bn.engine import packed_columns
from fedjax_bn.engine.backend import computed_once
from fedjax_bn.models.layers import (
    Classifier,
    Network,
    fan_in_uniform,
    he_fan_in,
    he_fan_out,
    relu,
    require_floats,
    variant,
)


def _hidden_layers(net: Classifier, x: jax.Array, norms: int = 0) -> jax.Array:
    """Dense, norm, ReLU for each width in `net.hidden`; the first norm has number `norms` + 1."""
    x = x.reshape(x.shape[0], -1)
    for i, width in enumerate(net.hidden, start=1):
        layer = net.dense(width, x.shape[-1], f"dense{i}")
        x = relu(net.normalize(layer(x), f"norm{norms + i}"))
    return x


class MLP(Classifier):
    """Dense, batch norm and ReLU for each hidden layer of a flat input, then the classifier.

    Li et al. 2021, section 5.2 (ABIDE, 5995 inputs, two classes).

    Attributes:
      hidden: widths of the hidden layers.
    """

    num_classes: int = 2
    hidden: Sequence[int] = (16, 16)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = self.dense(self.num_classes, self.hidden[-1])

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, ...] -> f[B, hidden[-1]], the classifier's inputs."""
        require_floats(images)
        return _hidden_layers(self, images)


@bounded
class TwoLayer(Classifier):
    """Dense, batch norm and ReLU, then the classifier; initialized with a large variance.

    Li et al. 2021, Appendix F: 100 hidden neurons with weights and biases from N(0, alpha^2). With
    a large alpha the magnitudes of the neurons are learned before their directions (section 4.3).

    Attributes:
      hidden: number of neurons in the hidden layer.
      alpha: standard deviation of the initial weights and biases of both layers.
    """

    num_classes: int = 2
    hidden: Units = 100
    alpha: Above0 = 10.0

    def setup(self) -> None:
        """Makes the dense layers."""
        draw = nn.initializers.normal(self.alpha)
        drawn = {"kernel_init": draw, "bias_init": draw, "param_dtype": self.param_dtype}
        self.dense1 = nn.Dense(self.hidden, **drawn)
        self.head = nn.Dense(self.num_classes, **drawn)

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, ...] -> f[B, hidden], the classifier's inputs."""
        x = self.dense1(images.reshape(images.shape[0], -1))
        return relu(self.normalize(x, "norm1"))


class SmallCNN(Classifier):
    """Three 3x3 convolutions of stride 2, each with batch norm and ReLU, then a mean over the map.

    Our own network, for runs on two CPU cores: 24 thousand parameters, and 0.7 million
    multiplications per image of 32x32.

    Attributes:
      widths: channels of the convolutions.
    """

    num_classes: int = 10
    widths: Sequence[int] = (16, 32, 64)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = self.dense(self.num_classes, self.widths[-1])

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, widths[-1]], the classifier's inputs."""
        x = images
        for i, width in enumerate(self.widths, start=1):
            x = self.convolve(x, width, 3, 2, 1, name=f"conv{i}")
            x = relu(self.normalize(x, f"norm{i}"))
        return x.mean((1, 2))


@bounded
class DigitCNN(Classifier):
    """Three 5x5 convolutions and three dense layers, with batch norm after all but the last.

    FedBN's network for digits of 28x28 (Li et al. 2021, Table 3); the smallest possible size is
    4x4. Differs from the paper: Table 3 prints layer 3 twice, but the authors' code has it once.

    Attributes:
      hidden: widths of the two hidden dense layers.
      width: channels of the first two convolutions; the third has twice as many.
    """

    num_classes: int = 10
    hidden: Sequence[int] = (2048, 512)
    width: Units = 64

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = self.dense(self.num_classes, self.hidden[-1])

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, hidden[-1]], the classifier's inputs."""
        x = images
        for i, width in enumerate((self.width, self.width, 2 * self.width), start=1):
            # Padding 2 on all sides, as in PyTorch; the published weights include the bias.
            x = self.convolve(x, width, 5, padding=2, use_bias=True, name=f"conv{i}")
            if i < 3:
                x = self.normalize_and_pool(x, f"norm{i}", 2, 2)
            else:
                x = relu(self.normalize(x, f"norm{i}"))
        return _hidden_layers(self, x, norms=3)


SmallDigitCNN = variant(
    DigitCNN,
    "SmallDigitCNN",
    "DigitCNN with hidden layers of 256 and 128: 2.0 instead of 14.2 million parameters",
    hidden=(256, 128),
)


class AlexNet(Classifier):
    """Five convolutions and three dense layers, batch norm after all but the last; no dropout.

    FedBN's network for Office-Caltech10 and DomainNet, with images of 256x256 (Li et al. 2021,
    appendix D.3, Table 9); the smallest possible size is 63x63.

    Attributes:
      hidden: widths of the two hidden dense layers.
    """

    num_classes: int = 10
    hidden: Sequence[int] = (4096, 4096)

    def setup(self) -> None:
        """Makes the classifier."""
        self.head = self.dense(self.num_classes, self.hidden[-1])

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, hidden[-1]], the classifier's inputs."""
        x = images
        # channels, kernel, strides, padding, and whether a pool follows
        layers = [(64, 11, 4, 2, True), (192, 5, 1, 2, True)]
        layers += [(384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True)]
        for i, (width, kernel, strides, padding, pool) in enumerate(layers, start=1):
            x = self.convolve(x, width, kernel, strides, padding, use_bias=True, name=f"conv{i}")
            if pool:
                x = self.normalize_and_pool(x, f"norm{i}", 3, 2)
            else:
                x = relu(self.normalize(x, f"norm{i}"))
        return _hidden_layers(self, _adaptive_average_pool(x, 6), norms=5)


class _ResidualBlock(Network):
    """ReLU of a shortcut plus a branch of 3x3, 3x3, or in a bottleneck 1x1, 3x3, 1x1."""

    width: int
    strides: int = 1
    bottleneck: bool = False
    keras: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / strides, W / strides, width or 4 width]."""
        # (channels, kernel, strides) of each convolution in the branch.
        branch = [(self.width, 3, self.strides), (self.width, 3, 1)]
        if self.bottleneck:
            stride1, stride2 = (self.strides, 1) if self.keras else (1, self.strides)
            branch = [(self.width, 1, stride1), (self.width, 3, stride2), (4 * self.width, 1, 1)]
        out, channels = branch[-1][0], x.shape[-1]
        packed = read = 1
        if not self.bottleneck:
            # On TPU columns of narrow maps are packed; a stride can only make fewer of them.
            height, width = (-(-side // self.strides) for side in x.shape[1:3])
            packed = packed_columns.fitting((x.shape[0], height, width, out))
            read = math.gcd(packed_columns.fitting(x.shape), self.strides * packed)
        options = {"epsilon": 1e-3} if self.keras else {}
        convolve = partial(self.convolve, kernel_init=he_fan_out)
        # Packed once for both readers, so that XLA adds their gradients packed.
        x = shortcut = packed_columns.pack(x, read)
        # Where the branch changes the shape, a 1x1 convolution gives the shortcut the same shape.
        if self.strides != 1 or channels != out:
            layout = (read, packed)
            shortcut = convolve(x, out, 1, self.strides, name="shortcut_conv", columns=layout)
            shortcut = self.normalize(shortcut, "shortcut_norm", packed, **options)
        for i, (width, kernel, strides) in enumerate(branch, start=1):
            form, layout = (width, kernel, strides, kernel // 2), (read, packed)
            x = convolve(x, *form, name=f"conv{i}", columns=layout)
            x, read = self.normalize(x, f"norm{i}", packed, **options), packed
            x = relu(x if i < len(branch) else x + shortcut)
        x = packed_columns.unpack(x, packed)
        # Otherwise XLA:CPU would recompute the sums of all earlier blocks in every later block.
        return computed_once(x)


@bounded
class ResNet(Classifier):
    """Stem, stages of residual blocks that halve the map and double the channels, mean, classifier.

    At every image size the stem is ImageNet's: a 7x7 convolution and max-pooling, both of stride 2.

    Attributes:
      stage_sizes: number of blocks in each stage; the first stage does not halve the map.
      bottleneck: whether the blocks are bottlenecks.
      width: channels of the stem and inside the blocks of the first stage.
      keras: whether it is in the form of Keras: a bottleneck has its stride in the first 1x1
        convolution, as in He et al. 2016, and batch norms have an epsilon of 1e-3.
      after: a block, such as layer4_1, whose outputs it reads instead of images, so that what is
        frozen up to there is computed once. By default none.
    """

    stage_sizes: Sequence[int]
    bottleneck: bool = False
    num_classes: int = 10
    width: Units = 64
    keras: bool = False
    after: str = ""

    def setup(self) -> None:
        """Makes the classifier."""
        # The channels of the last stage: `setup` sees no map to read them from.
        pooled = self.width * 2 ** (len(self.stage_sizes) - 1) * (4 if self.bottleneck else 1)
        self.head = self.dense(self.num_classes, pooled)

    @nn.compact
    def maps(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / 32, W / 32, F] with four stages, the last block's output."""
        options = {"epsilon": 1e-3} if self.keras else {}
        x = images
        if not self.after:
            x = self.convolve(x, self.width, 7, 2, 3, kernel_init=he_fan_out, name="conv1")
            x = self.normalize_and_pool(x, "norm1", 3, 2, 1, **options)
        blocks = [(stage, n) for stage, size in enumerate(self.stage_sizes) for n in range(size)]
        names = [f"layer{stage + 1}_{n}" for stage, n in blocks]
        if self.after and self.after not in names:
            raise ValueError(f"after={self.after!r} must be a block: {', '.join(names)}")
        start = names.index(self.after) + 1 if self.after else 0
        for (stage, n), name in zip(blocks[start:], names[start:], strict=True):
            strides = 2 if stage > 0 and n == 0 else 1
            form = self.width * 2**stage, strides, self.bottleneck, self.keras
            x = self.part(_ResidualBlock, *form, name=name)(x)
        return x

    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, F], the last map's mean over its pixels."""
        return self.maps(images).mean((1, 2))


ResNet10 = variant(
    ResNet,
    "ResNet10",
    "ResNet-10, for small experiments: 12 batch norms, 512 features",
    stage_sizes=(1, 1, 1, 1),
)
ResNet18 = variant(
    ResNet,
    "ResNet18",
    "ResNet-18: 20 batch norms, 3 of them in shortcuts; 512 features",
    stage_sizes=(2, 2, 2, 2),
)
ResNet50 = variant(
    ResNet,
    "ResNet50",
    "ResNet-50: bottlenecks, 53 batch norms, 2048 features",
    stage_sizes=(3, 4, 6, 3),
    bottleneck=True,
)


class _DenseLayer(Network):
    """Appends `growth` channels: norm, ReLU, 1x1 to 4 `growth` channels, norm, ReLU, 3x3."""

    growth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C + growth]."""
        convolve = partial(self.convolve, kernel_init=he_fan_in)
        branch = relu(self.normalize(x, "norm1"))
        branch = convolve(branch, 4 * self.growth, 1, name="conv1")
        branch = relu(self.normalize(branch, "norm2"))
        branch = convolve(branch, self.growth, 3, padding=1, name="conv2")
        return jnp.concatenate([x, branch], axis=-1)


class _Transition(Network):
    """Halves the channels and the map: norm, ReLU, 1x1, 2x2 mean."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H // 2, W // 2, C // 2]."""
        half = x.shape[-1] // 2
        x = relu(self.normalize(x, "norm"))
        return self.average_pool(self.convolve(x, half, 1, kernel_init=he_fan_in, name="conv"), 2)


@bounded
class DenseNet(Classifier):
    """Stem, dense blocks with transitions between them, norm, ReLU, mean, classifier.

    Attributes:
      block_sizes: number of dense layers in each block.
      growth: channels that each dense layer appends.
      width: channels of the stem.
    """

    block_sizes: Sequence[int]
    num_classes: int = 10
    growth: Units = 32
    width: Units = 64

    def setup(self) -> None:
        """Makes the classifier."""
        # The bias starts at 0, as in torchvision.
        self.head = nn.Dense(
            self.num_classes, kernel_init=fan_in_uniform, param_dtype=self.param_dtype
        )

    @nn.compact
    def features(self, images: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, F], the last map's mean over its pixels."""
        x = self.convolve(images, self.width, 7, 2, 3, kernel_init=he_fan_in, name="stem_conv")
        x = self.normalize_and_pool(x, "stem_norm", 3, 2, 1)
        for block, size in enumerate(self.block_sizes, start=1):
            if block > 1:
                x = self.part(_Transition, name=f"transition{block - 1}")(x)
            for layer in range(1, size + 1):
                x = self.part(_DenseLayer, self.growth, name=f"block{block}_layer{layer}")(x)
        return relu(self.normalize(x, "final_norm")).mean((1, 2))


DenseNet121 = variant(
    DenseNet,
    "DenseNet121",
    "DenseNet-121: 121 batch norms, 1024 features",
    block_sizes=(6, 12, 24, 16),
)


def _adaptive_average_pool(x: jax.Array, size: int) -> jax.Array:
    """Pools like PyTorch's AdaptiveAvgPool2d: f[B, H, W, C] -> f[B, size, size, C], any H, W >= 1.

    Output i is the mean over rows floor(i H / size) to ceil((i + 1) H / size) - 1, which may
    overlap, and likewise for columns.
    """
    for axis in (1, 2):
        n = x.shape[axis]
        bins = [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]
        means = [jax.lax.slice_in_dim(x, *ends, axis=axis).mean(axis) for ends in bins]
        x = jnp.stack(means, axis)
    return x
