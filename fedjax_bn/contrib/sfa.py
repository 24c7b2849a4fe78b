"""SFA (Li et al., ICCV 2021): features with random scales and shifts."""

from typing import Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.models.classifier import ClassifiedBy, Classify
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received
from fedjax_bn.task import require_classifier


@bounded
def sfa(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    scale: AtLeast0 = 1.0,
    shift: AtLeast0 = 1.0,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedAvg whose classifier reads noisy features in training (SFA-S).

    $f' = a f + b$ with $a \sim N(1, scale^2)$ and $b \sim N(0, shift^2)$ by sample and feature

    With both deviations 0 it is FedAvg. We found no authors' code; to our knowledge both deviations
    are 1 in the paper's simple form. Its other form, SFA-A, is not available here.

    Args:
      scale: standard deviation of a, at least 0.
      shift: standard deviation of b, at least 0.
    """
    learned, federate_options = learning(model, **options)
    if learned.task.segments:  # refused here, while the outputs of other tasks may be dense
        require_classifier("sfa", learned.task)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        def classify_noisy(classify: Classify, features: jax.Array) -> Any:
            # A separate stream, so that dropout draws as without noise.
            noise_key = stream(key, "feature noise")
            a, b = jax.random.normal(noise_key, (2, *features.shape), features.dtype)
            return classify((1 + scale * a) * features + shift * b)

        images = learned.read(variables, batch, key)
        noisy = learned._replace(model=ClassifiedBy(model, classify_noisy))
        loss, out = noisy.trained(variables, images, batch, key)
        return loss, (loss, out.moved)

    return method_of(minimizing(objective, optimizer), **federate_options)
