"""Adaptations without gradients: mixtures with each sample's own statistics, and T3A."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation, logits_and_seen, stateless
from fedjax_bn.arguments.ranges import AtLeast0, Seed, UpTo1, Views, bounded
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.models.classifier import classifier_path, entropy, require_linear
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import Layer, Statistics, StatisticsRule, running_statistics
from fedjax_bn.normalization.adapter import COLLECTION, adapted_statistics
from fedjax_bn.normalization.batch_instance import gated_statistics
from fedjax_bn.normalization.instance import deviations, handed_over, instance_moments, positioned
from fedjax_bn.normalization.layer import is_spatial, moments
from fedjax_bn.normalization.mixig import mix_statistics
from fedjax_bn.sharing import Variables, path_names


def record_alphas(model: Any) -> Callable[[Variables, jax.Array], dict[str, jax.Array]]:
    """Returns `record(variables, images) -> {layer name: alpha f[B]}` (FedIG, Fig. 4a, 7 to 9).

    `jit` sorts the layers by name; `normalization.calls.in_forward_order` restores their order.
    """

    def record(variables: Variables, images: jax.Array) -> dict[str, jax.Array]:
        statistics = adapted_statistics(variables.get(COLLECTION, {}))
        passed = forward(model, variables, images, statistics=statistics, wanted=["recorded"])
        leaves = jax.tree_util.tree_leaves_with_path(passed.recorded)
        return {"/".join(path_names(path[:-1])): alpha for path, alpha in leaves}

    return record


@bounded
def fixed_alpha(model: Any, alpha: UpTo1 | jax.Array = 0.5) -> Adaptation:
    """Applies Eq. 7 with a fixed alpha in all layers; 0 is `running`, 1 instance normalization.

    After You et al. 2021 (Test-time batch statistics calibration for covariate shift). Differs from
    the paper: mixes in the sample's statistics, not the batch's, as in FedIG's comparison.

    Args:
      alpha: weight of the sample's own statistics, in [0, 1]; f[B] for one weight per sample.
    """
    rule = _mixed_statistics(lambda layer, size, dtype: alpha)
    # With one alpha per sample the batch cannot be cut, because alpha has its full length.
    return stateless(model, rule, per_sample=jnp.ndim(alpha) == 0)


@bounded
def random_alpha(model: Any, seed: Seed = 0) -> Adaptation:
    """Applies Eq. 7 with alpha ~ U(0, 1), drawn for every sample and layer (FedIG, Table 3c)."""

    def predict(
        variables: Variables, key: jax.Array, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        key, noise_key = jax.random.split(key)

        def draw(layer: Layer, size: int, dtype: Any) -> jax.Array:
            return jax.random.uniform(layer.key(noise_key), (size,), dtype)

        rule = _mixed_statistics(draw)
        # The batch passes whole, because every chunk would draw the same alphas.
        return forward(model, variables, images, statistics=rule, valid=valid).outputs, key

    return Adaptation(lambda variables: jax.random.key(seed), predict)


def _mixed_statistics(weights: Callable[[Layer, int, Any], jax.Array | float]) -> StatisticsRule:
    """The rule of Eq. 7, in which `weights(layer, B, dtype)` returns alpha, a number or f[B]."""

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return running_statistics(layer, x)
        instance, received = deviations(layer, x)
        dtype = instance[0].dtype
        alpha = jnp.asarray(weights(layer, x.shape[0], dtype), dtype).reshape(-1, 1)
        mean, std = mix_statistics(instance, received, alpha)
        return handed_over(mean, std, layer, x)

    return rule


def learned_alpha(model: Any) -> Adaptation:
    """Batch-instance normalization (Nam & Kim, NeurIPS 2018) with gates learned in training."""
    return stateless(model, gated_statistics, per_sample=True)


@bounded
def iabn(model: Any, strength: AtLeast0 = 4.0) -> Adaptation:
    """Instance-aware batch norm of NOTE (Gong et al., NeurIPS 2022), on the trained model.

    The mean becomes mean + psi(mean_i - mean; k s_mean), and likewise the variance (Section 3.1).
    psi is soft shrinkage; s_mean = sqrt(var / n) and s_var = var sqrt(2 / (n - 1)) are the standard
    errors of a sample's mean and unbiased variance over its n positions. A layer with one position
    uses the running statistics.

    Args:
      strength: k, the number of standard errors that a deviation must exceed; at least 0.
    """

    def psi(x: jax.Array, threshold: jax.Array) -> jax.Array:
        return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0)

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        n = x[0, ..., 0].size
        if not is_spatial(x) or n == 1:
            return running_statistics(layer, x)
        own_mean, own_var = instance_moments(x, layer.columns)
        # Unbiased, because its standard error below is that of the unbiased variance.
        own_var = own_var * (n / (n - 1))
        mean, var = layer.mean.astype(own_mean.dtype), layer.var.astype(own_var.dtype)
        # With epsilon, so that a channel of variance 0 still has a standard error.
        floor = var + layer.epsilon
        mean = mean + psi(own_mean - mean, strength * jnp.sqrt(floor / n))
        var = var + psi(own_var - var, strength * floor * (2 / (n - 1)) ** 0.5)
        # The result is between two variances, but rounding may make it negative.
        return Statistics(positioned(mean, x), positioned(jnp.maximum(var, 0), x))

    return stateless(model, rule, per_sample=True)


@bounded
def mixnorm(
    model: Any,
    weight: UpTo1 = 0.05,
    *,
    views: Views = 5,
    view: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    seed: Seed = 0,
) -> Adaptation:
    """MixNorm (Hu et al. 2021): moments over a sample and its views, mixed with the running ones.

    Mean and variance over the positions of all views have weight m, the running ones 1 - m. Unlike
    in the paper these do not move with the stream, so that samples are independent (Table 3c).

    Args:
      weight: m, weight of the sample's own statistics, in [0, 1].
      views: number of views, including the original; FedIG uses 5.
      view: (key, images) -> augmented images of the same shape; by default a random crop with 0.7
        to 1 of each side, resized to the whole image, and a flip with probability 1/2.
      seed: seed of the random key in the carry.
    """
    view = view or _crop_and_flip

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return running_statistics(layer, x)
        # All originals, then all second views, ...: each sample with its views is its own batch.
        samples = x.reshape(views, -1, *x.shape[1:]).swapaxes(0, 1)
        own_mean, own_var, _ = jax.vmap(moments)(samples)
        mean = weight * own_mean + (1 - weight) * layer.mean.astype(own_mean.dtype)
        var = weight * own_var + (1 - weight) * layer.var.astype(own_var.dtype)
        mean, var = (positioned(jnp.tile(moment, (views, 1)), x) for moment in (mean, var))
        return Statistics(mean, var)

    def predict(
        variables: Variables, key: jax.Array, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        del valid  # padding cannot change the statistics of other samples
        key, *keys = jax.random.split(key, views)
        stacked = jnp.concatenate([images, *(view(view_key, images) for view_key in keys)])
        outputs = forward(model, variables, stacked, statistics=rule).outputs
        # The originals come first in the stacked batch.
        return jax.tree.map(lambda leaf: leaf[: len(images)], outputs), key

    return Adaptation(lambda variables: jax.random.key(seed), predict)


def _crop_and_flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """The default view of images f[B, H, W, C]; see `mixnorm`."""
    side_key, corner_key, flip_key = jax.random.split(key, 3)
    count, height, width, _ = images.shape
    dtype = images.dtype
    side = jax.random.uniform(side_key, (count, 1), dtype, 0.7, 1)
    corner = (1 - side) * jax.random.uniform(corner_key, (count, 2), dtype)
    size = jnp.asarray((height, width), dtype)

    def crop(image: jax.Array, side: jax.Array, corner: jax.Array) -> jax.Array:
        scale = jnp.broadcast_to(1 / side, (2,))
        return jax.image.scale_and_translate(
            image, image.shape, (0, 1), scale, -corner * size * scale, "linear", antialias=False
        )

    cropped = jax.vmap(crop)(images, side, corner)
    flips = jax.random.bernoulli(flip_key, shape=(count, 1, 1, 1))
    return jnp.where(flips, cropped[:, :, ::-1], cropped)


class _Supports(NamedTuple):
    """The carry of `t3a`: unit features f[C, M, F] and entropies f[C, M], 0 and inf if unused."""

    features: jax.Array
    entropy: jax.Array


@bounded
def t3a(model: Any, supports: Views = 20) -> Adaptation:
    """Classifies by class centres of the client's features (T3A, Iwasawa and Matsuo, NeurIPS 2021).

    A class is supported by the M features with the lowest entropy among its column of the
    classifier's kernel and the features that the classifier assigned to it. Its centre is the
    normalized sum of the normalized supports, its logit z . centre. Without a sample the centres
    are the normalized columns of the kernel, without bias. Running statistics; no gradient.

    In the authors' code (matsuolab/T3A) a column supports the class that the classifier assigns to
    it, so that a class can be without support.

    Args:
      supports: M; the carry takes M times the memory of the classifier's kernel.
    """

    def init(variables: Variables) -> _Supports:
        layer = variables["params"]
        for name in classifier_path("t3a", model, variables):
            layer = layer[name]
        # A column of the kernel is the first guess of where its class lies.
        rows = layer["kernel"].T.astype(promote(layer["kernel"].dtype, jnp.float32))
        logits = rows @ rows.T + layer.get("bias", jnp.zeros(len(rows))).astype(rows.dtype)
        # The classifier's own rows are the first supports of their classes.
        is_first = jnp.arange(supports) == 0
        features = jnp.where(is_first[:, None], _unit(rows)[:, None], 0)
        return _Supports(features, jnp.where(is_first, entropy(logits)[:, None], jnp.inf))

    def predict(
        variables: Variables, carry: _Supports, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Supports]:
        require_linear("t3a", model, variables, images)
        passed = forward(model, variables, images, wanted=["features"])
        features = passed.features.astype(carry.features.dtype)
        logits, seen = logits_and_seen(model, passed.outputs, valid)
        assigned = (logits.argmax(-1) == jnp.arange(len(carry.entropy))[:, None]) & seen
        entropies = jnp.where(assigned, entropy(logits).astype(carry.entropy.dtype), jnp.inf)
        # Unassigned samples have infinite entropy, so that all classes have arrays of one size.
        entropies = jnp.concatenate([carry.entropy, entropies], 1)
        # Numbers below M are stored supports, the others are samples of this batch.
        best = jnp.argsort(entropies, axis=1)[:, :supports]  # i[C, M]
        entropies = jnp.take_along_axis(entropies, best, 1)
        stored = jnp.take_along_axis(carry.features, jnp.minimum(best, supports - 1)[..., None], 1)
        of_batch = _unit(features)[jnp.maximum(best - supports, 0)]
        supports_after = jnp.where((best < supports)[..., None], stored, of_batch)
        # Unused places have infinite entropy and must add nothing to a class's sum.
        supports_after = jnp.where((entropies < jnp.inf)[..., None], supports_after, 0)
        outputs = features @ _unit(supports_after.sum(1)).T
        return outputs.astype(passed.outputs.dtype), _Supports(supports_after, entropies)

    return Adaptation(init, predict)


def _unit(x: jax.Array) -> jax.Array:
    """x f[..., F] over its norm; zeros stay zeros."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
