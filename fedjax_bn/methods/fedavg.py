"""FedAvg (McMahan et al. 2017): local SGD, then the weighted mean of whole models.

FedBN, SiloBN and SingleSet are FedAvg with another sharing rule.
"""

from typing import Any, Unpack

import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.sharing import SharingRule, all_but_batch_norm, all_but_statistics, nothing

# The sharing rules have their own default of `share`, which `Options` has too: hence the ignores.


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
    step = gradient_step(differentiate(supervised(learned)), optimizer)
    return method_of(step, **federate_options)


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
    (Algorithm 1). A model without any raises ValueError at `init`.

    Args:
      share: which leaves are averaged.
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
