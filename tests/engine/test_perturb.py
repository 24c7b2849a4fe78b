"""Perturbations of what a model reads: amplitudes mixed with those of another sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.perturb import amplitude_mix, mix_amplitudes, partners

KEY = jax.random.key(0)


def images_of(count=5, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 6, 5, 3))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_amplitudes_are_mixed_and_phases_kept_as_numpy_does(x64, share):
    x, other = images_of(), images_of(seed=1)
    shares = np.full((5, 1, 1, 1), share)
    own, theirs = np.fft.fft2(x, axes=(1, 2)), np.fft.fft2(other, axes=(1, 2))
    amplitude = (1 - share) * np.abs(own) + share * np.abs(theirs)
    expected = np.fft.ifft2(amplitude * np.exp(1j * np.angle(own)), axes=(1, 2))
    assert np.abs(expected.imag).max() < 1e-13
    ours = mix_amplitudes(jnp.asarray(x), jnp.asarray(other), jnp.asarray(shares))
    np.testing.assert_allclose(ours, expected.real, rtol=0, atol=1e-12)
    if share == 0:
        np.testing.assert_allclose(ours, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_partners_are_other_valid_samples_each_taken_once(count):
    valid = np.isin(np.arange(7), np.random.default_rng(count).permutation(7)[:count])
    for seed in range(5):
        chosen = np.asarray(partners(jax.random.key(seed), jnp.asarray(valid)))
        np.testing.assert_array_equal(chosen[~valid], np.flatnonzero(~valid))
        np.testing.assert_array_equal(np.sort(chosen[valid]), np.flatnonzero(valid))
        assert count == 1 or (chosen != np.arange(7))[valid].all()


def test_a_batch_is_changed_with_its_probability_and_as_a_whole():
    x, valid = jnp.asarray(images_of(4), jnp.float32), jnp.ones(4, bool)
    perturb = jax.jit(amplitude_mix(0.5))
    changed = [
        np.asarray(perturb(jax.random.key(seed), x, valid) != x).any((1, 2, 3))
        for seed in range(40)
    ]
    assert all(one.all() or not one.any() for one in changed)
    assert 8 < sum(one.any() for one in changed) < 32
    np.testing.assert_array_equal(amplitude_mix(0.0)(KEY, x, valid), x)
