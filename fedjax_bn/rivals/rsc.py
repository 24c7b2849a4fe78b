"""RSC (Huang, Wang, Xing & Huang, ECCV 2020): the features that decide most are muted."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Share, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.features import ClassifiedBy
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received

PyTree = Any


@bounded
def rsc(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    features: Share = 0.3333333333333333,
    batch: Share = 0.3333333333333333,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients minimize CE(classify(f * mask)), representation self-challenging.

    $g = \partial \, logit_y / \partial f$

    mutes the share `features` of each sample's features with the largest g, and keeps that for the
    share `batch` of the samples whose probability of y falls most by it. No gradient passes through
    the mask. Only the model travels. The reported loss is that with muted features. With
    either share 0 it is FedAvg.

    It is DomainBed's form (Gulrajani & Lopez-Paz 2021), on what the classifier reads; the authors'
    mutes cells or channels of the last map. Differs from it: the shares are counted, rounded down,
    where it takes those at or above a percentile, up to one more.

    Args:
      model: images -> logits; `fedjax_bn.models.features` defines its features.
      features: share of a sample's features, in [0, 1); 1/3 as in DomainBed.
      batch: share of the valid samples of a batch, in [0, 1); 1/3 as in DomainBed.
      optimizer, **options: as in `fedavg`.

    Raises:
      ValueError: at `round`, the model's features are not found.
    """
    learned, rest = learning(model, classifier="rsc", **options)
    objective = _self_challenging(learned, features, batch)
    return method_of(gradient_step(differentiate(objective), optimizer), **rest)


def _self_challenging(learned: Learning, features: float, share: float) -> Objective:
    """Returns the objective of `rsc`: `features` of a sample muted in a `share` of the samples."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        del received
        images, valid = learned.read(variables, batch, key), batch["valid"]
        options = {"train": True, "valid": valid, "key": key}
        out = forward(learned.model, variables, images, wanted=["features"], **options)

        def classify(given: jax.Array) -> jax.Array:
            # The features are replaced, so that this pass computes the classifier alone.
            replaced = ClassifiedBy(learned.model, lambda classify, features: classify(given))
            return forward(replaced, variables, images, **options).outputs

        fixed = jax.lax.stop_gradient(out.features)
        mask = jax.lax.stop_gradient(
            _challenge(classify, fixed, out.outputs, batch["label"], valid, features, share)
        )
        loss = learned.task.loss(classify(out.features * mask), batch["label"], valid)
        return loss, (loss, out.moved)

    return objective


def _challenge(
    classify: Any,
    features: jax.Array,
    logits: jax.Array,
    label: jax.Array,
    valid: jax.Array,
    muted: float,
    share: float,
) -> jax.Array:
    """Returns the mask f[B, F] of zeros and ones, see `rsc`.

    `classify` maps features f[B, F] to logits f[B, classes], each row by itself; `muted` is the
    share of the features and `share` that of the valid samples.
    """

    def of_label(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, label[:, None], axis=-1)[:, 0]

    gradient = jax.grad(lambda f: of_label(classify(f)).sum())(features)
    # By rank and not by a percentile: ties would mute more than the share.
    keep = (_rank(gradient) >= int(muted * features.shape[-1])).astype(features.dtype)
    before, after = (of_label(jax.nn.softmax(x)) for x in (logits, classify(features * keep)))
    falls = jnp.where(valid, before - after, -jnp.inf)
    count = jnp.floor(share * valid.sum(dtype=falls.dtype))
    chosen = valid & (_rank(falls).astype(count.dtype) < count)
    return jnp.where(chosen[:, None], keep, 1)


def _rank(values: jax.Array) -> jax.Array:
    """Returns the place of each value along the last axis, 0 for the largest."""
    return jnp.argsort(jnp.argsort(values, descending=True, stable=True), stable=True)
