"""TsmoBN (Jiang et al. 2021), which tracks the statistics of a test client over its batches."""

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.normalization.instance import Pair
from fedjax_bn.normalization.layer import moments

About = Literal["tracked", "batch"]


@bounded
def update(
    tracked: Pair | None,
    x: jax.Array,
    momentum: UpTo1 | jax.Array,
    valid: jax.Array | None = None,
    *,
    about: About = "tracked",
) -> Pair:
    """Takes one step of Algorithm 1 (Eq. 4; UniFed, Eq. 3 and 4).

    mean <- tau mean + (1 - tau) mean_b, then var <- tau var + (1 - tau) E_b (x - mean)^2 about the
    moved mean. Without `tracked`, the result is the batch's own mean and biased variance.

    Args:
      tracked: mean and variance so far, f[C] each; None on the first batch.
      x: f[B, ..., C], the batch.
      momentum: tau, the weight of the past, in [0, 1].
      valid: bool[B], the samples that count; None for all. A batch without any changes nothing.
      about: "tracked" as in the algorithm, or "batch" for a variance about the batch's mean.

    Returns:
      The moved mean and variance, f[C] each, with which the batch is normalized.
    """
    mean, var, count = moments(x, valid)
    if tracked is None:
        return mean, var
    old_mean, old_var = tracked
    momentum = jnp.asarray(momentum).astype(mean.dtype)
    moved = momentum * old_mean.astype(mean.dtype) + (1 - momentum) * mean
    if about == "tracked":
        # E (x - m)^2 = var + (mean - m)^2, a sum of squares and so safe in any precision.
        var = var + jnp.square(mean - moved)
    spread = momentum * old_var.astype(var.dtype) + (1 - momentum) * var
    # A batch of padding moves nothing.
    any_valid = count > 0
    return (
        jnp.where(any_valid, moved.astype(old_mean.dtype), old_mean),
        jnp.where(any_valid, spread.astype(old_var.dtype), old_var),
    )
