"""Class weights and the focal loss, for classes that are not equally frequent."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.arguments.ranges import Range
from fedjax_bn.arguments.text import brief

BALANCED = "balanced"
_ALLOWED = "balanced, or a number for each class, such as 1,5: at least 0, and one above 0"


def _numbers(weights: Any) -> tuple[float, ...]:
    """Returns weights, or a text of them, as numbers; () if that cannot be."""
    with suppress(TypeError, ValueError):
        weights = weights.split(",") if isinstance(weights, str) else weights
        numbers = tuple(map(float, weights))
        return numbers if any(numbers) and all(0 <= x < np.inf for x in numbers) else ()
    return ()


_OF_TEXT = Range(_ALLOWED, lambda text: text == BALANCED or bool(_numbers(text)))
ClassWeights = Annotated[str, _OF_TEXT] | Sequence[float] | np.ndarray | None


def as_class_weights(choice: ClassWeights) -> str | tuple[float, ...] | None:
    """Returns "balanced", numbers, or None for no weights; ValueError for anything else."""
    if choice is None or (isinstance(choice, str) and choice == BALANCED):
        return choice
    if numbers := _numbers(choice):
        return numbers
    raise ValueError(f"class_weights={brief(choice)} must be {_ALLOWED}")


def balanced(counts: jax.Array) -> jax.Array:
    r"""Returns $n / (C n_c)$ f[C] of counts [C]; a class without samples counts as one."""
    return counts.sum() / (len(counts) * counts.clip(1))


def focal_losses(losses: jax.Array, gamma: float) -> jax.Array:
    r"""Returns $(1 - p)^\gamma l$ of cross entropies $l = -\log p$ f[...]."""
    if not gamma:
        return losses
    # Not 0, where a power below 1 has no derivative.
    wrong = jnp.maximum(-jnp.expm1(-losses), jnp.finfo(losses.dtype).eps)
    return wrong**gamma * losses


def sums_by_class(losses: jax.Array, label: jax.Array, valid: jax.Array, classes: int) -> jax.Array:
    """Returns the sums of losses f[B, ...] by class, and the counts of valid labels, f[2, C]."""
    valid = valid.reshape(*valid.shape, *(1,) * (label.ndim - valid.ndim))
    is_class = jax.nn.one_hot(label, classes, dtype=bool) & valid[..., None]
    axes = tuple(range(label.ndim))
    # Masked, because NaN times 0 is NaN.
    sums = jnp.where(is_class, losses[..., None], 0).sum(axes)
    return jnp.stack([sums, is_class.sum(axes, dtype=jnp.int32).astype(sums.dtype)])


def mean_by_class(sums: Any, class_weights: Any) -> jax.Array:
    """Returns sum w l / sum w f[] of `sums_by_class` f[2, C].

    `class_weights` is "balanced" by these counts, or f[C]; ValueError for another number of them.
    """
    losses, counts = sums
    weights = balanced(counts) if isinstance(class_weights, str) else jnp.asarray(class_weights)
    if weights.shape != counts.shape:
        fault = f"class_weights has {len(weights)} numbers for {len(counts)} classes"
        raise ValueError(f"{fault}: give one for each, or {BALANCED}")
    weights = weights.astype(losses.dtype)
    total = (weights * counts).sum()
    return (weights * losses).sum() / jnp.where(total > 0, total, 1)
