"""COPA (Wu & Gong, ICCV 2021): features that all clients' classifiers can read."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Trained
from fedjax_bn.contrib.parts import exchanging, in_row
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import OptionsButServer, learning
from fedjax_bn.models.classifier import classifier_path, require_linear
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.normalization.calls import require_batch_norm
from fedjax_bn.sharing import PyTree, Variables, complete, everything, path_names
from fedjax_bn.state import Received, stack


@bounded
def copa(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    gates: bool = True,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""Clients learn features that all clients' classifiers can read.

    $CE(h_k(f)) + \sum_j CE(h_j(f))$ over the classifiers of the other clients $j$

    f are the features. h_k is the client's own classifier, which it keeps; h_j are the others' at
    the end of their last rounds, which no gradient changes. An unseen client gets the weighted mean
    of the classifiers, whose logits are the mean of all logits. The reported loss is CE(h_k(f)).

    The server sends every client's classifier to every client, whereas FedAvg reveals only their
    mean. `traffic` counts an upload as all K classifiers, although it has only the client's own.

    Differs from the paper: the ensemble averages logits, with the weights of `weigh`.

    Args:
      model: images -> logits; its classifier, which `fedjax_bn.models.classifier` defines, must be
        one dense layer.
      gates: whether batch norms are batch-instance normalization with learned gates, as in the
        paper; test it with `adaptation.learned_alpha`. `init` adds the gates.
    """
    learned, federate_options = learning(model, classifier="copa", **options)
    rule = gated_statistics if gates else None
    share, frozen = federate_options.pop("share", everything), options.get("frozen")

    def start(key: jax.Array, variables: Variables) -> Variables:
        if frozen and any(_classifier(model, variables, frozen(variables)).values()):
            raise ValueError("copa exchanges classifiers, but frozen freezes them: leave them out")
        if not gates:
            return variables
        return with_gates(require_batch_norm("copa", variables, "set gates=False"))

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        require_linear("copa", learned.model, variables, images)
        loss, out = learned.trained(
            variables, images, batch, key, statistics=rule, wanted=["features"]
        )
        # The others' classifiers are stacked arrays, so one product applies all of them.
        client_logits = jnp.einsum("bf,jfc->jbc", out.features, received.server["kernel"])
        if "bias" in received.server:
            client_logits += received.server["bias"][:, None]

        def loss_of(logits: jax.Array) -> jax.Array:
            return learned.loss(logits, batch)

        losses = jax.vmap(loss_of)(client_logits)
        # The own classifier is applied too and masked, so that all clients share one program.
        is_other = jnp.arange(len(losses), dtype=jnp.int32) != received.client
        return loss + jnp.where(is_other, losses, 0).sum(), (loss, out.moved)

    # Sends the classifier in the client's row, and a mask of that row.
    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        classifier = _classifier(model, complete(received.with_frozen(trained.variables)))
        like, who = received.server, received.client
        # The server only sums: all other clients add zeros to this row.
        message = {name: in_row(who, like[name], leaf) for name, leaf in classifier.items()}
        message["sent"] = in_row(who, jnp.zeros(len(like["kernel"]), like["kernel"].dtype), 1)
        return trained.variables, received.memory, message

    # A shared classifier would be a mean, which differs from the classifiers in the messages.
    def all_but_classifier(variables: Variables) -> PyTree:
        path = ("params", *classifier_path("copa", model, variables))

        def is_shared(leaf: Any, shared: bool) -> bool:
            return shared and path_names(leaf)[:-1] != path

        return jax.tree.map_with_path(is_shared, share(variables))

    method = exchanging(
        minimizing(objective, keep_gates(optimizer) if gates else optimizer),
        "sent",
        lambda variables, k: stack(_classifier(model, variables), k),
        finish=finish,
        share=all_but_classifier,
        start=start,
        **{"statistics": rule} | federate_options,
    )
    return method._replace(serves=("learned_alpha",) if gates else ())


def _classifier(model: Any, variables: Variables, tree: PyTree = None) -> PyTree:
    """Returns {"kernel": f[F, classes], "bias": f[classes]} of the dense layer that classifies."""
    layer = (tree or variables)["params"]
    for name in classifier_path("copa", model, variables):
        layer = layer[name]
    return {name: layer[name] for name in ("kernel", "bias") if name in layer}
