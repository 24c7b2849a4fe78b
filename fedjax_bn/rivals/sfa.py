"""SFA (Li et al., ICCV 2021): features with random scales and shifts."""

from typing import Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.features import ClassifiedBy
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received


@bounded
def sfa(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    scale: AtLeast0 = 1.0,
    shift: AtLeast0 = 1.0,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg whose classifier reads, in training, features with noise: SFA-S.

        f' = a f + b,   a ~ N(1, scale^2),   b ~ N(0, shift^2),   for each sample and feature

    Nothing but the model travels. With both deviations 0 it is FedAvg. There is no authors' code to
    compare with; both defaults are 1 as the paper's simple form has them, to our knowledge. Its
    other form, SFA-A, with the covariance of each class, is not here.

    Args:
      model: images -> outputs; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      scale: standard deviation of a, at least 0.
      shift: standard deviation of b, at least 0.
      **options: those of `fedavg`.

    Raises:
      ValueError: a deviation is negative; at `round`, where the features are not to be found.
    """
    learned, rest = learning(model, **options)
    return method_of(
        gradient_step(differentiate(_augmented(learned, scale, shift)), optimizer), **rest
    )


def _augmented(learned: Learning, scale: float, shift: float) -> Objective:
    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images, valid = learned.read(variables, batch, key), batch["valid"]
        noise = stream(key, "feature noise")
        model = ClassifiedBy(
            learned.model, lambda classify, f: classify(with_noise(noise, f, scale, shift))
        )
        out = forward(model, variables, images, train=True, valid=valid, key=key)
        loss = learned.task.loss(out.outputs, batch["label"], valid)
        return loss, (loss, out.moved)

    return objective


def with_noise(key: jax.Array, features: jax.Array, scale: float, shift: float) -> jax.Array:
    """a f + b, see `sfa`, for f of any shape."""
    a, b = jax.random.normal(key, (2, *features.shape), features.dtype)
    return (1 + scale * a) * features + shift * b
