"""TsmoBN at test time (Jiang et al. 2021; UniFed's client-specific batch norm)."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation
from fedjax_bn.models.masks import apply
from fedjax_bn.normalization import normalize_with
from fedjax_bn.normalization.tsmobn import About, tracked_statistics
from fedjax_bn.sharing import STATISTICS, Variables


class Tracked(NamedTuple):
    """The carry of `tsmobn`.

    Attributes:
      statistics: tracked mean and variance, in the form of `batch_stats`.
      started: bool[], whether a batch with valid samples has been seen.
    """

    statistics: Variables
    started: jax.Array


def tsmobn(
    model: nn.Module, momentum: float | jax.Array = 0.9, *, about: About = "tracked"
) -> Adaptation:
    """The client's own statistics, tracked with momentum over its batches (Algorithm 1, Eq. 4).

    One pass over the stream in order: each batch moves the tracked mean and variance of every
    batch norm and is then normalized with them; the affine is the received one. The first batch
    gives its own statistics, so momentum 0 is `batch`, and a single batch is too.

    Args:
      model: linen module, images -> logits.
      momentum: tau, the weight of the past, in [0, 1]; it may be traced.
      about: as in `normalization.tsmobn.update`.
    """

    def init(variables: Variables) -> Tracked:
        return Tracked(variables[STATISTICS], jnp.zeros((), bool))

    def predict(
        variables: Variables, carry: Tracked, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, Tracked]:
        now = jnp.where(carry.started, momentum, 0)
        tracking = {**variables, STATISTICS: carry.statistics}
        with normalize_with(tracked_statistics(now, about=about), valid):
            logits, moved = apply(model, tracking, images, mutable=[STATISTICS])
        some = jnp.ones((), bool) if valid is None else valid.any()
        return logits, Tracked(moved[STATISTICS], carry.started | some)

    return Adaptation(init, predict)
