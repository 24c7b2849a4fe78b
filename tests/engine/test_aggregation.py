"""Weighted means and weighing rules against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_bn.aggregation import by_size, uniform, weighted_mean
from fedjax_bn.engine.weighing import normalized, relative_weights

WEIGHTS = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=6).filter(lambda w: sum(w) > 1)


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 99))
def test_weighted_mean_equals_numpy(weights, seed):
    leaf = np.random.default_rng(seed).normal(size=(len(weights), 2, 3))
    ours = weighted_mean({"a": jnp.asarray(leaf, jnp.float32)}, jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(
        ours["a"], np.average(leaf, axis=0, weights=weights), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8"])
def test_a_leaf_keeps_its_dtype(dtype):
    leaf = jnp.asarray([[1, 2], [4, 4]], dtype)
    mean = weighted_mean(leaf, jnp.asarray([1.0, 2.0]))
    assert mean.dtype == leaf.dtype
    np.testing.assert_allclose(
        np.asarray(mean, np.float64), [3, 10 / 3 // 1 if "int" in dtype else 10 / 3], rtol=1e-2
    )


def test_float64_leaves_are_averaged_in_float64(x64):
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
    for weights in (jnp.asarray([40, 21, 56]), by_size(jnp.asarray([40, 21, 56]), jnp.zeros(3))):
        mean = weighted_mean(leaf, weights)
        np.testing.assert_allclose(mean, np.average(leaf, 0, [40, 21, 56]), rtol=1e-13)


def test_a_client_of_weight_zero_is_left_out_even_if_it_is_nan():
    leaf = jnp.asarray([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 4.0]])
    np.testing.assert_array_equal(weighted_mean(leaf, jnp.asarray([1.0, 0.0, 1.0])), [2, 3])


def test_a_nan_that_counts_is_not_hidden():
    assert np.isnan(weighted_mean(jnp.asarray([1.0, jnp.nan]), jnp.ones(2)))


@pytest.mark.parametrize(
    ("rule", "sizes", "expected"),
    [
        (by_size, [40, 21, 56], [40 / 117, 21 / 117, 56 / 117]),
        (by_size, [0, 1, 3], [0, 0.25, 0.75]),
        (uniform, [40, 21, 56], [1 / 3, 1 / 3, 1 / 3]),
        (uniform, [0, 1, 3], [0, 0.5, 0.5]),
        (by_size, [0, 0], [0, 0]),
    ],
)
def test_weighing_rules_sum_to_one_over_those_who_count(rule, sizes, expected):
    sizes = jnp.asarray(sizes, jnp.int32)
    weights = rule(sizes, jnp.ones(len(sizes)))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == jnp.result_type(float)
    # Rounds over several devices weigh by these, and divide last.
    np.testing.assert_array_equal(normalized(relative_weights(rule, sizes)), weights)
