"""FedAvgM (Hsu, Qi & Brown 2019): momentum at the server."""

from typing import Any, Unpack

import optax

from fedjax_bn.aggregation import server_optimizer
from fedjax_bn.arguments.ranges import Above0, Share, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import OptionsButServer


@bounded
def fedavgm(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    eta: Above0 = 1.0,
    beta: Share = 0.9,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""The server steps with momentum along the clients' mean change.

    $v' = \beta v + (x - \sum_k p_k y_k)$ and $x' = x - \eta v'$

    With beta = 0 and eta = 1 it is FedAvg. v exists for shared parameters only; running statistics
    are plainly averaged.

    Args:
      model: images -> outputs.
      optimizer: the local optimizer.
      eta: the server's learning rate, above 0.
      beta: the server's momentum, in [0, 1).
      **options: those of `fedavg`.

    Raises:
      ValueError: an argument is out of its range.
    """
    return fedavg(model, optimizer, server=server_optimizer(optax.sgd(eta, beta)), **options)
