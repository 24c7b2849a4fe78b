"""Maps of packed columns, as networks have them on TPU, against the usual forms in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_bn import models
from fedjax_bn.engine import packed_columns
from fedjax_bn.engine.backend import all_finite, traced_for
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.instance import instance_moments
from fedjax_bn.normalization.layer import moments

KEY = jax.random.key(0)


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(1, 2, shape))


@pytest.mark.parametrize(
    ("width", "size", "stride", "padding", "read", "made"),
    [(8, 3, 1, 1, 2, 2), (8, 1, 2, 0, 2, 1), (16, 7, 2, 3, 4, 2), (12, 3, 1, 0, 1, 2)],
)
def test_a_convolution_of_packed_columns_is_the_usual_one(
    x64, width, size, stride, padding, read, made
):
    x, kernel = draw((2, 8, width, 3)), draw((size, size, 3, 5), 1)
    sides = (padding, padding), (padding, padding)
    usual = lax.conv_general_dilated(
        x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    packed = packed_columns.pack(x, read)
    y = packed_columns.convolve_packed(packed, kernel, (stride, stride), sides, read, made)
    np.testing.assert_allclose(packed_columns.unpack(y, made), usual, rtol=1e-12, atol=1e-12)


def test_pairs_of_columns_are_packed_in_large_maps_that_fill_half_of_the_lanes_of_a_tpu():
    with traced_for("tpu"):
        assert packed_columns.fitting((64, 56, 56, 64)) == 2
        for others in ((64, 56, 55, 64), (1, 56, 56, 64), (64, 56, 56, 128), (64, 56, 56, 16)):
            assert packed_columns.fitting(others) == 1
    assert packed_columns.fitting((64, 56, 56, 64)) == 1


def test_moments_of_packed_columns_are_those_of_the_map(x64):
    x, valid = draw((4, 6, 8, 3)), jnp.array([True, False, True, True])
    kept = np.asarray(x)[np.asarray(valid)]
    with traced_for("tpu"):
        mean, var, count = moments(x, valid, 2)
        own = instance_moments(x, 4)
    np.testing.assert_allclose(mean, kept.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(var, kept.var((0, 1, 2)), rtol=1e-12)
    assert count == 3 * 6 * 8
    np.testing.assert_allclose(own[0], x.mean((1, 2)), rtol=1e-12)
    np.testing.assert_allclose(own[1], x.var((1, 2)), rtol=1e-12)


@pytest.mark.parametrize(
    ("mean", "platform"), [(0.0, "tpu"), (3.0, "tpu"), (30.0, "tpu"), (3.0, "cuda")]
)
def test_one_pass_over_16_bit_values_is_as_exact_as_they_are(mean, platform):
    exact = np.random.default_rng(0).normal(mean, 1, (64, 8, 8, 4))
    x = jnp.asarray(exact, jnp.bfloat16)
    rounded = np.asarray(x, np.float64)
    with traced_for(platform):
        found = moments(x)[:2]
    np.testing.assert_allclose(found[0], rounded.mean((0, 1, 2)), rtol=1e-5, atol=1e-5)
    # One value after another, as XLA of JAX 0.7 adds on CPU, the sum of squares loses some 1e-5.
    lost = 2e-5 * mean**2
    np.testing.assert_allclose(found[1], rounded.var((0, 1, 2)), rtol=1e-3, atol=lost)


NETWORKS = {
    "ResNet": (models.ResNet((1, 1), num_classes=3), 48),  # packed blocks of both strides
    "bottleneck": (models.ResNet((1, 1), True, num_classes=3, width=16), 32),
    "DigitCNN": (models.DigitCNN(3, hidden=(8, 8), width=4), 12),
}


def derivatives(model, variables, images, valid):
    """The outputs, moved statistics and gradients of a training pass."""

    @jax.jit
    def pass_of(params):
        def value(params):
            given = {**variables, "params": params}
            out = forward(model, given, images, train=True, valid=valid)
            return jnp.where(valid[:, None], jnp.sin(out.outputs), 0).sum(), out

        return jax.value_and_grad(value, has_aux=True)(params)

    return pass_of(variables["params"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_traced_for_accelerators_has_the_numbers_of_cpu(x64, monkeypatch, name):
    """Also where scales are negative, so that the maximum is of the smallest values."""
    monkeypatch.setattr(packed_columns, "FEWEST_VALUES", 0)
    model, side = NETWORKS[name]
    images, valid = draw((4, side, side, 3)), jnp.array([True, False, True, True])
    variables = jax.eval_shape(model.init, KEY, images.astype(jnp.float32))
    leaves, tree = jax.tree.flatten(variables)
    leaves = [draw(leaf.shape, seed) / leaf.size**0.5 for seed, leaf in enumerate(leaves)]
    variables = jax.tree.unflatten(tree, leaves)
    variables["batch_stats"] = jax.tree.map(jnp.abs, variables["batch_stats"])
    usual = derivatives(model, variables, images, valid)
    for platform in ("tpu", "cuda"):
        with traced_for(platform):
            ours = derivatives(model, variables, images, valid)
        for one, other in zip(*map(jax.tree.leaves, (ours, usual)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_one_number_that_is_not_finite_is_found_in_every_leaf(platform):
    tree = {
        "vector": jnp.full(7, 3e38, jnp.float32),
        "half": jnp.full((2, 3), 3e38, jnp.bfloat16),
        "scalar": jnp.full((), 65504, jnp.float16),
        "kernel": jnp.full((1024, 512), -3e38, jnp.float32),
        **{f"norm{number}": jnp.zeros(2) for number in range(70)},
    }
    others = jnp.zeros((0, 3)), jnp.arange(3), jnp.array(True)
    with traced_for(platform):
        finite = jax.jit(lambda tree: all_finite((tree, others)))
        assert finite(tree)
        for name in ("vector", "half", "scalar", "kernel", "norm0", "norm69"):
            for wrong in (jnp.inf, -jnp.inf, jnp.nan):
                end = (-1,) * tree[name].ndim
                assert not finite(tree | {name: tree[name].at[end].set(wrong)})
        assert all_finite(others)
