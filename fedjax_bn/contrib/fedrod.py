"""FedRoD (Chen & Chao, ICLR 2022): a balanced generic head, and a personal head beside it."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Load, Trained, run_steps
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.models.classifier import classifier_path, only_head, require_linear
from fedjax_bn.sharing import OWN, PyTree, Variables, path_names, split, without
from fedjax_bn.state import Received


@bounded
def fedrod(
    model: Any, optimizer: optax.GradientTransformation, **options: Unpack[Options]
) -> FederatedMethod:
    r"""A generic head learns as if classes were equally frequent, a personal one corrects it.

    $CE(g + \log n_k, y) + CE(\bar g + f_k(\bar z), y)$ without gradients through barred values

    z are the features and g the logits of the shared model, n_k the client's samples of each class
    in a round (balanced softmax), and f_k its own linear head, which stays with it. A client
    predicts with g + f_k(z), an unseen one with g. The reported loss is the first part. For masks
    both are the task's loss without n_k, and the last layer is a convolution of 1x1 pixels.

    The authors' code is not public. As in PFLlib and FL-MedSegBench f_k starts as a copy of the
    generic head; there it has an optimizer of its own. The paper's hypernetwork is left out.

    Args:
      model: images -> outputs, whose classifier, see `models.classifier`, must be one layer.
    """
    learned, federate_options = learning(model, last_layer="fedrod", **options)
    task, stop = learned.task, jax.lax.stop_gradient
    train = options.get("train") or run_steps

    def start(key: jax.Array, variables: Variables) -> Variables:
        variables = without(variables, OWN)
        if task.classifies:
            classifier_path("fedrod", model, variables)  # refuses several layers
        head, _ = split(variables, only_head(model)(variables))
        return {**variables, OWN: {"added": {"params": head["params"]}}}

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        shared, head = without(variables, OWN), _head(variables)
        loss, out = learned.trained(shared, images, batch, key, wanted=["features"])
        if task.classifies:
            require_linear("fedrod", learned.model, shared, images)
            loss = learned.loss(out.outputs + received.memory.astype(out.outputs.dtype), batch)
        # A convolution of 1x1 pixels has a kernel f[1, 1, F, classes].
        kernel = head["kernel"].reshape(head["kernel"].shape[-2:]).astype(out.features.dtype)
        added = stop(out.features) @ kernel
        if "bias" in head:
            added += head["bias"].astype(added.dtype)
        return loss + learned.loss(stop(out.outputs) + added, batch), (loss, out.moved)

    def counting_classes(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        key: jax.Array, load: Load | None = None,
    ) -> Trained:  # fmt: skip
        kernel = _head(variables)["kernel"]
        # All epochs of the round: a common factor of the counts changes no softmax.
        is_class = batches["label"][..., None] == jnp.arange(kernel.shape[-1], dtype=jnp.int32)
        counts = (is_class & batches["valid"][..., None]).sum((0, 1)).astype(kernel.dtype)
        # Not log 0, whose product with 0 is NaN; a class without samples has no weight either way.
        prior = jnp.log(jnp.maximum(counts, jnp.finfo(counts.dtype).tiny))
        received = received._replace(memory=prior)
        return train(step, received, variables, state, batches, key, load)

    if task.classifies:
        federate_options["train"] = counting_classes
    step = minimizing(objective, optimizer, ("params", OWN))
    return method_of(step, keeps=OWN, start=start, **federate_options)


def _head(variables: Variables) -> dict[str, jax.Array]:
    """Returns {"kernel": f[..., F, classes], "bias": f[classes]} of a client's own head."""
    leaves = jax.tree.leaves_with_path(variables[OWN]["added"])
    return {path_names(path)[-1]: leaf for path, leaf in leaves}
