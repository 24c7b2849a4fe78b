"""FedIG and FedIG-A: client-agnostic learning with mixed statistics, and a zero-shot adapter."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate, averaging, cast_like
from fedjax_bn.arguments.ranges import AtLeast0, Cafl, bounded
from fedjax_bn.client import Trained
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import (
    Batch,
    LocalStep,
    Objective,
    differentiate,
    gradient_step,
    in_turn,
)
from fedjax_bn.methods.learning import (
    Learning,
    OptionsButServer,
    learning,
    method_of,
    supervised,
)
from fedjax_bn.models.forward import forward
from fedjax_bn.models.sources import readable_images
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.normalization.adapter import COLLECTION, adapted_statistics, with_adapter
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.normalization.mixig import mixed_statistics
from fedjax_bn.normalization.mixing import Mixing, choose_mixing
from fedjax_bn.sharing import (
    STATISTICS,
    SharingRule,
    Variables,
    all_but_batch_norm,
    join,
)
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean, require_classifier

PyTree = Any
# (features f[B, ...], mixed features f[B, ...]) -> f[B]: how far apart a sample's two passes are
Distance = Callable[[jax.Array, jax.Array], jax.Array]


@bounded
def fedig(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    lambda_1: AtLeast0 = 0.1,
    lambda_2: AtLeast0 = 4.0,
    cafl: Distance | Cafl = "mean",
    mixing: Mixing | str = "uniform",
    adapter: bool = False,
    gates: bool = False,
    share: SharingRule = all_but_batch_norm,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """FedBN whose clients minimize L_CE + lambda_1 L_CACL + lambda_2 L_CAFL (Eq. 2 to 6).

    A second pass of every batch is normalized with the sample's statistics mixed with the global
    ones that the server sends (`mixing`), in every batch norm with spatial axes; CAFL pulls its
    features to the local ones, CACL teaches the classifier, and only the classifier, to read them.
    With both lambdas 0 it is FedBN. The reported loss is L_CE. Its own clients predict by their
    running statistics, also where they have an adapter, and by their gates where they have these.

    With `adapter` it is FedIG-A: after each step of the main network, which is frozen then, a step
    of the zero-shot adapter follows on the same batch (Eq. 8 and 9, Table 13). Its parameters are
    the collection `adapter`, shared and averaged. Where the given variables have none, `init` makes
    them for the batch norms with spatial axes, which it finds by tracing the model.

    Args:
      model: one with at least one batch norm, images -> logits;
        `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      lambda_1: weight of CACL, at least 0.
      lambda_2: weight of CAFL, at least 0.
      cafl: CAFL over a sample's F features: sum, the norm as printed, for a start from ImageNet's
        weights, or mean, the sum with lambda_2 / F, which also trains from random ones, where the
        sum diverges or the features collapse (docs/results.md). In Python also a function
        `distance(features, mixed) -> f[B]`.
      mixing: `mixing(key)` -> the rule of the second pass, or its text: MixIG with u ~ U(0, 1) by
        default, for others see `mixing.choose_mixing` (Tables 1, 3b and 6).
      adapter: whether the zero-shot adapter is trained, by `optimizer` with a state of its own.
      gates: whether the local pass is batch-instance normalization with learned gates, for
        `adaptation.learned_alpha` (BIN with MixIG, Table 3c); `init` adds the gates.
      share: which leaves are averaged.
      **options: those of `fedavg` but `server`.

    Raises:
      ValueError: a lambda is negative, the text of `cafl` or `mixing` is wrong, or there are both
        adapter and gates; at `init`, where the model has no batch norm; at `round`, where its
        features are not to be found.
    """
    if adapter and gates:
        raise ValueError("fedig: adapter and gates exclude each other, both choose alpha: use one")
    learned, rest = learning(model, **options)
    require_classifier("fedig", learned.task)
    mixing = choose_mixing(mixing) if isinstance(mixing, str) else mixing
    notes = _notes(cafl, lambda_2) if isinstance(cafl, str) and lambda_2 else ()
    if gates:
        optimizer = keep_gates(optimizer)
    rule = gated_statistics if gates else None
    objective = client_agnostic(learned, lambda_1, lambda_2, mixing, rule, cafl=cafl)
    step = gradient_step(differentiate(objective), optimizer)
    if adapter:
        step = in_turn(step, adapter_step(learned, optimizer))
    method = method_of(
        step,
        share=share,
        server=_averaging_statistics(),
        finish=_send_statistics,
        **{"statistics": rule} | rest,
    )
    serves = ("zero_shot_adapter",) * adapter + ("learned_alpha",) * gates
    init = _start_with(model, method.init, adapter=adapter, gates=gates)
    return method._replace(init=init, serves=serves, notes=notes)


class FedIGOptions(OptionsButServer, total=False):
    """The arguments of `fedig`, which has their defaults."""

    lambda_1: AtLeast0
    lambda_2: AtLeast0
    cafl: Distance | Cafl
    mixing: Mixing | str
    gates: bool


@bounded
def fediga(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    share: SharingRule = all_but_batch_norm,
    **options: Unpack[FedIGOptions],
) -> FederatedMethod:
    """FedIG-A: `fedig` with the zero-shot adapter, for `adaptation.zero_shot_adapter`.

    The main network is trained as if there were no adapter, so that the same federation tested with
    `adaptation.running` is FedIG.

    Args:
      model, optimizer, share, **options: those of `fedig`.
    """
    return fedig(model, optimizer, adapter=True, share=share, **options)


def client_agnostic(
    learned: Learning,
    lambda_1: float = 0.1,
    lambda_2: float = 4.0,
    mixing: Mixing = mixed_statistics,
    statistics: StatisticsRule | None = None,
    *,
    cafl: Distance | Cafl = "sum",
) -> Objective:
    """The objective L_CE + lambda_1 L_CACL + lambda_2 L_CAFL (Eq. 2 to 6); arguments of `fedig`.

    L_CAFL = mean_i ||f_i - f_mixed,i||^2, L_CACL = CE(C(stop_gradient(f_mixed)), y); means over
    valid samples. `statistics` is the rule of the local pass, by default the batch's own
    statistics. `received.server` holds the global `batch_stats`.
    """
    if lambda_1 == lambda_2 == 0 and statistics is None:
        return supervised(learned)
    distance = _choose_distance(cafl) if isinstance(cafl, str) else cafl

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        # The same key in both passes: the same units are dropped.
        again = {"train": True, "valid": valid, "key": key}
        local = forward(
            learned.model, variables, images, statistics=statistics, wanted=["features"], **again
        )
        loss = learned.task.loss(local.outputs, batch["label"], valid)
        if lambda_1 == lambda_2 == 0:
            return loss, (loss, local.moved)
        received_statistics = {**variables, STATISTICS: received.server}
        rule = mixing(stream(key, "mixed statistics"))
        mixed = forward(
            learned.model,
            received_statistics,
            images,
            statistics=rule,
            wanted=["frozen features"],
            **again,
        )
        gaps = distance(local.features, mixed.features)
        error = learned.task.loss(mixed.outputs, batch["label"], valid)
        value = loss + lambda_1 * error + lambda_2 * masked_mean(gaps, valid)
        return value, (loss, local.moved)

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


def adapter_step(learned: Learning, optimizer: optax.GradientTransformation) -> LocalStep:
    """A step of the adapter alone along its gradient; the main network is frozen (Eq. 8, 9)."""

    def loss(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        rule = adapted_statistics(variables[COLLECTION], stream(key, "adapted statistics"))
        received_statistics = {**variables, STATISTICS: received.server}
        out = forward(learned.model, received_statistics, images, statistics=rule, valid=valid)
        value = learned.task.loss(out.outputs, batch["label"], valid)
        return value, (value, {})

    return gradient_step(differentiate(loss, (COLLECTION,)), optimizer, (COLLECTION,))


def _notes(cafl: str, weight: float) -> tuple[str]:
    """A sentence on the start that a reading of CAFL needs."""
    why = (
        "as the paper prints it for a start from ImageNet's weights; from random weights the sum "
        "diverges or loses the features, and fedig.cafl=mean does not"
        if cafl == "sum"
        else "which also trains from random weights; the paper prints the sum, for a start from "
        "ImageNet's weights (fedig.cafl=sum)"
    )
    return (f"CAFL is the {cafl} over features (fedig.lambda_2={weight:g} of it), {why}",)


def _averaging_statistics() -> ServerUpdate:
    """Averaging that sends the global `batch_stats`, the mean of all that clients sent.

    Before the first round they are the initial model's.
    """
    plain = averaging()

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        variables = join(shared, personal)
        if STATISTICS not in variables:
            raise ValueError(
                "fedig mixes the statistics of batch norms, but the model has none: build it with "
                "fedjax_bn.normalization.BatchNorm or flax's own, or use another method"
            )
        return ServerState(sent=variables[STATISTICS])

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, _ = plain.update(shared, aggregate, state)
        return mean, ServerState(sent=cast_like(aggregate.message, state.sent))

    return ServerUpdate(init, update)


def _send_statistics(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """A client's last act: it sends its running statistics beside the shared leaves."""
    return trained.variables, received.memory, trained.variables[STATISTICS]


def _start_with(model: Any, init: Callable, *, adapter: bool, gates: bool) -> Callable:
    """A method's `init` that first makes the adapter or the gates where the variables have none."""

    def start(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        if adapter and STATISTICS in variables and COLLECTION not in variables:
            images = readable_images(model, variables)
            variables = with_adapter(stream(key, "adapter"), model, variables, images)
        if gates and STATISTICS in variables:
            variables = with_gates(variables)
        return init(key, variables, num_clients)

    return start
