"""FedBABU (Oh, Kim & Yun, ICLR 2022): only the body is federated; heads are tuned afterwards."""

from typing import Annotated, Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import StepsOr0, bounded
from fedjax_bn.client import Load, Trained, run_steps
from fedjax_bn.contrib.fedrep import step_of_part, tuning
from fedjax_bn.contrib.parts import of_shared, with_model, with_own_model
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.models.classifier import all_but_head
from fedjax_bn.sharing import OWN, PyTree, SharingRule, Variables, without
from fedjax_bn.state import Received


@bounded
def fedbabu(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    tune_epochs: StepsOr0 = 1,
    share: Annotated[SharingRule | None, all_but_head] = None,
    **options: Unpack[Options],
) -> FederatedMethod:
    """The body trains below a head that never changes; each client tunes a head of its own.

    A round's local steps move the body alone (Algorithm 1). The head, alike for all from the start,
    does not travel. To predict, a client tunes the head of the model that it received, for some
    passes over its first local epoch, and keeps that model: a test after round R is of the paper's
    model of R - 1 rounds after fine-tuning. The paper tunes once, at the end; here every round can
    be tested, and costs these passes. An unseen client has the head of the start. The reported loss
    is the body's.

    Args:
      model: images -> outputs, with a classifier, see `models.classifier`.
      tune_epochs: passes in which a client's own head trains, at least 0.
      share: as in `fedrep`, whose training this is with `head_epochs=0`.
    """
    learned, federate_options = learning(model, last_layer="" if share else "fedbabu", **options)
    objective = supervised(learned)
    train = options.get("train") or run_steps
    tuned = tuning(objective, optimizer, tune_epochs, options.get("local_epochs", 1))

    def tuned_beside(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        key: jax.Array, load: Load | None = None,
    ) -> Trained:  # fmt: skip
        own_model = tuned(received, without(variables, OWN), batches, key, load)
        trained = train(step, received, variables, state, batches, key, load)
        return trained._replace(variables=with_model(trained.variables, own_model))

    federate_options["train"] = tuned_beside
    return method_of(
        of_shared(step_of_part(objective, optimizer, personal=False)),
        share=share or all_but_head(model),
        keeps=OWN,
        start=lambda key, variables: with_own_model(variables),
        **federate_options,
    )
