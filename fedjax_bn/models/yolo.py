"""Detectors of YOLOv5's form, of any width and depth.

Written from a table of layers and formulas, and from the papers of their parts: boxes about anchors
(YOLOv3, Redmon & Farhadi 2018), CSPNet (Wang et al. 2020), SPP (He et al. 2015), PANet's two ways
through the levels (Liu et al. 2018). No code or weights of another implementation are in it, and
none is fetched: `models.pretrained` reads a file that a user has.
"""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Above0, bounded
from fedjax_bn.detection.anchors import Anchors
from fedjax_bn.models.layers import Norm
from fedjax_bn.models.yolo_blocks import (
    ConvNorm,
    CrossStage,
    PooledPyramid,
    Tap,
    check_sides,
    doubled,
    predict,
)

# For images of 640 pixels a side.
ANCHORS = Anchors(
    (
        ((10, 13), (16, 30), (33, 23)),
        ((30, 61), (62, 45), (59, 119)),
        ((116, 90), (156, 198), (373, 326)),
    ),
    (8, 16, 32),
)


@bounded
class YOLOv5(nn.Module):
    """Five halvings of the map, then two ways through the last three levels; 57 batch norms.

    The map that a prediction layer reads is the output of a module that does nothing, `tap0` to
    `tap2`, so that FedCD's masks act there.

    Attributes:
      num_classes: C.
      width: channels are ceil(nominal * width / 8) * 8.
      depth: bottlenecks are max(round(nominal * depth), 1).
      anchors: three a level.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
      param_dtype: dtype in which the variables are created.
    """

    num_classes: int = 80
    width: Above0 = 0.25
    depth: Above0 = 0.33
    anchors: Anchors = ANCHORS
    norm: Norm = "batch"
    param_dtype: Any = jnp.float32

    @property
    def taps(self) -> dict[str, int]:
        """Name -> channels of the maps that the prediction layers read."""
        return {f"tap{i}": self._channels(nominal) for i, nominal in enumerate((256, 512, 1024))}

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, ...]:
        """Images f[B, H, W, 3] -> three times f[B, H / stride, W / stride, 3, 5 + C]."""
        check_sides(images, self.anchors.strides[-1], type(self).__name__)
        outputs = []
        for i, x in enumerate(self._maps(images)):
            x = Tap(name=f"tap{i}")(x)
            outputs.append(
                predict(
                    x,
                    self.anchors.each,
                    self.num_classes,
                    self.anchors.strides[i],
                    name=f"predict{i}",
                    param_dtype=self.param_dtype,
                )
            )
        return tuple(outputs)

    def _maps(self, images: jax.Array) -> tuple[jax.Array, ...]:
        """What the prediction layers read: f[B, H / s, W / s, F] for s of 8, 16 and 32."""
        down = partial(self._convolve, kernel=3, strides=2)
        x = self._convolve(images, 0, 64, kernel=6, strides=2, padding=2)
        x = self._stage(down(x, 1, 128), 2, 128, 3)
        fine = self._stage(down(x, 3, 256), 4, 256, 6)
        middle = self._stage(down(fine, 5, 512), 6, 512, 9)
        x = self._stage(down(middle, 7, 1024), 8, 1024, 3)
        x = PooledPyramid(self._channels(1024), self.norm, self.param_dtype, name="layer9")(x)

        third = self._convolve(x, 10, 512)
        x = jnp.concatenate([doubled(third), middle], -1)
        second = self._convolve(self._stage(x, 13, 512, 3, False), 14, 256)
        x = jnp.concatenate([doubled(second), fine], -1)
        fine = self._stage(x, 17, 256, 3, False)
        x = jnp.concatenate([down(fine, 18, 256), second], -1)
        middle = self._stage(x, 20, 512, 3, False)
        x = jnp.concatenate([down(middle, 21, 512), third], -1)
        return fine, middle, self._stage(x, 23, 1024, 3, False)

    def _channels(self, nominal: int) -> int:
        return math.ceil(nominal * self.width / 8) * 8

    def _convolve(self, x: jax.Array, i: int, nominal: int, **fields: Any) -> jax.Array:
        """Layer number i, a convolution."""
        make = partial(ConvNorm, norm=self.norm, param_dtype=self.param_dtype, name=f"layer{i}")
        return make(self._channels(nominal), **fields)(x)

    def _stage(
        self, x: jax.Array, i: int, nominal: int, repeats: int, shortcut: bool = True
    ) -> jax.Array:
        """Layer number i, bottlenecks."""
        repeats = max(round(repeats * self.depth), 1)
        make = partial(CrossStage, norm=self.norm, param_dtype=self.param_dtype, name=f"layer{i}")
        return make(self._channels(nominal), repeats, shortcut)(x)


def YOLOv5n(num_classes: int = 80, **fields: Any) -> YOLOv5:
    """YOLOv5n: 1,872,157 parameters at 80 classes; `fields` of `YOLOv5`."""
    return YOLOv5(**{"num_classes": num_classes, "width": 0.25, "depth": 0.33} | fields)


def YOLOv5s(num_classes: int = 80, **fields: Any) -> YOLOv5:
    """YOLOv5s: 7,235,389 parameters at 80 classes; `fields` of `YOLOv5`."""
    return YOLOv5(**{"num_classes": num_classes, "width": 0.5, "depth": 0.33} | fields)
