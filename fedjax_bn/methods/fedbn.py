"""FedBN (Li et al., ICLR 2021): batch norm stays with its client. FedAvg in all else."""

from typing import Any, Unpack

import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import Options
from fedjax_bn.sharing import SharingRule, all_but_batch_norm


@bounded
def fedbn(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = all_but_batch_norm,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg over all leaves but scale, bias, mean and variance of batch norms (Algorithm 1).

    Args:
      model: one with at least one batch norm, images -> outputs.
      optimizer: the local optimizer.
      share: which leaves are averaged.
      **options: those of `fedavg`.

    Raises:
      ValueError: at `init`, where the model has no batch norm.
    """
    return fedavg(model, optimizer, share=share, **options)
