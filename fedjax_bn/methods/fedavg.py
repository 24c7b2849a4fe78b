"""FedAvg (McMahan et al. 2017): local SGD, then the weighted mean of whole models."""

from typing import Any

import flax.linen as nn
import optax

from fedjax_bn.client import cross_entropy, differentiate, gradient_step
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.federation import FederatedMethod, federate
from fedjax_bn.sharing import SharingRule, everything


def fedavg(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = everything,
    prepare: Prepare | None = None,
    **options: Any,
) -> FederatedMethod:
    """x' = sum_k p_k y_k over all leaves, running statistics included.

    Args:
      model: linen module, images -> logits.
      optimizer: the local optimizer.
      share: which leaves are averaged.
      prepare: turns stored images into what the model reads; by default bytes are standardized
        with mean and standard deviation 0.5.
      **options: `weigh`, `clients`, `local_epochs` and the others of `federation.federate`.
    """
    gradient = differentiate(cross_entropy(model, prepare))
    return federate(gradient_step(gradient, optimizer), share=share, **options)
