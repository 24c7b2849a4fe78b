"""SingleSet (the baseline of FedBN, Section 5): every client trains alone."""

from typing import Any, Unpack

import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import Options
from fedjax_bn.sharing import SharingRule, nothing


@bounded
def singleset(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = nothing,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg that shares no leaf; an unseen client receives the mean of the clients' models.

    Args:
      model: images -> outputs.
      optimizer: the local optimizer.
      share: which leaves are averaged.
      **options: those of `fedavg`.
    """
    return fedavg(model, optimizer, share=share, **options)
