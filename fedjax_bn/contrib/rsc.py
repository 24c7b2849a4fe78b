"""RSC (Huang, Wang, Xing & Huang, ECCV 2020): mutes the features with the largest gradients."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Share, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import ClassifiedBy
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received


@bounded
def rsc(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    features: Share = 0.3333333333333333,
    batch: Share = 0.3333333333333333,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients minimize CE(classify(f * mask)): representation self-challenging.

    $g = \partial \, logit_y / \partial f$

    The mask mutes a fraction `features` of each sample's features, those with the largest g, but
    only in a fraction `batch` of the samples, those whose probability of y it lowers most. No
    gradient passes through the mask. Only the model travels. The reported loss is the loss with
    muted features. If either fraction is 0 it is FedAvg.

    This is DomainBed's form (Gulrajani & Lopez-Paz 2021), which mutes the classifier's input; the
    authors' form mutes cells or channels of the last map. Differs from DomainBed: numbers are the
    fractions rounded down, not all values at or above a percentile.

    Args:
      features: fraction of a sample's features, in [0, 1); 1/3 as in DomainBed.
      batch: fraction of the valid samples of a batch, in [0, 1); 1/3 as in DomainBed.
    """
    learned, federate_options = learning(model, classifier="rsc", **options)
    objective = self_challenging_objective(learned, features, batch)
    return method_of(minimizing(objective, optimizer), **federate_options)


def self_challenging_objective(learned: Learning, features: float, share: float) -> Objective:
    """Returns the objective of `rsc`; `share` is the fraction of the samples."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        options = {"train": True, "valid": valid, "key": key}
        out = forward(learned.model, variables, images, wanted=["features"], **options)

        def classify(muted: jax.Array) -> jax.Array:
            # The pass replaces the features, so that XLA computes the classifier alone.
            replaced = ClassifiedBy(learned.model, lambda classify, features: classify(muted))
            return forward(replaced, variables, images, **options).outputs

        def of_label(values: jax.Array) -> jax.Array:
            return jnp.take_along_axis(values, batch["label"][:, None], axis=-1)[:, 0]

        # The mask is chosen at fixed features, so that no gradient passes through the choice.
        fixed = jax.lax.stop_gradient(out.features)
        gradient = jax.grad(lambda f: of_label(classify(f)).sum())(fixed)
        # By rank and not by a percentile, by which ties would mute more than the fraction.
        keep = (_rank(gradient) >= int(features * fixed.shape[-1])).astype(fixed.dtype)
        before, after = (of_label(jax.nn.softmax(x)) for x in (out.outputs, classify(fixed * keep)))
        falls = jnp.where(valid, before - after, -jnp.inf)
        count = jnp.floor(share * valid.sum(dtype=falls.dtype))
        chosen = valid & (_rank(falls).astype(count.dtype) < count)
        mask = jnp.where(chosen[:, None], keep, 1)
        muted = out.features * jax.lax.stop_gradient(mask)
        loss = learned.loss(classify(muted), batch)
        return loss, (loss, out.moved)

    return objective


def _rank(values: jax.Array) -> jax.Array:
    """Returns the place of each value along the last axis, 0 for the largest."""
    return jnp.argsort(jnp.argsort(values, descending=True, stable=True), stable=True)
