"""The layers and base classes that the networks share.

Padding is explicit, because "SAME" with strides pads unlike PyTorch. Biases are drawn by fan-in, as
PyTorch draws them. A map that is too small raises an error, instead of becoming empty and then NaN.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once, on_cpu, on_gpu
from fedjax_bn.engine.packed_columns import convolve_packed, pack, unpack
from fedjax_bn.models import cpu
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.normalization.calls import outputs_are_read

_Initializer = jax.nn.initializers.Initializer
_Norm = Literal["batch", "group", "none"]
_Network = TypeVar("_Network", bound=nn.Module)

# PyTorch's default, kaiming_uniform(a=sqrt(5)): U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
fan_in_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
# He et al. 2015, for networks of ReLUs: ResNet scales by a layer's fan-out, DenseNet by its fan-in.
he_fan_out = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
he_fan_in = nn.initializers.variance_scaling(2.0, "fan_in", "normal")


def _fan_in_uniform_bias(fan_in: int) -> Callable[..., jax.Array]:
    """PyTorch's default bias, U(-1/sqrt(fan_in), 1/sqrt(fan_in)), with `fan_in` inputs per unit."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


class Network(nn.Module, kw_only=True):
    """A network, or a part of one, whose layers have the same dtype and norm.

    Attributes:
      param_dtype: dtype in which the variables are created.
      norm: "batch"; "group", group norm (Wu & He 2018), which has no running statistics; "none", no
        norm but standardized kernels (Zhuang & Lyu, ICLR 2024, FedWon).
    """

    param_dtype: Any = jnp.float32
    norm: _Norm = "batch"

    # `nn.nowrap`: linen gives each method a name scope of its own, which these helpers do not need.

    @nn.nowrap
    def convolve(
        self,
        x: jax.Array,
        features: int,
        kernel: int,
        strides: int = 1,
        padding: int = 0,
        *,
        name: str,
        kernel_init: _Initializer = fan_in_uniform,
        use_bias: bool = False,
        columns: tuple[int, int] = (1, 1),
        **options: Any,
    ) -> jax.Array:
        """Applies a square convolution; its kernel is standardized if `norm` is "none".

        Args:
          x: f[B, H, W, C].
          features: number of output channels F.
          kernel, strides, padding: the same in both directions, in pixels.
          name, kernel_init, use_bias, **options: as in `nn.Conv`; by default `cpu.convolve`
            convolves, and a bias is drawn as in PyTorch.
          columns: the numbers of columns packed in x and the result (`engine.packed_columns`).

        Returns:
          f[B, (H + 2 padding - kernel) // strides + 1, likewise W, F]; a padded map that is smaller
          than the kernel raises ValueError.
        """
        x = unpack(x, columns[0])
        _check_window(x, kernel, padding, name)
        convolve = _standardized_convolve if self.norm == "none" else _convolve
        conv_options = {
            "bias_init": _fan_in_uniform_bias(kernel * kernel * x.shape[-1]),
            "conv_general_dilated_cls": lambda: partial(convolve, columns=columns),
        }
        layer = nn.Conv(
            features,
            (kernel, kernel),
            (strides, strides),
            ((padding, padding), (padding, padding)),
            use_bias=use_bias,
            kernel_init=kernel_init,
            param_dtype=self.param_dtype,
            name=name,
            **conv_options | options,
        )
        return pack(layer(x), columns[1])

    @nn.nowrap
    def normalize(
        self, x: jax.Array, name: str | None, columns: int = 1, **options: Any
    ) -> jax.Array:
        """Applies the network's norm to a map of packed columns; only `BatchNorm` takes options."""
        if self.norm not in get_args(_Norm):
            raise ValueError(f"norm={self.norm!r} must be one of {', '.join(get_args(_Norm))}")
        if self.norm == "none":
            return x
        x = unpack(x, columns)
        if self.norm == "batch":
            options |= {"param_dtype": self.param_dtype, "name": name, "columns": columns}
            y = BatchNorm(**options)(x)
        else:
            y = _GroupNorm(self.param_dtype, name=name)(x)
        return pack(y, columns)

    @nn.nowrap
    def normalize_and_pool(
        self, x: jax.Array, name: str, window: int, strides: int, padding: int = 0, **options: Any
    ) -> jax.Array:
        """Applies the network's norm, a ReLU and `max_pool`, f[B, H, W, C] -> f[B, H', W', C].

        On accelerators the maximum comes before the normalization, which is monotone, so that less
        is normalized. The values are the same, and so is the gradient, but for another subgradient
        by a scale of 0. Where our handlers or flax's `capture_intermediates` read the norm's
        output, it stays that before the pooling. Only `BatchNorm` takes options.
        """
        pool = partial(self.max_pool, window=window, strides=strides, padding=padding)
        read = outputs_are_read() or self.is_mutable_collection("intermediates")
        # A subclass with its own norm may not be monotone.
        usual = self.norm == "batch" and type(self).normalize is Network.normalize
        if on_cpu() or read or not usual:
            return pool(relu(self.normalize(x, name, **options)))
        layer = BatchNorm(param_dtype=self.param_dtype, name=name, **options)
        return relu(layer(x, pool=pool))

    @nn.nowrap
    def dense(self, features: int, fan_in: int, name: str | None = None) -> nn.Dense:
        """Makes a dense layer `fan_in` -> `features`, initialized like PyTorch's `Linear`."""
        return nn.Dense(
            features,
            kernel_init=fan_in_uniform,
            bias_init=_fan_in_uniform_bias(fan_in),
            param_dtype=self.param_dtype,
            name=name,
        )

    @nn.nowrap
    def max_pool(self, x: jax.Array, window: int, strides: int, padding: int = 0) -> jax.Array:
        """Returns the maximum over square windows of f[B, H, W, C]; padding counts as -infinity."""
        _check_window(x, window, padding, "max-pooling")
        sides = ((padding, padding), (padding, padding))
        return cpu.max_pool(x, (window, window), (strides, strides), sides)

    @nn.nowrap
    def average_pool(self, x: jax.Array, window: int) -> jax.Array:
        """Returns means of disjoint windows, f[B, H, W, C] -> f[B, H // window, W // window, C]."""
        _check_window(x, window, 0, "average-pooling")
        height, width = x.shape[1] // window, x.shape[2] // window
        # Incomplete windows are dropped, as in PyTorch.
        x = x[:, : height * window, : width * window]
        return x.reshape(x.shape[0], height, window, width, window, -1).mean((2, 4))

    @nn.nowrap
    def require_sides(self, images: jax.Array, stride: int) -> None:
        """Raises ValueError unless the network's coarsest stride divides the sides of images."""
        require_floats(images)
        if images.ndim != 4 or any(n == 0 or n % stride for n in images.shape[1:3]):
            reads = f"{type(self).__name__} reads images f[H, W, C] whose sides {stride} divides"
            raise ValueError(f"{reads}, not {images.shape[1:]}: choose another image size")

    @nn.nowrap
    def part(self, kind: Callable[..., nn.Module], *args: Any, **fields: Any) -> nn.Module:
        """Makes a part of the network, with the same dtype and norm."""
        return kind(*args, **fields, param_dtype=self.param_dtype, norm=self.norm)


class Classifier(Network, kw_only=True):
    """A network whose outputs are `classify(features(images))`.

    A subclass creates the layer `head` in `setup` and defines `features`.
    """

    def classify(self, features: jax.Array) -> jax.Array:
        """Maps f[B, F] to logits f[B, num_classes]."""
        return self.head(features)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images or other inputs f[B, ...] to logits f[B, num_classes]."""
        return self.classify(self.features(images))


def _convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    *,
    columns: tuple[int, int] = (1, 1),
    **options: Any,
) -> jax.Array:
    """Convolves x f[B, H, W, C] with the kernel f[h, w, C, F], by packed columns if there are."""
    if columns == (1, 1):
        return cpu.convolve(x, kernel, strides, padding, **options)
    y = convolve_packed(pack(x, columns[0]), kernel, strides, padding, *columns)
    return unpack(y, columns[1])


def _standardized_convolve(x: jax.Array, kernel: jax.Array, *args: Any, **options: Any) -> Any:
    return _convolve(x, _standardized(kernel), *args, **options)


def _standardized(kernel: jax.Array) -> jax.Array:
    """g (W - mean) / (std sqrt(N)) of W f[..., F], over the N values of each output channel."""
    # Scaled weight standardization (Brock et al. 2021), with a ReLU's gain g = sqrt(2 / (1 -
    # 1/pi)).
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - kernel.mean(axes)
    squares = jnp.square(centred).sum(axes)  # N std^2
    gain = (2 / (1 - 1 / jnp.pi)) ** 0.5
    # A constant channel becomes 0 instead of NaN.
    return centred * (gain * jax.lax.rsqrt(jnp.maximum(squares, 1e-8)))


class Tap(nn.Module):
    """Returns its input; as a named module it is a place where FedCD's masks can act."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H, W, C]."""
        return x


class _GroupNorm(nn.Module):
    """Group norm of up to 32 groups of at least four channels, or of one if 4 is no divisor."""

    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, ..., C] -> f[B, ..., C]."""
        channels = x.shape[-1]
        groups = math.gcd(32, channels // 4) if channels % 4 == 0 else 1
        # PyTorch's epsilon. Flax's fast variance, E[x^2] - E[x]^2, loses digits.
        layer = nn.GroupNorm(
            groups,
            param_dtype=self.param_dtype,
            epsilon=1e-5,
            use_fast_variance=False,
            name="group",
        )
        with jax.numpy_dtype_promotion("standard"):  # flax's layer mixes float64 and float32
            return layer(x)


def relu(x: jax.Array) -> jax.Array:
    """Returns max(x, 0); its derivative at 0 is 0."""
    return _relu_by_output(x) if on_gpu() else nn.relu(x)


@jax.custom_jvp
@jax.named_scope("relu")
def _relu_by_output(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


@_relu_by_output.defjvp
def _relu_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # XLA takes y > 0 for x > 0, and would compute x again from the maps before it in each reader.
    y = _relu_by_output(*primals)
    with jax.named_scope("relu"):  # by which a profile names it
        return y, jnp.where(y == 0, 0, *tangents)


def silu(x: jax.Array) -> jax.Array:
    """Returns x / (1 + exp(-x))."""
    return _silu_by_input(x) if on_cpu() else nn.silu(x)


@jax.custom_jvp
def _silu_by_input(x: jax.Array) -> jax.Array:
    return nn.silu(x)


@_silu_by_input.defjvp
def _silu_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    # XLA would keep the value's sigmoid for the gradient, a quarter of a step's memory in YOLOv5n,
    # and so it gets another form. Batch norm's passes read the gradient, computed once.
    sigmoid = 0.5 + 0.5 * jnp.tanh(0.5 * x)
    return _silu_by_input(x), computed_once(dx) * (sigmoid * (1 + x * (1 - sigmoid)))


def require_floats(x: jax.Array) -> None:
    """Raises ValueError for integers: stored pixels must be standardized before a network."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        remedy = "use fedjax_bn.serving.predictor or engine.images.standardize"
        raise ValueError(f"a network reads floats as in training, not {x.dtype}: {remedy}")


def _check_window(x: jax.Array, window: int, padding: int, name: str) -> None:
    require_floats(x)
    if x.ndim != 4 or min(x.shape[1:3]) + 2 * padding < window:
        needed = f"{name} needs maps f[H, W, C] of at least {window}x{window} pixels"
        raise ValueError(f"{needed}, not {x.shape[1:]}: use larger images, or a model such as MLP")


def variant(kind: type[_Network], name: str, about: str, **usual: Any) -> Callable[..., _Network]:
    """Returns a function `name(num_classes, **fields)` that makes a network of these usual fields.

    Its docstring is `about` and where the fields are described.
    """
    # From the class, so that its default is written once.
    usual_classes: int = vars(kind)["num_classes"]

    def make(num_classes: int = usual_classes, **fields: Any) -> _Network:
        return kind(num_classes=num_classes, **usual | fields)

    make.__name__ = make.__qualname__ = name
    make.__module__, make.__doc__ = kind.__module__, f"{about}; fields as in `{kind.__name__}`."
    make.__annotations__["return"] = kind  # from which the configuration reads the fields
    return make
