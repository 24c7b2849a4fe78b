"""FedIG and FedIG-A: client-agnostic learning with mixed statistics, and a zero-shot adapter."""

from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import averaging
from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.client import Trained
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep, Objective, Value, in_turn, minimizing
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning, method_of, supervised
from fedjax_bn.models.classifier import readable_images
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.normalization.adapter import COLLECTION, adapted_statistics, with_adapter
from fedjax_bn.normalization.batch_instance import gated_statistics, keep_gates, with_gates
from fedjax_bn.normalization.calls import require_batch_norm
from fedjax_bn.normalization.mixig import Mixing, choose_mixing, mixed_statistics
from fedjax_bn.sharing import STATISTICS, PyTree, SharingRule, Variables, all_but_batch_norm, join
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

# (features f[B, ...], mixed features f[B, ...]) -> f[B], the distance of a sample's two passes
Distance = Callable[[jax.Array, jax.Array], jax.Array]
_Cafl = Literal["sum", "mean"]


@bounded
def fedig(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    lambda_1: AtLeast0 = 0.1,
    lambda_2: AtLeast0 = 4.0,
    cafl: Distance | _Cafl = "mean",
    mixing: Mixing | str = "uniform",
    adapter: bool = False,
    gates: bool = False,
    share: SharingRule = all_but_batch_norm,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""FedBN whose clients also learn features that do not depend on the client.

    $L_{CE} + \lambda_1 L_{CACL} + \lambda_2 L_{CAFL}$ (Eq. 2 to 6)

    Every batch passes a second time. There, each sample's statistics are mixed with the server's
    global ones (`mixing`), in every batch norm with spatial axes. CAFL pulls the features of both
    passes together; CACL trains the classifier alone to read the mixed features. With both lambdas
    0 it is FedBN. The reported loss is L_CE. The federation's clients predict with their running
    statistics, even if there is an adapter; with gates, by the gates.

    With `adapter` it is FedIG-A: each step of the main network is followed by a step of the
    zero-shot adapter on the same batch, with the main network frozen (Eq. 8 and 9, Table 13). The
    adapter is the collection `adapter`, which is shared and averaged. If the given variables lack
    it, `init` adds it for the batch norms with spatial axes, found by tracing the model.

    Args:
      lambda_1: weight of CACL, at least 0.
      lambda_2: weight of CAFL, at least 0.
      cafl: how CAFL combines a sample's F features. "sum" is the squared norm as printed, which
        diverged or made all features equal from random weights and from ImageNet's; "mean" divides
        it by F and trains. In Python also a function `distance(features, mixed) -> f[B]`.
      mixing: `mixing(key)` -> the rule of the second pass, or its text; MixIG with u ~ U(0, 1) by
        default. `normalization.mixig.choose_mixing` lists the others (Tables 1, 3b and 6).
      adapter: whether `optimizer` also trains the zero-shot adapter, with a separate state.
      gates: whether the local pass is batch-instance normalization with learned gates, for
        `adaptation.learned_alpha` (BIN with MixIG, Table 3c); `init` adds the gates. With `adapter`
        they raise ValueError, and so does a model without batch norm.
      share: which leaves are averaged.
    """
    if adapter and gates:
        raise ValueError("fedig: adapter and gates exclude each other, both choose alpha: use one")
    learned, federate_options = learning(model, classifier="fedig", **options)
    mixing = choose_mixing(mixing) if isinstance(mixing, str) else mixing
    if gates:
        optimizer = keep_gates(optimizer)
    rule = gated_statistics if gates else None
    objective = client_agnostic_objective(learned, lambda_1, lambda_2, mixing, rule, cafl=cafl)
    step = minimizing(objective, optimizer)
    if adapter:
        # The adapter's step reads the weights that the main network's step has just moved.
        step = in_turn(step, _adapter_step(learned, optimizer))

    def start(key: jax.Array, variables: Variables) -> Variables:
        variables = require_batch_norm("fedig", variables, "use another method")
        if adapter and COLLECTION not in variables:
            images = readable_images(model, variables)
            variables = with_adapter(stream(key, "adapter"), model, variables, images)
        return with_gates(variables) if gates else variables

    method = method_of(
        step,
        share=share,
        # The global statistics: the clients' mean, or in the first round the initial model's.
        server=averaging(
            lambda shared, personal: join(shared, personal)[STATISTICS],
            lambda sent, aggregate: aggregate.message,
        ),
        finish=_send_statistics,
        start=start,
        **{"statistics": rule} | federate_options,
    )
    notes: tuple[str, ...] = ()
    if isinstance(cafl, str) and lambda_2:
        reason = "cafl=sum, as the paper prints it, diverges at the paper's rate; cafl=mean trains"
        notes = (f"CAFL is the {cafl} over features (lambda_2={lambda_2:g} of it): {reason}",)
    serves = ("zero_shot_adapter",) * adapter + ("learned_alpha",) * gates
    return method._replace(serves=serves, notes=notes)


def _send_statistics(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    return trained.variables, received.memory, trained.variables[STATISTICS]


class _FedIGOptions(OptionsButServer, total=False):
    """Those arguments of `fedig` that `fediga` passes on; `fedig` has their defaults."""

    lambda_1: AtLeast0
    lambda_2: AtLeast0
    cafl: Distance | _Cafl
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

    The main network trains as if there were no adapter, so that testing the same federation with
    `adaptation.running` gives FedIG.

    Args:
      model, optimizer, share, **options: as in `fedig`.
    """
    return fedig(model, optimizer, adapter=True, share=share, **options)


def client_agnostic_objective(
    learned: Learning,
    lambda_1: float = 0.1,
    lambda_2: float = 4.0,
    mixing: Mixing = mixed_statistics,
    statistics: StatisticsRule | None = None,
    *,
    cafl: Distance | _Cafl = "sum",
) -> Objective:
    r"""Returns the objective of `fedig`, with "sum" instead of "mean" as the default of `cafl`.

    With "sum", $L_{CAFL} = \Vert f_i - f_i^{mix} \Vert^2$, a mean over valid samples. L_CACL is the
    classifier's cross entropy on the mixed features, which pass no gradient. `mixing` is a
    function. `statistics` is the rule of the local pass, by default the batch's own statistics.
    `received.server` holds the global `batch_stats`.
    """
    # Without the second pass this is FedBN bit for bit, and as fast.
    if lambda_1 == lambda_2 == 0 and statistics is None:
        return supervised(learned)

    def distance(features: jax.Array, mixed: jax.Array) -> jax.Array:
        if not isinstance(cafl, str):
            return cafl(features, mixed)
        squares = jnp.square(features - mixed).reshape(len(features), -1)
        return squares.sum(1) if cafl == "sum" else squares.mean(1)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        # Both passes use the same key, so that dropout drops the same units.
        loss, local = learned.trained(
            variables, images, batch, key, statistics=statistics, wanted=["features"]
        )
        if lambda_1 == lambda_2 == 0:
            return loss, (loss, local.moved)
        # Only the local pass moves running statistics: what this pass moves is dropped.
        of_server = {**variables, STATISTICS: received.server}
        rule = mixing(stream(key, "mixed statistics"))
        # The gradient of CACL stops at the features; the gradient of CAFL does not.
        error, mixed = learned.trained(
            of_server, images, batch, key, statistics=rule, wanted=["frozen features"]
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
        # An unseen client would have these statistics, which the adapter learns to correct.
        received_statistics = {**variables, STATISTICS: received.server}
        out = forward(learned.model, received_statistics, images, statistics=rule, valid=valid)
        value = learned.loss(out.outputs, batch)
        return value, (value, {})

    return minimizing(loss, optimizer, (COLLECTION,))
