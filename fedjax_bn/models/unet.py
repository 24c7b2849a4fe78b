"""A U-Net for segmentation (Ronneberger et al. 2015), in the form of HarmoFL's and FedFA's code."""

from functools import partial
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Channels, between, bounded
from fedjax_bn.engine.backend import computed_once
from fedjax_bn.models import cpu
from fedjax_bn.models.layers import Network, Tap, relu


@bounded
class UNet(Network):
    """Halves the map `levels` times and doubles it again, joining the maps of equal size.

    A block is two 3x3 convolutions without bias, each with a norm and a ReLU. Level i has
    width * 2^i channels. In HarmoFL's code width is 32 and its batch norms have neither affine
    parameters nor running statistics, while these are usual ones.

    Attributes:
      num_classes: number of logits of a pixel: the classes with the background, or 1.
      width: channels of the first level.
      levels: number of times that the map is halved; sides are multiples of 2^levels.
    """

    num_classes: int = 2
    width: Channels = 32
    levels: Annotated[int, between(1, 8)] = 4

    @property
    def taps(self) -> dict[str, int]:
        """Name -> channels of the map that the last layer reads, on which FedCD's mask acts."""
        return {"tap0": self.width}

    @property
    def classifier_path(self) -> str:
        """The last layer, which `models.classifier` finds by this name: it is not dense."""
        return "head"

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images f[B, H, W, C] to logits f[B, H, W, num_classes]."""
        self.require_sides(images, 2**self.levels)
        x, beside = images, []
        for i in range(self.levels):
            x = self.part(_Block, self.width * 2**i, name=f"encoder{i + 1}")(x)
            # Otherwise each pass of a batch norm's gradient adds up the gradients of both readers.
            x = computed_once(x)
            # Kept before pooling, for the decoder's block of the same size.
            beside.append(x)
            x = self.max_pool(x, 2, 2)
        x = self.part(_Block, self.width * 2**self.levels, name="bottleneck")(x)
        for i in reversed(range(self.levels)):
            x = self.part(_Doubled, self.width * 2**i, name=f"up{i + 1}")(x)
            x = jnp.concatenate([x, beside[i]], -1)
            x = self.part(_Block, self.width * 2**i, name=f"decoder{i + 1}")(x)
        x = Tap(name="tap0")(x)
        return self.convolve(
            x,
            self.num_classes,
            1,
            name="head",
            use_bias=True,
            # Never standardized, which is for the layers before a ReLU.
            conv_general_dilated_cls=lambda: cpu.convolve,
        )


class _Block(Network):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, features]."""
        options: dict[str, Any] = {}
        if self.norm != "none":  # its kernels would not be standardized
            options["conv_general_dilated_cls"] = lambda: partial(cpu.convolve, few=True)
        for i in (1, 2):
            x = self.convolve(x, self.features, 3, padding=1, name=f"conv{i}", **options)
            x = relu(self.normalize(x, f"norm{i}"))
        return x


class _Doubled(Network):
    """A transposed convolution of 2x2 pixels with stride 2, whose windows do not overlap."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, 2 H, 2 W, features]."""
        shape = (2, 2, x.shape[-1], self.features)
        # PyTorch's fan-in of a transposed convolution counts its outputs.
        bound = (4 * self.features) ** -0.5

        def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        kernel = self.param("kernel", draw, shape, self.param_dtype)
        bias = self.param("bias", draw, shape[-1:], self.param_dtype)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        # A plain matrix product and one transpose: XLA:CPU takes twice as long for the einsum.
        y = x.reshape(-1, x.shape[-1]) @ kernel.transpose(2, 0, 1, 3).reshape(x.shape[-1], -1)
        y = y.reshape(*x.shape[:3], 2, 2, self.features).swapaxes(2, 3)
        return y.reshape(len(x), 2 * x.shape[1], 2 * x.shape[2], self.features) + bias
