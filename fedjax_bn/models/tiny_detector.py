"""A small detector for images of about 100 pixels a side, for runs that two CPU cores carry."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Channels, bounded
from fedjax_bn.detection.anchors import Anchors
from fedjax_bn.models.layers import Norm
from fedjax_bn.models.yolo_blocks import ConvNorm, Tap, check_sides, doubled, predict

# For images of 96 pixels a side, with objects from a tenth of the side to the whole.
ANCHORS = Anchors((((12, 12), (20, 20), (28, 28)), ((36, 36), (48, 48), (72, 72))), (8, 16))


@bounded
class TinyDetector(nn.Module):
    """Nine convolutions with batch norm and SiLU, and predictions at strides 8 and 16.

    Ours, of no paper: 382,570 parameters at ten classes, 98,274 with `width=8`. The coarse map is
    joined to the fine one as in feature pyramids (Lin et al. 2017). `tap0` and `tap1` are the maps
    that are read.

    Attributes:
      num_classes: C.
      width: channels at stride 2; two, four and eight times as many at strides 4, 8 and 16.
      anchors: of both levels.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
      param_dtype: dtype in which the variables are created.
    """

    num_classes: int = 10
    width: Channels = 16
    anchors: Anchors = ANCHORS
    norm: Norm = "batch"
    param_dtype: Any = jnp.float32

    @property
    def taps(self) -> dict[str, int]:
        """Name -> channels of the maps that the prediction layers read."""
        return {"tap0": 4 * self.width, "tap1": 8 * self.width}

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, ...]:
        """Images f[B, H, W, 3] -> twice f[B, H / stride, W / stride, A, 5 + C]."""
        check_sides(images, self.anchors.strides[-1], type(self).__name__)
        first, second, third, fourth = (self.width * times for times in (1, 2, 4, 8))
        make = partial(ConvNorm, kernel=3, norm=self.norm, param_dtype=self.param_dtype)
        x = make(first, strides=2, name="conv1")(images)
        x = make(second, strides=2, name="conv2")(x)
        x = make(second, name="conv3")(x)
        x = make(third, strides=2, name="conv4")(x)
        fine = make(third, name="conv5")(x)
        x = make(fourth, strides=2, name="conv6")(fine)
        coarse = make(fourth, name="conv7")(x)
        x = doubled(make(third, kernel=1, name="conv8")(coarse))
        fine = make(third, name="conv9")(jnp.concatenate([x, fine], -1))
        read = [Tap(name=f"tap{i}")(x) for i, x in enumerate((fine, coarse))]
        return tuple(
            predict(
                x,
                self.anchors.each,
                self.num_classes,
                self.anchors.strides[i],
                name=f"predict{i}",
                param_dtype=self.param_dtype,
            )
            for i, x in enumerate(read)
        )
