"""COPA (Wu & Gong, ICCV 2021): features that all clients' classifiers can read."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, ServerState, averaging, equal_messages
from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Finish, Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, differentiate, gradient_step
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, require_batch_norm
from fedjax_bn.models.classifier import require_linear, sizes_of
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.sharing import SharingRule, Variables, complete, everything, path_names
from fedjax_bn.state import Received, stack

PyTree = Any


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

    f are the features. h_k is the client's own classifier, which it keeps. h_j are the others'
    classifiers at the end of their last rounds, which no gradient changes. An unseen client gets
    the weighted mean of the classifiers, whose logits are the mean of all logits. The reported loss
    is CE(h_k(f)).

    The server gets every client's classifier and sends it to every client, whereas FedAvg reveals
    only their mean: FedIG counts COPA among the methods that harm privacy. `traffic` counts an
    upload as large as all K classifiers, although it contains only the client's own.

    Differs from the paper: the ensemble averages logits, with the weights of `weigh`.

    Args:
      model: images -> logits; its classifier, which `fedjax_bn.models.classifier` defines, must be
        one dense layer.
      gates: whether batch norms are batch-instance normalization with learned gates, as in the
        paper; test it with `adaptation.learned_alpha`. `init` adds the gates.
      optimizer, **options: as in `fedavg`, without `server`.

    Raises:
      ValueError: at `init`, the classifier is not found, or the model has no batch norm for the
        gates.
    """
    learned, federate_options = learning(model, classifier="copa", **options)
    rule = gated_statistics if gates else None
    inner, share = (
        keep_gates(optimizer) if gates else optimizer,
        federate_options.pop("share", everything),
    )

    def start(key: jax.Array, variables: Variables) -> Variables:
        del key
        if not gates:
            return variables
        require_batch_norm("copa", variables, "set gates=False")
        return with_gates(variables)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        require_linear("copa", learned.model, variables, images)
        loss, out = learned.trained(
            variables, images, batch, key, statistics=rule, wanted=["features"]
        )
        # The others' classifiers are stacked arrays, so one product applies all of them.
        client_logits = jnp.einsum("bf,jfc->jbc", out.features, received.server["kernel"])
        if "bias" in received.server:
            client_logits += received.server["bias"][:, None]
        losses = jax.vmap(lambda logits: learned.task.loss(logits, batch["label"], valid))(
            client_logits
        )
        # The own classifier is applied too and masked, so that all clients share one program.
        is_other = jnp.arange(len(losses), dtype=jnp.int32) != received.client
        return loss + jnp.where(is_other, losses, 0).sum(), (loss, out.moved)

    method = method_of(
        gradient_step(differentiate(objective), inner),
        finish=_send_classifier(model),
        server=averaging(renew=_renew_classifiers, message_weight=equal_messages),
        share=_keeping_classifier(model, share),
        start=start,
        **{"statistics": rule} | federate_options,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        state = method.init(key, variables, num_clients)
        path, frozen = _path(model, variables), state.frozen or {}
        if "params" in frozen and jax.tree.leaves(_leaves_of(path, frozen)):
            raise ValueError(
                "copa trains and exchanges the classifiers of its clients, but frozen freezes the "
                "classifier: let frozen leave it out"
            )
        # Here, because the server's own `init` does not get the number of clients.
        return state._replace(
            server=ServerState(sent=stack(_classifier(model, variables), num_clients))
        )

    return method._replace(init=init, serves=("learned_alpha",) if gates else ())


def _send_classifier(model: Any) -> Finish:
    """Returns the last act: send the classifier in the client's row, and a mask of that row."""

    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        classifier = _classifier(model, complete(received.with_frozen(trained.variables)))
        count = len(received.server["kernel"])

        def placed(leaf: jax.Array) -> jax.Array:
            # The server only sums: all other clients add zeros to this row.
            everyone = jnp.zeros((count, *leaf.shape), leaf.dtype)
            return everyone.at[received.client].set(leaf)

        # A one in the client's row: its mean shows the server which rows were sent.
        sent = jnp.ones((), classifier["kernel"].dtype)
        message = {"classifiers": jax.tree.map(placed, classifier), "sent": placed(sent)}
        return trained.variables, received.memory, message

    return finish


def _renew_classifiers(sent: PyTree, aggregate: Aggregate) -> PyTree:
    message = aggregate.message
    return jax.tree.map(
        lambda before, update: renewed(before, update, message["sent"]),
        sent,
        message["classifiers"],
    )


def renewed(before: jax.Array, sent: jax.Array, part: jax.Array) -> jax.Array:
    """Returns the rows of all clients, where the rows that clients sent replace the old ones.

    Args:
      before: f[K, ...].
      sent: f[K, ...], the mean over the n clients that count, of rows placed among zeros.
      part: f[K] or f[K, N], the mean of ones in the same places: 1 / n where a row was sent.
    """
    part = part.reshape(*part.shape, *(1,) * (before.ndim - part.ndim)).astype(sent.dtype)
    # Both are means over the same n clients, so n cancels.
    return jnp.where(part > 0, sent / jnp.where(part > 0, part, 1), before)


def _classifier(model: Any, variables: Variables) -> PyTree:
    """Returns {"kernel": f[F, classes], "bias": f[classes]} of the dense layer that classifies."""
    return _leaves_of(_path(model, variables), variables)


def _leaves_of(path: tuple[str, ...], variables: Variables) -> PyTree:
    layer = variables["params"]
    for name in path:
        layer = layer[name]
    return {name: layer[name] for name in ("kernel", "bias") if name in layer}


def _path(model: Any, variables: Variables) -> tuple[str, ...]:
    if path := sizes_of(model, variables).path:
        return path
    raise ValueError(
        "copa exchanges a classifier of one dense layer, but the model's method classify has "
        "several: move all but the last one into its method features"
    )


def _keeping_classifier(model: Any, share: SharingRule) -> SharingRule:
    # A shared classifier would be a mean, which differs from the classifiers in the messages.
    def rule(variables: Variables) -> PyTree:
        path = ("params", *_path(model, variables))

        def kept(leaf_path: tuple, shared: bool) -> bool:
            return shared and path_names(leaf_path)[:-1] != path

        return jax.tree_util.tree_map_with_path(kept, share(variables))

    return rule
