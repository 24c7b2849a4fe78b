"""FedWon (Zhuang & Lyu, ICLR 2024): federated learning without normalization."""

from typing import Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import Options
from fedjax_bn.sharing import STATISTICS, Variables


@bounded
def fedwon(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    clip: AtLeast0 = 0.0,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg of a network without batch norm, perhaps with adaptive gradient clipping.

        G <- G min(1, clip max(||W||, 1e-3) / ||G||)    unit by unit (Brock et al. 2021)

    The network is one of `fedjax_bn.models` with `norm="none"`, whose convolutions have scaled
    weight standardization (`models.layers.standardized`), or any other without batch norm. Nothing
    but the model travels. With clip 0 nothing is clipped: FedAvg.

    Differs from Brock et al.: the classifier is clipped too, as FedWon does not except it.

    Args:
      model: one without batch norm, such as `ResNet18(norm="none")`.
      optimizer: the local optimizer, behind the clipping.
      clip: largest gradient as a share of its weights, at least 0; 0 clips nothing.
      **options: those of `fedavg`.

    Raises:
      ValueError: `clip` is negative; at `init`, where the model has a batch norm.
    """
    if clip:
        optimizer = optax.chain(optax.adaptive_grad_clip(clip, eps=1e-3), optimizer)
    method = fedavg(model, optimizer, **options)

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if STATISTICS in variables:
            raise ValueError(
                f"fedwon trains networks without batch norm, but {type(model).__name__} has one: "
                'build it with norm="none" (model=ResNet18:norm=none)'
            )
        return method.init(key, variables, num_clients)

    return method._replace(init=init)
