"""FedIG and FedIG-A: client-agnostic learning with mixed statistics, and a zero-shot adapter."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import ServerUpdate, Uploads, averaging, weighted_mean
from fedjax_bn.client import (
    Batch,
    LocalStep,
    Objective,
    Received,
    Trained,
    differentiate,
    gradient_step,
    masked_mean,
    parameter_dtype,
)
from fedjax_bn.data.pixels.images import Prepare, standardize
from fedjax_bn.federation import FederatedMethod, federate
from fedjax_bn.models.features import takes_train
from fedjax_bn.models.halves import halves
from fedjax_bn.normalization import StatisticsRule, normalize_with
from fedjax_bn.normalization.adapter import COLLECTION, adapted_statistics
from fedjax_bn.normalization.adapter import init as init_adapter
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.normalization.layer import path_names
from fedjax_bn.normalization.mixig import mixed_statistics
from fedjax_bn.normalization.mixing import Mixing, choose_mixing
from fedjax_bn.sharing import STATISTICS, SharingRule, Variables, all_but_batch_norm, join

PyTree = Any
# (features f[B, ...], mixed features f[B, ...]) -> f[B]: how far apart a sample's two passes are
Distance = Callable[[jax.Array, jax.Array], jax.Array]


def fedig(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    lambda_1: float = 0.1,
    lambda_2: float = 4.0,
    cafl: Distance | str = "sum",
    mixing: Mixing | str = "uniform",
    adapter: bool = False,
    adapter_optimizer: optax.GradientTransformation | None = None,
    gates: bool = False,
    share: SharingRule = all_but_batch_norm,
    prepare: Prepare | None = None,
    **options: Any,
) -> FederatedMethod:
    """FedBN whose clients minimize L_CE + lambda_1 L_CACL + lambda_2 L_CAFL (Eq. 2 to 6).

    A second pass of every batch is normalized with the sample's statistics mixed with the global
    ones that the server sends (`mixing`), in every batch norm with spatial axes; CAFL pulls its
    features to the local ones, CACL teaches the classifier, and only the classifier, to read them.
    With both lambdas 0 it is FedBN. The reported loss is L_CE.

    With `adapter` it is FedIG-A: after each step of the main network, which is frozen then, a step
    of the zero-shot adapter follows on the same batch (Eq. 8 and 9, Table 13). Its parameters are
    the collection `adapter`, shared and averaged. `init` makes them for all batch norms where the
    given variables have none; `normalization.adapter.with_adapter` makes them for the spatial ones
    only.

    Args:
      model: linen module with at least one `BatchNorm`, images -> logits;
        `fedjax_bn.models.halves` says what its features are.
      optimizer: the local optimizer.
      lambda_1: weight of CACL, at least 0.
      lambda_2: weight of CAFL, at least 0.
      cafl: how it takes the squared differences of a sample's F features together: "sum", the norm
        as printed, for a network that starts from ImageNet's weights, or "mean", which is the sum
        with lambda_2 / F, for one that starts from random ones: there the sum diverges, or the
        features collapse (docs/results.md). Or `distance(features, mixed) -> f[B]`.
      mixing: `mixing(key)` -> the rule of the second pass, or its text: MixIG with u ~ U(0, 1) by
        default, for others see `mixing.choose_mixing` (Tables 1, 3b and 6).
      adapter: whether the zero-shot adapter is trained.
      adapter_optimizer: its optimizer; `optimizer` by default, with a state of its own.
      gates: whether the local pass is batch-instance normalization with learned gates, for
        `adaptation.learned_alpha` (BIN with MixIG, Table 3c); `init` adds the gates.
      share: which leaves are averaged.
      prepare: as in `fedavg`.
      **options: those of `fedavg`.

    Raises:
      ValueError: a lambda is negative, the text of `cafl` or `mixing` is wrong, or there are both
        adapter and gates; at `init`, where the model has no batch norm; at `round`, where its
        features are not to be found.
    """
    for name, value in (("lambda_1", lambda_1), ("lambda_2", lambda_2)):
        if not value >= 0:
            raise ValueError(f"fedig: {name}={value} must be at least 0 (0 leaves its loss out)")
    if adapter and gates:
        raise ValueError("fedig: adapter and gates exclude each other, both choose alpha: use one")
    prepare = prepare or standardize()
    mixing = choose_mixing(mixing) if isinstance(mixing, str) else mixing
    if gates:
        optimizer = keep_gates(optimizer)
    rule = gated_statistics if gates else None
    objective = client_agnostic(model, prepare, lambda_1, lambda_2, mixing, rule, cafl=cafl)
    step = gradient_step(differentiate(objective), optimizer)
    if adapter:
        loss = adapter_loss(model, prepare)
        step = alternate(step, adapter_step(loss, adapter_optimizer or optimizer))
    method = federate(
        step, share=share, server=averaging_statistics(), finish=send_statistics, **options
    )
    return method._replace(init=start_with(method.init, adapter=adapter, gates=gates))


def fediga(
    model: nn.Module, optimizer: optax.GradientTransformation, **options: Any
) -> FederatedMethod:
    """FedIG-A: `fedig` with the zero-shot adapter, for `adaptation.zero_shot_adapter`.

    The main network is trained as if there were no adapter, so that the same federation tested with
    `adaptation.running` is FedIG.

    Args:
      model, optimizer, **options: those of `fedig`.
    """
    return fedig(model, optimizer, adapter=True, **options)


def client_agnostic(
    model: nn.Module,
    prepare: Prepare,
    lambda_1: float = 0.1,
    lambda_2: float = 4.0,
    mixing: Mixing = mixed_statistics,
    statistics: StatisticsRule | None = None,
    *,
    cafl: Distance | str = "sum",
) -> Objective:
    """The objective L_CE + lambda_1 L_CACL + lambda_2 L_CAFL (Eq. 2 to 6); arguments of `fedig`.

    L_CAFL = mean_i ||f_i - f_mixed,i||^2, L_CACL = CE(C(stop_gradient(f_mixed)), y); means over
    valid samples. `statistics` is the rule of the local pass, by default the batch's own
    statistics. `received.server` holds the global `batch_stats`.
    """
    distance = _choose_distance(cafl) if isinstance(cafl, str) else cafl

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images = prepare(batch["image"], parameter_dtype(variables))
        valid = batch["valid"]

        def both(
            variables: Variables, rule: StatisticsRule | None, frozen: bool
        ) -> tuple[tuple[jax.Array, jax.Array], Variables]:
            method = halves(model, variables, images, frozen=frozen)
            with normalize_with(rule, valid):
                return model.apply(
                    variables,
                    images,
                    mutable=[STATISTICS],
                    rngs={"dropout": key},  # the same masks in both passes
                    method=method,
                    **takes_train(method, True),
                )

        def error(logits: jax.Array) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return masked_mean(losses, valid)

        (features, logits), moved = both(variables, statistics, frozen=False)
        loss = error(logits)
        if lambda_1 == lambda_2 == 0:
            return loss, (loss, moved)
        mixed = mixing(jax.random.fold_in(key, 1))
        (augmented, read), _ = both({**variables, STATISTICS: received.server}, mixed, frozen=True)
        gaps = distance(features, augmented)
        value = loss + lambda_1 * error(read) + lambda_2 * masked_mean(gaps, valid)
        return value, (loss, moved)

    return objective


def _choose_distance(name: str) -> Distance:
    reductions = {"sum": jnp.sum, "mean": jnp.mean}
    if name not in reductions:
        raise ValueError(
            f"fedig: cafl={name!r} must be sum (over features, as printed) or mean, or a function "
            "(features, mixed) -> f[B]"
        )
    reduce = reductions[name]
    return lambda one, other: reduce(jnp.square(one - other).reshape(len(one), -1), axis=1)


def adapter_loss(model: nn.Module, prepare: Prepare) -> Callable[..., jax.Array]:
    """Returns `loss(adapter, variables, batch, global_, key) -> f[]`, Eq. 8 with alpha by Eq. 9."""

    def loss(
        adapter: PyTree, variables: Variables, batch: Batch, global_: PyTree, key: jax.Array
    ) -> jax.Array:
        images = prepare(batch["image"], parameter_dtype(variables))
        with normalize_with(adapted_statistics(adapter, key), batch["valid"]):
            logits = model.apply({**variables, STATISTICS: global_}, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return masked_mean(losses, batch["valid"])

    return loss


def adapter_step(
    loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> LocalStep:
    """A step of the adapter alone along its gradient; the main network is frozen."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        adapter, key = variables[COLLECTION], jax.random.fold_in(key, 2)
        value, gradients = jax.value_and_grad(loss)(adapter, variables, batch, received.server, key)
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            updates, state = optimizer.update(gradients, state, adapter)
        return {**variables, COLLECTION: optax.apply_updates(adapter, updates)}, state, value

    return LocalStep(init=lambda variables: optimizer.init(variables[COLLECTION]), update=update)


def alternate(first: LocalStep, second: LocalStep) -> LocalStep:
    """One step of each on the same batch; the loss is the first one's."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        variables, one, loss = first.update(variables, state[0], batch, received, key)
        variables, two, _ = second.update(variables, state[1], batch, received, key)
        return variables, (one, two), loss

    return LocalStep(
        init=lambda variables: (first.init(variables), second.init(variables)), update=update
    )


def averaging_statistics() -> ServerUpdate:
    """Averaging whose state is the global `batch_stats`, the mean of all that clients sent.

    Before the first round they are the initial model's.
    """
    plain = averaging()

    def init(shared: PyTree, personal: PyTree) -> PyTree:
        return join(shared, personal)[STATISTICS]

    def update(shared: PyTree, uploads: Uploads, state: PyTree) -> tuple[PyTree, PyTree]:
        mean, _ = plain.update(shared, uploads, ())
        return mean, weighted_mean(uploads.messages, uploads.weights)

    return ServerUpdate(init, update)


def send_statistics(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """A client's last act: it sends its running statistics beside the shared leaves."""
    return trained.variables, received.memory, trained.variables[STATISTICS]


def start_with(init: Callable, *, adapter: bool, gates: bool) -> Callable:
    """A method's `init` that first makes the adapter or the gates where the variables have none."""

    def start(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if adapter and COLLECTION not in variables:
            norms = jax.tree_util.tree_leaves_with_path(variables.get(STATISTICS, {}))
            layers = {"/".join(path_names(path[:-1])): leaf.size for path, leaf in norms}
            dtype = parameter_dtype(variables)
            made = init_adapter(jax.random.fold_in(key, 3), layers, dtype)
            variables = {**variables, COLLECTION: made}
        if gates and STATISTICS in variables:
            variables = with_gates(variables)
        return init(key, variables, num_clients)

    return start
