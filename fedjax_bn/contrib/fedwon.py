"""FedWon (Zhuang & Lyu, ICLR 2024): federated learning without normalization."""

from typing import Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import minimizing
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.sharing import Variables, batch_norm_paths


@bounded
def fedwon(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    clip: AtLeast0 = 0.0,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedAvg of a network without batch norm, optionally with adaptive gradient clipping (AGC).

    $G \leftarrow G \min(1, clip \max(\Vert W \Vert, 10^{-3}) / \Vert G \Vert)$ for each unit (Brock
    et al. 2021)

    The network is one of `fedjax_bn.models` with `norm="none"`, whose convolutions have scaled
    weight standardization, or any other without batch norm. With clip 0 it is FedAvg.

    Differs from Brock et al.: the classifier is clipped too, because FedWon makes no exception.

    Args:
      model: images -> outputs, without batch norm, such as `ResNet18(norm="none")`.
      optimizer: the local optimizer, which gets the clipped gradient.
      clip: largest norm of a gradient relative to its weights, at least 0; 0 clips nothing.
    """
    if clip:
        # Clipping comes first, so that momentum accumulates clipped gradients.
        optimizer = optax.chain(optax.adaptive_grad_clip(clip, eps=1e-3), optimizer)

    def start(key: jax.Array, variables: Variables) -> Variables:
        if batch_norm_paths(variables):
            name = type(model).__name__
            raise ValueError(f"fedwon trains without batch norm: build {name} with norm='none'")
        return variables

    # The clipping lies in the optimizer, so that all else is FedAvg.
    learned, federate_options = learning(model, **options)
    step = minimizing(supervised(learned), optimizer)
    return method_of(step, start=start, **federate_options)
