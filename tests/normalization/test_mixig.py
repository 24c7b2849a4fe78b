"""MixIG and MixStyle: Eq. 3 in NumPy, what u means, and that nothing received moves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import norm_nets as nets
from fedjax_bn.normalization import BatchNorm, normalize_with
from fedjax_bn.normalization.instance import instance_moments
from fedjax_bn.normalization.mixig import choose_mixing, mix_statistics, mixed_statistics

KEY = jax.random.key(3)


def layer_and_variables(channels=3):
    layer = BatchNorm()
    x = nets.images_of(5, shape=(4, 6, channels))
    return layer, nets.variables_of(layer, x), x


def apply_eagerly(rule, model, variables, x, valid=None, **options):
    with normalize_with(rule, valid):
        return model.apply(variables, x, **options)


def apply_with(rule, model, *arrays, **options):
    """The same as one program, not one an operation."""
    return jax.jit(partial(apply_eagerly, rule, model, **options))(*arrays)


def affine(normal, variables):
    return normal * variables["params"]["scale"] + variables["params"]["bias"]


def test_instance_variance_is_safe_far_from_zero():
    x = np.random.default_rng(0).normal(3e4, 1.0, (2, 64, 64, 3)).astype(np.float32)
    x[0, 0, 0] += 5
    _, var = instance_moments(jnp.asarray(x))
    np.testing.assert_allclose(var, x.astype(np.float64).var((1, 2)), rtol=1e-3)


def test_u_is_one_vector_a_layer_shared_by_the_batch(x64):
    """Every sample alone gives what it gives in the batch; channels differ."""
    layer, variables, x = layer_and_variables()
    rule = mixed_statistics(KEY)
    whole = apply_with(rule, layer, variables, x)
    one = jax.jit(partial(apply_eagerly, rule, layer))
    alone = np.concatenate([one(variables, np.asarray(x)[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(whole, alone, rtol=1e-12)
    seen = []

    def draw(key, shape, dtype):
        seen.append(jax.random.uniform(key, shape, dtype))
        return seen[-1]

    apply_eagerly(mixed_statistics(KEY, draw), layer, variables, x)
    (u,) = seen
    assert u.shape == (3,)
    assert len(np.unique(u)) == 3
    own, running = instance_moments(x), variables["batch_stats"]
    pairs = [(own[0], np.sqrt(own[1] + 1e-5)), (running["mean"], np.sqrt(running["var"] + 1e-5))]
    mean, std = (np.asarray(s)[:, None, None] for s in mix_statistics(*pairs, u))
    np.testing.assert_allclose(whole, affine((x - mean) / std, variables), rtol=1e-10)


def test_extrapolated_statistics_stay_finite():
    """u = -0.1 of a sample with a huge deviation would make the mixed one negative."""
    layer, variables, x = layer_and_variables()
    rule = choose_mixing("constant:u=-0.1")(KEY)

    def total(x):
        return apply_eagerly(rule, layer, variables, 1e3 * x).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(x.astype(jnp.float32))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_a_layer_without_spatial_axes_normalizes_with_the_batch(x64):
    layer = BatchNorm()
    x = jnp.asarray(np.random.default_rng(0).normal(2, 3, (6, 3)))
    variables, valid = nets.variables_of(layer, x), np.arange(6) < 5
    short = np.asarray(x)[:5]
    padded = np.concatenate([short, np.full((1, 3), np.nan)])
    ours = apply_with(mixed_statistics(KEY), layer, variables, padded, valid)[:5]
    normal = (short - short.mean(0)) / np.sqrt(short.var(0) + 1e-5)
    np.testing.assert_allclose(ours, affine(normal, variables), rtol=1e-11)


def mixstyle_numpy(x, other, weight, valid):
    """MixStyle as published, then the batch's own normalization, on the map itself."""
    mean = x.mean((1, 2), keepdims=True)
    std = np.sqrt(x.var((1, 2), keepdims=True) + 1e-5)
    mixed_mean = weight * mean + (1 - weight) * mean[other]
    mixed_std = weight * std + (1 - weight) * std[other]
    restyled = (x - mean) / std * mixed_std + mixed_mean
    flat = restyled[valid].reshape(-1, x.shape[-1])
    return (restyled - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5)


def test_mixstyle_is_the_published_map_normalized_by_its_batch(x64, monkeypatch):
    layer, variables, x = layer_and_variables()
    weight, other = np.random.default_rng(1).uniform(size=(5, 1)), np.array([1, 2, 3, 0, 4])
    monkeypatch.setattr(jax.random, "beta", lambda *args: jnp.asarray(weight))
    monkeypatch.setattr(jax.random, "permutation", lambda key, size: jnp.asarray([1, 2, 3, 4, 0]))
    # The fifth sample is padding, so the fourth, which would take its style, keeps its own.
    valid, partner = np.arange(5) < 4, np.where(other == 0, 3, other)
    rule = choose_mixing("mixstyle:probability=1.0")(KEY)
    ours = apply_with(rule, layer, variables, x, valid)
    theirs = mixstyle_numpy(np.asarray(x), partner, weight[..., None, None], valid)
    np.testing.assert_allclose(ours[:4], affine(theirs, variables)[:4], rtol=1e-9, atol=1e-12)
