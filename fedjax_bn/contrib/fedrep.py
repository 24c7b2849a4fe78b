"""FedRep (Collins et al., ICML 2021): a head for each client, trained before the shared body."""

from collections.abc import Callable
from typing import Annotated, Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import StepsOr0, bounded
from fedjax_bn.client import Load, Trained, run_steps
from fedjax_bn.engine.batches import first_epoch
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep, Objective, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.models.classifier import all_but_head
from fedjax_bn.sharing import PyTree, SharingRule, Variables, join, split_like
from fedjax_bn.state import Received


@bounded
def fedrep(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    head_epochs: StepsOr0 = 1,
    share: Annotated[SharingRule | None, all_but_head] = None,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedPer's sharing rule, with the personal parameters trained first, and then the shared ones.

    A round is `head_epochs` passes over the batches of a client's first local epoch, in which its
    head alone trains, and then `local_epochs` epochs in which the rest alone trains (Algorithm 1).
    Running statistics move in both. Each part has a fresh optimizer; `keep_optimizer` keeps that of
    the second part, whose loss is reported. FedPer is `fedavg` with `share=all_but_head(model)`.

    Args:
      model: images -> outputs, with a classifier, see `models.classifier`.
      head_epochs: passes in which the head trains, at least 0; 0 never trains it.
      share: the sharing rule, whose personal parameters are the head; by default
        `models.classifier.all_but_head(model)`.
    """
    learned, federate_options = learning(model, last_layer="" if share else "fedrep", **options)
    objective = supervised(learned)
    train = options.get("train") or run_steps
    tuned = tuning(objective, optimizer, head_epochs, options.get("local_epochs", 1))

    def head_first(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        key: jax.Array, load: Load | None = None,
    ) -> Trained:  # fmt: skip
        variables = tuned(received, variables, batches, key, load)
        return train(step, received, variables, state, batches, key, load)

    federate_options["train"] = head_first
    body = step_of_part(objective, optimizer, personal=False)
    return method_of(body, share=share or all_but_head(model), **federate_options)


def tuning(
    objective: Objective, optimizer: optax.GradientTransformation, times: int, local_epochs: int
) -> Callable[..., Variables]:
    """Returns `tuned(received, variables, batches, key, load)`, with trained personal parameters.

    They train for some passes over the first local epoch, with a fresh optimizer.
    """
    head = step_of_part(objective, optimizer, personal=True)

    def tuned(
        received: Received, variables: Variables, batches: Batch, key: jax.Array, load: Load | None
    ) -> Variables:
        if not times:
            return variables
        passes, key = first_epoch(batches, local_epochs, times), stream(key, "epochs of the head")
        state = head.init(variables)
        return run_steps(head, received, variables, state, passes, key, load).variables

    return tuned


def step_of_part(
    objective: Objective, optimizer: optax.GradientTransformation, personal: bool
) -> LocalStep:
    """Returns the step that moves only the personal, or only the shared, parameters."""

    def halves(variables: Variables, received: Received) -> tuple[PyTree, PyTree]:
        """Returns the parameters that move, and the others."""
        shared, personal_params = split_like(variables["params"], received.shared["params"])
        return (personal_params, shared) if personal else (shared, personal_params)

    def of_part(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        moving, still = halves(variables, received)
        # No pass computes the gradient of parameters that do not move.
        params = join(moving, jax.lax.stop_gradient(still))
        return objective({**variables, "params": params}, batch, received, key)

    step = minimizing(of_part, optimizer)

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        after, state, loss = step.update(variables, state, batch, received, key)
        # An optimizer with weight decay moves parameters whose gradient is 0 too.
        params = join(halves(after, received)[0], halves(variables, received)[1])
        return {**after, "params": params}, state, loss

    return step._replace(update=update)
