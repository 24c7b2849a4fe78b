"""FedAvg (McMahan et al. 2017): local SGD, then the weighted mean of whole models."""

from typing import Any

import flax.linen as nn
import optax

from fedjax_bn.federation import FederatedMethod, federate
from fedjax_bn.sharing import SharingRule, everything


def fedavg(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = everything,
    **options: Any,
) -> FederatedMethod:
    """x' = sum_k p_k y_k over all leaves, running statistics included.

    Args:
      model: linen module, images -> logits.
      optimizer: the local optimizer.
      share: which leaves are averaged.
      **options: `weigh`, `clients`, `local_epochs` and the others of `federation.federate`.
    """
    return federate(model, optimizer, share=share, **options)
