"""Which algorithm a convolution takes on CPU.

A table holds what was fastest on one kind of CPU. A context gives another rule while programs are
traced:

    with choosing(rule):
        compiled = jax.jit(method.round).lower(state, batches, key).compile()
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.models.cpu.algorithms import (
    ALGORITHMS,
    TILE,
    UNIT_STRIDES,
    Algorithm,
    Padding,
    Strides,
)

_MIN_SAVED = 3000  # multiplications a pair of channels, for which its kernel is transformed
_FEW_CHANNELS = 16  # of images times those of outputs, such as the three colours of L2D's styles
_MAX_TWICE = 2**27  # of all windows, which are gigabytes above
_MAX_PATCH_VALUES = 2 * 2**20  # more no longer stay in the caches


class Shapes(NamedTuple):
    """All that a choice depends on: what is known of a convolution while it is traced.

    Attributes:
      images: (B, H, W, C).
      kernel: (r, s, C, F).
      strides: (down, across).
      padding: ((top, bottom), (left, right)).
      dtype: in which it is computed, such as "float32".
      trained: whether its gradients are taken too, as far as is known.
    """

    images: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: Strides
    padding: Padding
    dtype: str = "float32"
    trained: bool = True

    @property
    def outputs(self) -> tuple[int, ...]:
        """Rows and columns of the result; below 1 where a kernel does not fit."""
        return tuple(
            (size + sum(sides) - taps) // stride + 1
            for size, taps, stride, sides in zip(
                self.images[1:3], self.kernel, self.strides, self.padding, strict=False
            )
        )

    def __str__(self) -> str:
        """In one word, such as `16x8x8x128*3x3x128/1x1+1,1,1,1:float32`."""
        images, kernel, strides = ("x".join(map(str, numbers)) for numbers in self[:3])
        sides = ",".join(str(side) for pair in self.padding for side in pair)
        name = f"{images}*{kernel}/{strides}+{sides}:{self.dtype}"
        return name if self.trained else f"{name}:forward"


Rule = Callable[[Shapes], str]  # to a name of `ALGORITHMS`

# Parts of the keys by which JAX remembers traces: none is taken for one of another choice.
_rule = jax.make_user_context(None)
_only_forward = jax.make_user_context(False)
_twice = jax.make_user_context(False)


def choosing(rule: Rule | None) -> AbstractContextManager[None]:
    """A context in which convolutions are traced with what a rule chooses; None: the table.

    Args:
      rule: `rule(shapes)` -> a name of `ALGORITHMS`, always the same of the same shapes; asked
        while a program is traced.
    """
    return _rule(rule)


def forward_only() -> AbstractContextManager[None]:
    """A context in which programs are traced whose gradients nobody takes."""
    return _only_forward(True)


def differentiated_twice() -> AbstractContextManager[None]:
    """A context in which programs are traced whose gradients are differentiated in turn.

    XLA's convolution has its gradients in forms that XLA:CPU is fast at (`direct`), but not theirs.
    """
    return _twice(True)


def shapes_of(
    images: Sequence[int],
    kernel: Sequence[int],
    strides: Strides,
    padding: Padding,
    dtype: Any = jnp.float32,
) -> Shapes:
    """What a choice depends on, of a convolution that is being traced."""
    name = jnp.dtype(dtype).name
    return Shapes(
        tuple(images), tuple(kernel), strides, padding, name, trained=not _only_forward.value
    )


def chosen(shapes: Shapes) -> Algorithm:
    """The algorithm that the rule of the context names, without one the table's.

    Raises:
      ValueError: the rule names none, or one that does not know such a convolution.
    """
    name = (_rule.value or by_table)(shapes)
    if name not in ALGORITHMS:
        raise ValueError(
            f"the rule of `choosing` gives {name!r} for {shapes}: it must be one of "
            f"{', '.join(ALGORITHMS)}"
        )
    if name in UNIT_STRIDES and shapes.strides != (1, 1):
        raise ValueError(
            f"the rule of `choosing` gives {name!r} for {shapes}, which has other strides than 1: "
            f"it must be one of {', '.join(n for n in ALGORITHMS if n not in UNIT_STRIDES)}"
        )
    if _twice.value and name == "direct" and windows_of(shapes) <= _MAX_TWICE:
        return ALGORITHMS["patches"]
    return ALGORITHMS[name]


def by_table(shapes: Shapes) -> str:
    """The fastest on the CPU for which the table in `convolution` was measured."""
    images, strides, outputs = shapes.images, shapes.strides, shapes.outputs
    sizes, taps, channels = images[1:3], shapes.kernel[:2], images[3]
    if not is_usual(shapes):
        return "direct"
    small = images[0] >= 8 and max(*sizes, *outputs) <= 14
    deep = min(shapes.kernel[2:]) >= 16
    if strides == (1, 1) and few_channels(shapes):
        return "fast_fourier"
    if strides == (1, 1) and min(taps) >= 5 and deep and small:
        return "transformed"
    if strides == (1, 1) and {*taps} <= {3, 4, 5} and deep and max(outputs) <= 32:
        tiles = prod(-(-n // TILE) for n in outputs)
        saved = prod(outputs) * prod(taps) - tiles * prod(TILE + tap - 1 for tap in taps)
        if images[0] * saved >= _MIN_SAVED:
            return "tiled"
    if max(taps) > 1 and max(sizes) <= 4 and min(shapes.kernel[2:]) >= 64:
        return "taps"
    if max(taps) > 1 and min(outputs) >= 10 and channels % 8 == 0:
        return "direct"  # which fills the processor's vectors
    few = images[0] * prod(outputs) * prod(taps) * channels <= _MAX_PATCH_VALUES
    if few or exceeds(shapes) or max(taps) == 1:
        return "patches"
    whole = all(k % stride == 0 and k > stride > 1 for k, stride in zip(taps, strides, strict=True))
    return "folded" if whole and channels <= 4 else "direct"


def few_channels(shapes: Shapes) -> bool:
    """Whether it has so few channels, and so large a kernel, that Fourier's transform pays."""
    return min(shapes.kernel[:2]) >= 5 and prod(shapes.kernel[2:]) <= _FEW_CHANNELS


def windows_of(shapes: Shapes) -> int:
    """How many numbers all windows of the images are, side by side."""
    return prod((shapes.images[0], *shapes.outputs, *shapes.kernel[:3]))


def is_usual(shapes: Shapes) -> bool:
    """Whether all algorithms know such a convolution: nothing is empty, nothing cut off."""
    return min(*shapes.images, *shapes.outputs) >= 1 and min(map(min, shapes.padding)) >= 0


def exceeds(shapes: Shapes) -> bool:
    """Whether XLA's convolution, or that of a gradient, is 50 times slower than it could be.

    It is where a kernel exceeds its map.
    """
    return any(
        tap > min(size, n) or n > size
        for tap, size, n in zip(shapes.kernel[:2], shapes.images[1:3], shapes.outputs, strict=True)
    )
