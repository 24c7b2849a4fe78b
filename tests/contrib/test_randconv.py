"""RandConv: its kernels, its mixing, its consistency, and what it reduces to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.contrib.randconv import disagreement
from fedjax_bn.engine.perturb import randconv, random_kernel

KEY, VALID = jax.random.key(0), jnp.ones(4, bool)


def images_of(count=4, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 8, 6, 3)))


def test_kernels_of_one_pixel_are_one_random_colour_matrix_for_all(x64):
    x = images_of()
    changed = jax.jit(randconv(mix=False, largest=1))(KEY, x, VALID)
    matrix, *_ = np.linalg.lstsq(np.asarray(x).reshape(-1, 3), changed.reshape(-1, 3))
    np.testing.assert_allclose(np.asarray(x) @ matrix, changed, rtol=1e-9, atol=1e-12)


def test_mixed_images_lie_between_an_image_and_its_convolution(x64):
    """a from one pixel, then everywhere the same one."""
    x, keys = images_of(), jax.random.split(KEY, 8)
    pure, mixed = (
        np.stack([change(key, x, VALID) for key in keys])
        for change in (jax.jit(randconv(mix=mix, largest=3)) for mix in (False, True))
    )
    shares = (mixed - pure) / (np.asarray(x) - pure)
    first = shares[:, :1, :1, :1, :1]
    np.testing.assert_allclose(shares, np.broadcast_to(first, shares.shape), rtol=1e-6)
    assert ((first >= 0) & (first < 1)).all()
    assert np.ptp(first) > 0.3


@pytest.mark.parametrize("side", [1, 7])
def test_over_kernels_an_output_has_the_mean_square_of_its_patch(side):
    patch = np.random.default_rng(1).normal(size=(side, side, 3)).astype(np.float32)
    keys = jax.random.split(KEY, 4000)
    draw = jax.jit(jax.vmap(lambda key: random_kernel(key, side, 3, jnp.float32)))
    outputs = np.einsum("hwc,khwcd->kd", patch, draw(keys))
    square = np.square(patch).mean()
    np.testing.assert_allclose(np.square(outputs).mean(), square, rtol=5 * np.sqrt(2 / 12000))
    np.testing.assert_allclose(outputs.mean(), 0, atol=5 * np.sqrt(square / 12000))


def test_the_consistency_is_pytorchs_divergence_from_the_mean(x64):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).normal(size=(3, 5, 4))
    p = torch.softmax(torch.tensor(logits), -1)
    mean = p.mean(0).clamp(1e-7, 1).log()
    kl = [torch.nn.functional.kl_div(mean, one, reduction="batchmean") for one in p]
    ours = disagreement(jnp.asarray(logits)).mean()
    np.testing.assert_allclose(ours, torch.stack(kl).mean(), rtol=1e-10)
