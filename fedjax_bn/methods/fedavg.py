"""FedAvg (McMahan et al. 2017): local SGD, then the weighted mean of whole models."""

from typing import Any, Unpack

import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import minimizing
from fedjax_bn.methods.learning import Options, learning, method_of, supervised


@bounded
def fedavg(
    model: Any, optimizer: optax.GradientTransformation, **options: Unpack[Options]
) -> FederatedMethod:
    r"""The server averages all leaves, including running statistics: $x' = \sum_k p_k y_k$.

    Args:
      model: images f[B, ...] -> logits f[B, classes], or what the task reads.
      optimizer: the local optimizer.
      **options: options of all methods. `methods.learning.learning` describes `prepare`, `perturb`
        and `task`; `client.train_locally` describes `local_epochs`, `keep_optimizer`, `load` and
        `train`; `federation.federate` describes `share`, `weigh`, `privacy`, `server`, `clients`,
        `mesh` and `statistics`.
    """
    learned, federate_options = learning(model, **options)
    return method_of(minimizing(supervised(learned), optimizer), **federate_options)
