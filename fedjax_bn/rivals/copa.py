"""COPA (Wu & Gong, ICCV 2021): features that all clients' classifiers can read."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    averaging,
    cast_like,
    equal_messages,
)
from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Finish, Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.features import require_linear
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.sharing import STATISTICS, SharingRule, Variables, everything, path_names
from fedjax_bn.state import Received, stack
from fedjax_bn.task import require_classifier

PyTree = Any


@bounded
def copa(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    gates: bool = True,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """Clients minimize CE(h_k(f)) + sum_j CE(h_j(f)) over the other clients' classifiers h_j.

    f are the features, h_k the client's own classifier, which stays with it, and h_j those that the
    others had at the end of their last rounds, which no gradient changes. An unseen client gets the
    weighted mean of the classifiers, whose logits are the mean of theirs. The reported loss is
    CE(h_k(f)).

    Every client's classifier travels to the server and from there to every client, where FedAvg
    shows their mean alone: FedIG counts COPA among the methods that harm privacy. An upload is
    counted (`traffic`) as large as all K classifiers; the client's own is all that is in it.

    Differs from the paper: the ensemble is of logits, weighted as `weigh` says.

    Args:
      model: images -> logits, with one dense layer as its classifier; `fedjax_bn.models.features`
        says which.
      optimizer: the local optimizer.
      gates: whether batch norms are batch-instance normalization with learned gates, as in the
        paper; test it with `adaptation.learned_alpha`. `init` adds the gates.
      **options: those of `fedavg` but `server`.

    Raises:
      ValueError: the task is not classification; at `init`, where the classifier cannot be found,
        or there are to be gates and the model has no batch norm.
    """
    learned, rest = learning(model, **options)
    require_classifier("copa", learned.task)
    rule = gated_statistics if gates else None
    inner, share = keep_gates(optimizer) if gates else optimizer, rest.pop("share", everything)
    rest = {"statistics": rule} | rest
    method = method_of(
        gradient_step(differentiate(_collaborative(learned, rule)), inner),
        finish=_send_classifier(model),
        server=_collecting(),
        share=_keeping_classifier(model, share),
        **rest,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if gates and STATISTICS not in variables:
            raise ValueError(
                "copa gates batch norms, but the model has no batch norm: set gates=False, or "
                "build it with fedjax_bn.normalization.BatchNorm or flax's own"
            )
        if gates:
            variables = with_gates(variables)
        state = method.init(key, variables, num_clients)
        classifiers = stack(_classifier(model, variables), num_clients)
        return state._replace(server=ServerState(sent=classifiers))

    return method._replace(init=init, serves=("learned_alpha",) if gates else ())


def _collaborative(learned: Learning, rule: Any) -> Objective:
    """The objective of `copa`: all classifiers are the server's."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        require_linear("copa", learned.model, variables, images)
        out = forward(
            learned.model,
            variables,
            images,
            train=True,
            statistics=rule,
            valid=valid,
            key=key,
            wanted=["features"],
        )
        loss = learned.task.loss(out.outputs, batch["label"], valid)
        others = jnp.einsum("bf,jfc->jbc", out.features, received.server["kernel"])
        if "bias" in received.server:
            others += received.server["bias"][:, None]
        each = jax.vmap(lambda logits: learned.task.loss(logits, batch["label"], valid))(others)
        is_other = jnp.arange(len(each), dtype=jnp.int32) != received.client
        return loss + jnp.where(is_other, each, 0).sum(), (loss, out.moved)

    return objective


def _send_classifier(model: Any) -> Finish:
    """The client uploads its classifier in its place among all, and where that is."""

    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        own = _classifier(model, trained.variables)
        count = len(received.server["kernel"])

        def placed(leaf: jax.Array) -> jax.Array:
            everyone = jnp.zeros((count, *leaf.shape), leaf.dtype)
            return everyone.at[received.client].set(leaf)

        one = jnp.ones((), own["kernel"].dtype)
        message = {"classifiers": jax.tree.map(placed, own), "sent": placed(one)}
        return trained.variables, received.memory, message

    return finish


def _collecting() -> ServerUpdate:
    """Averaging that keeps every client's last classifier and sends them all."""
    plain = averaging()

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, _ = plain.update(shared, aggregate, state)
        sent = aggregate.message["sent"]  # 1 / n for each of the n clients that count

        def renew(old: jax.Array, found: jax.Array) -> jax.Array:
            part = sent.reshape(-1, *(1,) * (old.ndim - 1)).astype(found.dtype)
            return jnp.where(part > 0, found / jnp.where(part > 0, part, 1), old)

        new = jax.tree.map(renew, state.sent, aggregate.message["classifiers"])
        return mean, ServerState(sent=cast_like(new, state.sent))

    return ServerUpdate(plain.init, update, message_weight=equal_messages)


def _classifier(model: Any, variables: Variables) -> PyTree:
    """{"kernel": f[F, classes], "bias": f[classes]} of the dense layer that classifies."""
    layer = variables["params"]
    for name in _path(model, variables):
        layer = layer[name]
    return {name: layer[name] for name in ("kernel", "bias") if name in layer}


def _path(model: Any, variables: Variables) -> tuple[str, ...]:
    """The path of the dense layer that classifies.

    Raises:
      ValueError: the model's `classify` has several dense layers.
    """
    if path := sizes_of(model, variables).path:
        return path
    raise ValueError(
        "copa exchanges a classifier of one dense layer, but the model's method classify has "
        "several: move all but the last one into its method features"
    )


def _keeping_classifier(model: Any, share: SharingRule) -> SharingRule:
    def rule(variables: Variables) -> PyTree:
        path = ("params", *_path(model, variables))

        def kept(where: tuple, shared: bool) -> bool:
            return shared and path_names(where)[:-1] != path

        return jax.tree_util.tree_map_with_path(kept, share(variables))

    return rule
