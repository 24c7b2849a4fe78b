"""FedIG and FedIG-A: client-agnostic learning with mixed statistics, and a zero-shot adapter."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import averaging
from fedjax_bn.arguments.ranges import AtLeast0, Cafl, bounded
from fedjax_bn.client import Trained
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import (
    Batch,
    LocalStep,
    Objective,
    Value,
    differentiate,
    gradient_step,
    in_turn,
)
from fedjax_bn.methods.learning import (
    Learning,
    OptionsButServer,
    learning,
    method_of,
    require_batch_norm,
    supervised,
)
from fedjax_bn.models.classifier import readable_images
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.normalization.adapter import COLLECTION, adapted_statistics, with_adapter
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.normalization.mixig import Mixing, choose_mixing, mixed_statistics
from fedjax_bn.sharing import STATISTICS, SharingRule, Variables, all_but_batch_norm, join
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

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
    r"""FedBN whose clients also learn features that do not depend on the client.

    $L_{CE} + \lambda_1 L_{CACL} + \lambda_2 L_{CAFL}$ (Eq. 2 to 6)

    A second pass of every batch is normalized with the sample's statistics mixed with the global
    ones that the server sends (`mixing`), in every batch norm with spatial axes; CAFL pulls its
    features to the local ones, CACL teaches the classifier, and only the classifier, to read them.
    With both lambdas 0 it is FedBN. The reported loss is L_CE. Its own clients predict by their
    running statistics, also if they have an adapter, and by their gates if they have these.

    With `adapter` it is FedIG-A: after each step of the main network, which is frozen then, a step
    of the zero-shot adapter follows on the same batch (Eq. 8 and 9, Table 13). Its parameters are
    the collection `adapter`, shared and averaged. If the given variables have none, `init` makes
    them for the batch norms with spatial axes, which it finds by tracing the model.

    Args:
      model: one with at least one batch norm, images -> logits; `fedjax_bn.models.features` defines
        its features.
      lambda_1: weight of CACL, at least 0.
      lambda_2: weight of CAFL, at least 0.
      cafl: CAFL over a sample's F features: sum, the norm as printed, for a start from ImageNet's
        weights, or mean, the sum with lambda_2 / F, which also trains from random ones, where the
        sum diverges or the features collapse (docs/results.md). In Python also a function
        `distance(features, mixed) -> f[B]`.
      mixing: `mixing(key)` -> the rule of the second pass, or its text: MixIG with u ~ U(0, 1) by
        default, for others see `mixig.choose_mixing` (Tables 1, 3b and 6).
      adapter: whether the zero-shot adapter is trained, by `optimizer` with a state of its own.
      gates: whether the local pass is batch-instance normalization with learned gates, for
        `adaptation.learned_alpha` (BIN with MixIG, Table 3c); `init` adds the gates.
      share: which leaves are averaged.
      optimizer, **options: those of `fedavg` but `server`.

    Raises:
      ValueError: there are both adapter and gates; at `init`, the model has no batch norm; at
        `round`, its features are not found.
    """
    if adapter and gates:
        raise ValueError("fedig: adapter and gates exclude each other, both choose alpha: use one")
    learned, rest = learning(model, classifier="fedig", **options)
    mixing = choose_mixing(mixing) if isinstance(mixing, str) else mixing
    if gates:
        optimizer = keep_gates(optimizer)
    rule = gated_statistics if gates else None
    objective = _client_agnostic(learned, lambda_1, lambda_2, mixing, rule, cafl=cafl)
    step = gradient_step(differentiate(objective), optimizer)
    if adapter:
        # The adapter's step reads the weights that the main network's step has just moved.
        step = in_turn(step, _adapter_step(learned, optimizer))

    def start(key: jax.Array, variables: Variables) -> Variables:
        require_batch_norm("fedig", variables, "use another method")
        if adapter and COLLECTION not in variables:
            images = readable_images(model, variables)
            variables = with_adapter(stream(key, "adapter"), model, variables, images)
        return with_gates(variables) if gates else variables

    def send_statistics(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        return trained.variables, received.memory, trained.variables[STATISTICS]

    method = method_of(
        step,
        share=share,
        # Global statistics, the mean of the clients'; before the first round the initial model's.
        server=averaging(
            lambda shared, personal: join(shared, personal)[STATISTICS],
            lambda sent, aggregate: aggregate.message,
        ),
        finish=send_statistics,
        start=start,
        **{"statistics": rule} | rest,
    )
    notes: tuple[str, ...] = ()
    if isinstance(cafl, str) and lambda_2:
        why = (
            "as the paper prints it for a start from ImageNet's weights; from random weights the "
            "sum diverges or loses the features, and fedig.cafl=mean does not"
            if cafl == "sum"
            else "which also trains from random weights; the paper prints the sum, for a start "
            "from ImageNet's weights (fedig.cafl=sum)"
        )
        notes = (f"CAFL is the {cafl} over features (fedig.lambda_2={lambda_2:g} of it), {why}",)
    serves = ("zero_shot_adapter",) * adapter + ("learned_alpha",) * gates
    return method._replace(serves=serves, notes=notes)


class _FedIGOptions(OptionsButServer, total=False):
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
    **options: Unpack[_FedIGOptions],
) -> FederatedMethod:
    """FedIG-A: `fedig` with the zero-shot adapter, for `adaptation.zero_shot_adapter`.

    The main network is trained as if there were no adapter, so that the same federation tested with
    `adaptation.running` is FedIG.

    Args:
      model, optimizer, share, **options: those of `fedig`.
    """
    return fedig(model, optimizer, adapter=True, share=share, **options)


def _client_agnostic(
    learned: Learning,
    lambda_1: float = 0.1,
    lambda_2: float = 4.0,
    mixing: Mixing = mixed_statistics,
    statistics: StatisticsRule | None = None,
    *,
    cafl: Distance | Cafl = "sum",
) -> Objective:
    r"""Returns the objective of `fedig`, whose arguments it has.

    $L_{CAFL} = \Vert f_i - f_i^{mix} \Vert^2$, a mean over valid samples, and L_CACL is the cross
    entropy of the classifier on the mixed features, which pass no gradient. `statistics` is the
    rule of the local pass, by default the batch's own statistics. `received.server` holds the
    global `batch_stats`.
    """
    # Without the second pass it is FedBN to the bit, and as fast.
    if lambda_1 == lambda_2 == 0 and statistics is None:
        return supervised(learned)

    def distance(features: jax.Array, mixed: jax.Array) -> jax.Array:
        if not isinstance(cafl, str):
            return cafl(features, mixed)
        squares = jnp.square(features - mixed).reshape(len(features), -1)
        return squares.sum(1) if cafl == "sum" else squares.mean(1)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        # The same key in both passes: the same units are dropped.
        loss, local = learned.trained(
            variables, images, batch, key, statistics=statistics, wanted=["features"]
        )
        if lambda_1 == lambda_2 == 0:
            return loss, (loss, local.moved)
        # What this pass moves is dropped: running statistics are the local pass's.
        error, mixed = learned.trained(
            {**variables, STATISTICS: received.server},
            images,
            batch,
            key,
            statistics=mixing(stream(key, "mixed statistics")),
            # The gradient of CACL stops at the features, that of CAFL does not.
            wanted=["frozen features"],
        )
        gaps = distance(local.features, mixed.features)
        value = loss + lambda_1 * error + lambda_2 * masked_mean(gaps, batch["valid"])
        return value, (loss, local.moved)

    return objective


def _adapter_step(learned: Learning, optimizer: optax.GradientTransformation) -> LocalStep:
    """Returns a step of the adapter alone; the main network is frozen (Eq. 8 and 9)."""

    def loss(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        rule = adapted_statistics(variables[COLLECTION], stream(key, "adapted statistics"))
        # The statistics that an unseen client would have, which the adapter is to correct.
        received_statistics = {**variables, STATISTICS: received.server}
        out = forward(learned.model, received_statistics, images, statistics=rule, valid=valid)
        value = learned.task.loss(out.outputs, batch["label"], valid)
        return value, (value, {})

    return gradient_step(differentiate(loss, (COLLECTION,)), optimizer, (COLLECTION,))
