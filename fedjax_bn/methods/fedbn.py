"""FedAvg with another sharing rule: FedBN, SiloBN, and SingleSet, which shares nothing."""

from typing import Any, Unpack

import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import Options
from fedjax_bn.sharing import SharingRule, all_but_batch_norm, all_but_statistics, nothing

# Each function has its own default of `share`, which `Options` has too: hence the ignores.


@bounded
def fedbn(  # type: ignore[misc]
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = all_but_batch_norm,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedBN (Li et al., ICLR 2021): FedAvg in which each client keeps its batch norms.

    The server averages all leaves except scale, bias, mean and variance of batch norms
    (Algorithm 1).

    Args:
      share: which leaves are averaged.

    Raises:
      ValueError: at `init`, the model has no batch norm.
    """
    return fedavg(model, optimizer, share=share, **options)


@bounded
def silobn(  # type: ignore[misc]
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = all_but_statistics,
    **options: Unpack[Options],
) -> FederatedMethod:
    """SiloBN (Andreux et al. 2020): FedAvg in which each client keeps its running statistics.

    The server averages all other leaves, including scale and bias of batch norms. Arguments and
    errors are those of `fedbn`.
    """
    return fedavg(model, optimizer, share=share, **options)


@bounded
def singleset(  # type: ignore[misc]
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = nothing,
    **options: Unpack[Options],
) -> FederatedMethod:
    """SingleSet (the baseline of FedBN, Section 5): every client trains alone.

    No leaf is shared; an unseen client receives the mean of the clients' models. Arguments are
    those of `fedbn`, but the model needs no batch norm.
    """
    return fedavg(model, optimizer, share=share, **options)
