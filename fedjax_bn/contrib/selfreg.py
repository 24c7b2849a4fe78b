"""SelfReg (Kim et al., ICCV 2021): pulls samples of one class together, without negatives."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, AtLeast0, bounded
from fedjax_bn.contrib.parts import draw_dense
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, minimizing
from fedjax_bn.methods.learning import Learning, Options, learning, method_of
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.normalization.layer import moments
from fedjax_bn.sharing import PyTree, Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

COLLECTION = "projection"
_WIDE = 2048  # a projection of so many features does not widen them
_EPSILON = 1e-5  # PyTorch's default for batch norm


@bounded
def selfreg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    feature: AtLeast0 = 0.3,
    beta: Above0 = 0.5,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients minimize CE + min(CE, 1) (gap(o) + feature * gap(f)).

    $gap(o) = l \, MSE(o, o_2) + (1 - l) MSE(o, l o_2 + (1 - l) o_3)$

    $gap(f) = l \, MSE(f, q_2) + (1 - l) MSE(f, l q_2 + (1 - l) q_3)$

    with $l \sim Beta(\beta, \beta)$, one number for each batch. o are the logits, f the features
    and q their projection by three dense layers with batch norm. Permutations within each class of
    the batch choose the samples 2 and 3. The factor min(CE, 1) passes no gradient. The projection,
    the collection `projection`, travels with the model and does not predict. The reported loss is
    CE.

    This is DomainBed's form (Gulrajani & Lopez-Paz 2021), without the authors' averaging of weights
    and their curriculum over domains (a client has one domain).

    Args:
      feature: weight of the features' gap, at least 0; 0.3 as in DomainBed.
      beta: parameter of the distribution of l, above 0; 0.5 as in DomainBed.
    """
    learned, federate_options = learning(model, classifier="selfreg", **options)
    objective = self_regularized_objective(learned, feature, beta)

    def start(key: jax.Array, variables: Variables) -> Variables:
        sizes, layers = sizes_of(model, variables), {}
        wide = sizes.features if sizes.features == _WIDE else 2 * sizes.features
        widths = (sizes.features, wide, wide, sizes.features)
        for i, layer_key in enumerate(jax.random.split(stream(key, "projection"), 3)):
            linear = draw_dense(layer_key, widths[i], widths[i + 1], sizes.dtype)
            norm = {"scale": jnp.ones_like(linear["bias"]), "bias": jnp.zeros_like(linear["bias"])}
            dense = {"kernel": linear["kernel"], "dense_bias": linear["bias"]}
            layers[f"layer{i + 1}"] = dense | norm
        return {COLLECTION: layers} | variables

    step = minimizing(objective, optimizer, ("params", COLLECTION))
    return method_of(step, start=start, **federate_options)


def self_regularized_objective(learned: Learning, feature: float, beta: float) -> Objective:
    """Returns the objective of `selfreg`, for variables with `projection`."""

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, label, valid = learned.read(variables, batch, key), batch["label"], batch["valid"]
        plain = without(variables, COLLECTION)
        loss, out = learned.trained(plain, images, batch, key, wanted=["features"])
        first_key, second_key, share_key = jax.random.split(stream(key, "pairs"), 3)
        pair = [partners_of_class(pair_key, label, valid) for pair_key in (first_key, second_key)]
        share = jax.random.beta(share_key, beta, beta, (), loss.dtype)
        projected = _project(variables[COLLECTION], out.features, valid)
        gap = _gap(out.outputs, out.outputs, pair, share)
        gap += feature * _gap(out.features, projected, pair, share)
        # The gap counts less as the classes are learned; this weight passes no gradient.
        factor = jax.lax.stop_gradient(jnp.minimum(loss, 1))
        return loss + factor * masked_mean(gap, valid), (loss, out.moved)

    return objective


def _gap(x: jax.Array, partners: jax.Array, pair: list[jax.Array], share: jax.Array) -> jax.Array:
    """Returns l (x - o2)^2 + (1 - l) (x - (l o2 + (1 - l) o3))^2, mean over entries, f[B]."""
    two, three = (partners[index] for index in pair)
    mixed = share * two + (1 - share) * three
    near, far = (jnp.square(x - target).mean(-1) for target in (two, mixed))
    return share * near + (1 - share) * far


def partners_of_class(key: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns a random valid sample of the same class for each, i32[B], by permutations.

    It may be the sample itself; padding samples get padding samples.
    """
    # Padding counts as a separate class, after all others.
    kind = jnp.where(valid, label, jnp.iinfo(label.dtype).max)
    # Two sorts by class, in random and in original order; equal ranks are paired.
    random = jax.random.uniform(key, label.shape)
    to, of = jnp.lexsort((random, kind)), jnp.argsort(kind, stable=True)
    return jnp.zeros_like(to).at[of].set(to)


def _project(layers: PyTree, x: jax.Array, valid: jax.Array) -> jax.Array:
    """Projects f[B, F] to f[B, F]: dense and batch norm three times, with ReLU between them."""
    for i in range(3):
        layer = {name: leaf.astype(x.dtype) for name, leaf in layers[f"layer{i + 1}"].items()}
        x = x @ layer["kernel"] + layer["dense_bias"]
        # By the batch alone: only training uses the projection, so it needs no running statistics.
        mean, var, _ = moments(x, valid)
        x = (x - mean) * jax.lax.rsqrt(var + _EPSILON) * layer["scale"] + layer["bias"]
        x = x if i == 2 else jax.nn.relu(x)
    return x
