"""Perturbations of what a model reads: mixed amplitudes, random convolutions, their consistency."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.contrib.randconv import disagreement
from fedjax_bn.engine.perturb import amplitude_mix, mix_amplitudes, partners, randconv

KEY, VALID = jax.random.key(0), jnp.ones(4, bool)


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
    np.testing.assert_array_equal(jax.jit(amplitude_mix(0.0))(KEY, x, valid), x)


def test_kernels_of_one_pixel_are_one_random_colour_matrix_for_all(x64):
    x = jnp.asarray(images_of(4))
    changed = jax.jit(randconv(mix=False, largest=1))(KEY, x, VALID)
    matrix, *_ = np.linalg.lstsq(np.asarray(x).reshape(-1, 3), changed.reshape(-1, 3))
    np.testing.assert_allclose(np.asarray(x) @ matrix, changed, rtol=1e-9, atol=1e-12)


def test_mixed_images_lie_between_an_image_and_its_convolution(x64):
    """a from one pixel, then everywhere the same one."""
    x, keys = jnp.asarray(images_of(4)), jax.random.split(KEY, 8)
    pure, mixed = (
        np.stack([change(key, x, VALID) for key in keys])
        for change in (jax.jit(randconv(mix=mix, largest=3)) for mix in (False, True))
    )
    shares = (mixed - pure) / (np.asarray(x) - pure)
    first = shares[:, :1, :1, :1, :1]
    np.testing.assert_allclose(shares, np.broadcast_to(first, shares.shape), rtol=1e-6)
    assert ((first >= 0) & (first < 1)).all()
    assert np.ptp(first) > 0.3


def test_over_kernels_an_output_has_the_mean_square_of_its_patch():
    image = np.random.default_rng(1).normal(size=(1, 7, 7, 3)).astype(np.float32)
    draw = jax.jit(lambda key: randconv(mix=False)(key, image, VALID[:1])[0, 3, 3])
    outputs = jax.lax.map(draw, jax.random.split(KEY, 4000))
    patches = [image[0, 3 - k : 4 + k, 3 - k : 4 + k] for k in range(4)]
    square = np.mean([np.square(patch).mean() for patch in patches])
    np.testing.assert_allclose(np.square(outputs).mean(), square, rtol=0.1)
    np.testing.assert_allclose(outputs.mean(), 0, atol=5 * np.sqrt(square / 12000))


def test_the_consistency_is_pytorchs_divergence_from_the_mean(x64):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).normal(size=(3, 5, 4))
    p = torch.softmax(torch.tensor(logits), -1)
    mean = p.mean(0).clamp(1e-7, 1).log()
    kl = [torch.nn.functional.kl_div(mean, one, reduction="batchmean") for one in p]
    ours = disagreement(jnp.asarray(logits)).mean()
    np.testing.assert_allclose(ours, torch.stack(kl).mean(), rtol=1e-10)
