"""TsmoBN at test time (Jiang et al. 2021; UniFed's client-specific batch norm)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation
from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.calls import name_of
from fedjax_bn.normalization.tsmobn import About, tracked_statistics
from fedjax_bn.sharing import STATISTICS, Variables


class _Tracked(NamedTuple):
    """The carry of `tsmobn`.

    Attributes:
      statistics: tracked mean and variance, in the form of `batch_stats`.
      started: bool[], whether a batch with valid samples has been seen.
    """

    statistics: Variables
    started: jax.Array


@bounded
def tsmobn(
    model: Any, momentum: UpTo1 | jax.Array = 0.9, *, about: About = "tracked"
) -> Adaptation:
    """The client's own statistics, tracked with momentum over its batches (Algorithm 1, Eq. 4).

    One pass over the stream in order: each batch moves the tracked mean and variance of every
    batch norm and is then normalized with them; the affine is the received one. The first batch
    gives its own statistics, so momentum 0 is `batch`, and a single batch is too.

    Args:
      model: as in `adaptation.stateless`, images -> logits.
      momentum: tau, the weight of the past, in [0, 1]; it may be traced.
      about: as in `normalization.tsmobn.update`.

    Raises:
      ValueError: at `init`, if the model has no batch norm; at `predict`, if it has one that no
        rule reaches.
    """

    def init(variables: Variables) -> _Tracked:
        if STATISTICS not in variables:
            raise ValueError(
                f"tsmobn tracks the statistics of batch norms, of which {name_of(model)} has "
                "none: use the adaptation running"
            )
        return _Tracked(variables[STATISTICS], jnp.zeros((), bool))

    def predict(
        variables: Variables, carry: _Tracked, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Tracked]:
        # Momentum 0 gives the first batch its own statistics, in the same program as later ones.
        now = jnp.where(carry.started, momentum, 0)
        tracking = {**variables, STATISTICS: carry.statistics}
        rule = tracked_statistics(now, about=about)
        output = forward(model, tracking, images, statistics=rule, valid=valid, wanted=["moved"])
        some = jnp.ones((), bool) if valid is None else valid.any()
        return output.outputs, _Tracked(output.moved[STATISTICS], carry.started | some)

    return Adaptation(init, predict)
