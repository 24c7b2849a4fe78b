"""Detectors with anchors: YOLOv5's architecture, of any width and depth, and a small detector.

They were written from a table of layers, from formulas, and from the papers of their parts: boxes
relative to anchors (YOLOv3, Redmon & Farhadi 2018), batch norm and no bias in every convolution
(YOLOv2, Redmon & Farhadi 2017), bottlenecks on half of the channels (CSPNet, Wang et al. 2020),
maxima over growing windows (SPP, He et al. 2015), PANet's two paths through the levels (Liu et al.
2018). Nothing here is code or weights of another implementation.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Above0, Channels, bounded
from fedjax_bn.models import cpu
from fedjax_bn.models.layers import Network, Tap, silu, variant


class Anchors(NamedTuple):
    """The anchors of a detector's levels, from the finest map of cells to the coarsest."""

    sizes: tuple[tuple[tuple[float, float], ...], ...]  # (width, height) in pixels, A for a level
    strides: tuple[int, ...]  # for each level, the side of a cell in pixels

    @property
    def per_cell(self) -> int:
        """A, the number of anchors per cell."""
        return len(self.sizes[0])


# For images of 640 pixels a side.
ANCHORS = Anchors(
    (
        ((10, 13), (16, 30), (33, 23)),
        ((30, 61), (62, 45), (59, 119)),
        ((116, 90), (156, 198), (373, 326)),
    ),
    (8, 16, 32),
)
# For images of 96 pixels a side, with objects between a tenth of the side and the whole image.
_TINY_ANCHORS = Anchors((((12, 12), (20, 20), (28, 28)), ((36, 36), (48, 48), (72, 72))), (8, 16))


@bounded
class YOLOv5(Network):
    """Halves the map five times, then runs up and down the last three levels.

    There are 57 batch norms at the default depth. FedCD's masks act on the outputs of the modules
    `tap0` to `tap2`, which the prediction layers read.

    Attributes:
      num_classes: C.
      width: a layer has ceil(nominal * width / 8) * 8 channels.
      depth: a stage has max(round(nominal * depth), 1) bottlenecks.
      anchors: A anchors on each of three levels.
    """

    num_classes: int = 80
    width: Above0 = 0.25
    depth: Above0 = 0.33
    anchors: Anchors = ANCHORS

    @property
    def taps(self) -> dict[str, int]:
        """Name -> channels of the maps that the prediction layers read."""
        return {f"tap{i}": self._channels(nominal) for i, nominal in enumerate((256, 512, 1024))}

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, ...]:
        """Images f[B, H, W, 3] -> f[B, H / stride, W / stride, A, 5 + C] for each level."""
        self.require_sides(images, self.anchors.strides[-1])
        return _read_out(self, self._maps(images))

    def _maps(self, images: jax.Array) -> tuple[jax.Array, ...]:
        """The maps f[B, H / s, W / s, F] that the prediction layers read, for s = 8, 16 and 32."""
        down = partial(self._convolve, kernel=3, strides=2)
        # The numbers of layers are those of YOLOv5's own table, by which its files name tensors.
        x = self._convolve(images, 0, 64, kernel=6, strides=2, padding=2)
        x = self._stage(down(x, 1, 128), 2, 128, 3)
        fine = self._stage(down(x, 3, 256), 4, 256, 6)
        middle = self._stage(down(fine, 5, 512), 6, 512, 9)
        x = self._stage(down(middle, 7, 1024), 8, 1024, 3)
        x = self.part(_PooledPyramid, self._channels(1024), name="layer9")(x)

        third = self._convolve(x, 10, 512)
        x = jnp.concatenate([_doubled(third), middle], -1)
        second = self._convolve(self._stage(x, 13, 512, 3, False), 14, 256)
        x = jnp.concatenate([_doubled(second), fine], -1)
        fine = self._stage(x, 17, 256, 3, False)
        x = jnp.concatenate([down(fine, 18, 256), second], -1)
        middle = self._stage(x, 20, 512, 3, False)
        x = jnp.concatenate([down(middle, 21, 512), third], -1)
        return fine, middle, self._stage(x, 23, 1024, 3, False)

    def _channels(self, nominal: int) -> int:
        return math.ceil(nominal * self.width / 8) * 8

    def _convolve(self, x: jax.Array, i: int, nominal: int, **fields: Any) -> jax.Array:
        """Applies layer number i, a convolution."""
        return self.part(_ConvNorm, self._channels(nominal), **fields, name=f"layer{i}")(x)

    def _stage(
        self, x: jax.Array, i: int, nominal: int, repeats: int, shortcut: bool = True
    ) -> jax.Array:
        """Applies layer number i, a stage of bottlenecks."""
        sizes = self._channels(nominal), max(round(repeats * self.depth), 1), shortcut
        return self.part(_CrossStage, *sizes, name=f"layer{i}")(x)


YOLOv5n = variant(YOLOv5, "YOLOv5n", "YOLOv5n: 1,872,157 parameters with 80 classes")
YOLOv5s = variant(YOLOv5, "YOLOv5s", "YOLOv5s: 7,235,389 parameters with 80 classes", width=0.5)


@bounded
class TinyDetector(Network):
    """Nine convolutions with batch norm and SiLU, and predictions at strides 8 and 16.

    Our own network, for images of about 100 pixels a side on two CPU cores. It has 382,570
    parameters with ten classes, or 98,274 with `width=8`. The coarse map is joined to the fine one
    as in feature pyramids (Lin et al. 2017). The prediction layers read `tap0` and `tap1`.

    Attributes:
      num_classes: C.
      width: channels at stride 2; two, four and eight times as many at strides 4, 8 and 16.
      anchors: A anchors on each of two levels.
    """

    num_classes: int = 10
    width: Channels = 16
    anchors: Anchors = _TINY_ANCHORS

    @property
    def taps(self) -> dict[str, int]:
        """Name -> channels of the maps that the prediction layers read."""
        return {"tap0": 4 * self.width, "tap1": 8 * self.width}

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, ...]:
        """Images f[B, H, W, 3] -> f[B, H / stride, W / stride, A, 5 + C] for both levels."""
        self.require_sides(images, self.anchors.strides[-1])
        width2, width4, width8, width16 = (self.width * times for times in (1, 2, 4, 8))
        make = partial(self.part, _ConvNorm, kernel=3)
        x = make(width2, strides=2, name="conv1")(images)
        x = make(width4, strides=2, name="conv2")(x)
        x = make(width4, name="conv3")(x)
        x = make(width8, strides=2, name="conv4")(x)
        fine = make(width8, name="conv5")(x)
        x = make(width16, strides=2, name="conv6")(fine)
        coarse = make(width16, name="conv7")(x)
        x = _doubled(make(width8, kernel=1, name="conv8")(coarse))
        fine = make(width8, name="conv9")(jnp.concatenate([x, fine], -1))
        return _read_out(self, (fine, coarse))


class _ConvNorm(Network):
    """Convolution without bias, batch norm, SiLU; by default `padding` is half of the kernel.

    Standardized kernels (`norm="none"`) have a ReLU's gain, which is 0.96 of SiLU's.
    """

    features: int
    kernel: int = 1
    strides: int = 1
    padding: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / strides, W / strides, features]."""
        padding = self.kernel // 2 if self.padding is None else self.padding
        x = self.convolve(x, self.features, self.kernel, self.strides, padding, name="conv")
        # YOLOv5's own values; PyTorch's defaults would be momentum=0.9 and epsilon=1e-5.
        return silu(self.normalize(x, "norm", momentum=0.97, epsilon=1e-3))


class _Bottleneck(Network):
    """1x1 and 3x3 convolutions that keep the channels; `shortcut` adds the input."""

    shortcut: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C]."""
        make = partial(self.part, _ConvNorm, x.shape[-1])
        y = make(kernel=3, name="cv2")(make(name="cv1")(x))
        return x + y if self.shortcut else y


class _CrossStage(Network):
    """Joins two 1x1 convolutions to half of the channels; bottlenecks follow the first one."""

    features: int
    repeats: int = 1
    shortcut: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, features]."""
        make = partial(self.part, _ConvNorm)
        through = make(self.features // 2, name="cv1")(x)
        for i in range(self.repeats):
            through = self.part(_Bottleneck, self.shortcut, name=f"bottleneck{i}")(through)
        beside = make(self.features // 2, name="cv2")(x)
        return make(self.features, name="cv3")(jnp.concatenate([through, beside], -1))


class _PooledPyramid(Network):
    """Joins a map to its maxima over 5x5, 9x9 and 13x13 pixels, between 1x1 convolutions."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, features]."""
        maps = [self.part(_ConvNorm, x.shape[-1] // 2, name="cv1")(x)]
        # Two and three 5x5 windows in a row have the maxima of 9x9 and of 13x13.
        for _ in range(3):
            maps.append(self.max_pool(maps[-1], 5, 1, 2))
        return self.part(_ConvNorm, self.features, name="cv2")(jnp.concatenate(maps, -1))


def _read_out(net: YOLOv5 | TinyDetector, maps: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Predicts by 1x1 convolutions: each level's f[B, H, W, F] -> f[B, H, W, A, 5 + C]."""
    # The map of level i passes a module `tap{i}`, on whose output masks act.
    depth, outputs = 5 + net.num_classes, []
    for i, (x, stride) in enumerate(zip(maps, net.anchors.strides, strict=True)):
        x = Tap(name=f"tap{i}")(x)
        x = net.convolve(
            x,
            net.anchors.per_cell * depth,
            1,
            use_bias=True,
            bias_init=partial(_prior, net.anchors.per_cell, stride, x.shape[-1]),
            # Never standardized, so that the biases set the predictions at the start.
            conv_general_dilated_cls=lambda: cpu.convolve,
            name=f"predict{i}",
        )
        outputs.append(x.reshape(*x.shape[:3], net.anchors.per_cell, depth))
    return tuple(outputs)


def _prior(
    anchors: int, stride: int, fan_in: int, key: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Initial biases: PyTorch's random values plus the logits of a prior (Lin et al. 2017)."""
    bound = fan_in**-0.5
    drawn = jax.random.uniform(key, shape, dtype, -bound, bound).reshape(anchors, -1)
    # A prior of 8 objects in an image of 640 pixels a side, and of 0.6 / C for each of C classes.
    drawn = drawn.at[:, 4].add(math.log(8 / (640 / stride) ** 2))
    classes = drawn.shape[1] - 5
    return drawn.at[:, 5:].add(math.log(0.6 / (classes - 0.99999))).reshape(shape)


def _doubled(x: jax.Array) -> jax.Array:
    """Repeats every pixel as a 2x2 block, f[B, H, W, C] -> f[B, 2 H, 2 W, C]."""
    batch, height, width, channels = x.shape
    shape = (batch, height, 2, width, 2, channels)
    x = jnp.broadcast_to(x[:, :, None, :, None], shape)
    return x.reshape(batch, 2 * height, 2 * width, channels)
