"""The blocks of YOLOv5: convolutions with batch norm, cross-stage bottlenecks, pooled pyramids.

Papers: batch norm after every convolution and no bias (YOLOv2, Redmon & Farhadi 2017), bottlenecks
between two halves of the channels (CSPNet, Wang et al. 2020), maxima over growing windows (SPP, He
et al. 2015). Names of layers lead to those of users' weights, see `models.torch_weights`.
"""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.models import cpu
from fedjax_bn.models.layers import Norm, conv_of, fan_in_uniform, max_pool, norm_of


class ConvNorm(nn.Module):
    """A convolution without bias, batch norm, SiLU.

    Attributes:
      features: channels out.
      kernel: side of the kernel; the padding keeps the map where `strides` is 1.
      strides: in both directions.
      padding: zeros on each side; None for half of the kernel.
      norm: what stands in the place of batch norm, see `layers.norm_of`; standardized kernels have
        the gain of a ReLU, 0.96 of SiLU's.
      param_dtype: dtype in which the variables are created.
    """

    features: int
    kernel: int = 1
    strides: int = 1
    padding: int | None = None
    norm: Norm = "batch"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / strides, W / strides, features]."""
        padding = self.kernel // 2 if self.padding is None else self.padding
        convolve = conv_of(self.norm, param_dtype=self.param_dtype)
        x = convolve(x, self.features, self.kernel, self.strides, padding, name="conv")
        options = {"momentum": 0.97, "epsilon": 1e-3} if self.norm == "batch" else {}
        return nn.silu(norm_of(self.norm, self.param_dtype)(name="norm", **options)(x))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution of as many channels; with `shortcut` the input is added."""

    shortcut: bool = True
    norm: Norm = "batch"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C]."""
        make = partial(ConvNorm, x.shape[-1], norm=self.norm, param_dtype=self.param_dtype)
        y = make(kernel=3, name="cv2")(make(name="cv1")(x))
        return x + y if self.shortcut else y


class CrossStage(nn.Module):
    """Half of the channels through bottlenecks, the other half beside them, and both together.

    Attributes:
      features: channels out.
      repeats: number of bottlenecks.
      shortcut: whether they add their input.
      norm: what stands in the places of batch norms, see `layers.norm_of`.
      param_dtype: dtype in which the variables are created.
    """

    features: int
    repeats: int = 1
    shortcut: bool = True
    norm: Norm = "batch"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, features]."""
        make = partial(ConvNorm, norm=self.norm, param_dtype=self.param_dtype)
        through = make(self.features // 2, name="cv1")(x)
        for i in range(self.repeats):
            block = Bottleneck(self.shortcut, self.norm, self.param_dtype, name=f"bottleneck{i}")
            through = block(through)
        beside = make(self.features // 2, name="cv2")(x)
        return make(self.features, name="cv3")(jnp.concatenate([through, beside], -1))


class PooledPyramid(nn.Module):
    """Maxima over 5x5, 9x9 and 13x13 pixels beside the map itself, between 1x1 convolutions."""

    features: int
    norm: Norm = "batch"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, features]."""
        make = partial(ConvNorm, norm=self.norm, param_dtype=self.param_dtype)
        maps = [make(x.shape[-1] // 2, name="cv1")(x)]
        for _ in range(3):  # of windows of 5x5 one after the other
            maps.append(max_pool(maps[-1], 5, 1, 2))
        return make(self.features, name="cv2")(jnp.concatenate(maps, -1))


class Tap(nn.Module):
    """Nothing but a name: the map that a prediction layer reads, for FedCD's masks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """X."""
        return x


def predict(
    x: jax.Array, anchors: int, num_classes: int, stride: int, *, name: str, param_dtype: Any
) -> jax.Array:
    """A 1x1 convolution with bias to 4 + 1 + C numbers for each of A anchors.

    Its biases start such that 8 objects are expected in an image of 640 pixels a side, and each of
    C classes with a probability of 0.6 / C (as Lin et al. 2017 start from a prior).

    Args:
      x: f[B, H, W, F].
      anchors: A.
      num_classes: C.
      stride: pixels a cell.
      name: the layer's name in its module.
      param_dtype: dtype in which the variables are created.

    Returns:
      f[B, H, W, A, 5 + C].
    """
    depth, bound = 5 + num_classes, x.shape[-1] ** -0.5

    def start(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        drawn = jax.random.uniform(key, shape, dtype, -bound, bound).reshape(anchors, depth)
        drawn = drawn.at[:, 4].add(math.log(8 / (640 / stride) ** 2))
        return drawn.at[:, 5:].add(math.log(0.6 / (num_classes - 0.99999))).reshape(shape)

    layer = nn.Conv(
        anchors * depth,
        (1, 1),
        kernel_init=fan_in_uniform,
        bias_init=start,
        param_dtype=param_dtype,
        conv_general_dilated_cls=lambda: cpu.convolve,
        name=name,
    )
    return layer(x).reshape(*x.shape[:3], anchors, depth)


def doubled(x: jax.Array) -> jax.Array:
    """Every pixel four times, f[B, H, W, C] -> f[B, 2 H, 2 W, C]."""
    batch, height, width, channels = x.shape
    shape = (batch, height, 2, width, 2, channels)
    x = jnp.broadcast_to(x[:, :, None, :, None], shape)
    return x.reshape(batch, 2 * height, 2 * width, channels)


def check_sides(images: jax.Array, stride: int, name: str) -> None:
    """Raises ValueError unless images f[B, H, W, C] have sides that the coarsest stride divides."""
    if images.ndim != 4 or any(side < stride or side % stride for side in images.shape[1:3]):
        raise ValueError(
            f"{name} reads images f[B, H, W, C] whose sides {stride} divides, not samples of shape "
            f"{images.shape[1:]}: choose another image size"
        )
