"""RandConv: its kernels, its mixing, its consistency, and what it reduces to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import (
    ON_MAPS,
    SGD,
    MapNet,
    assert_equal,
    batches_of,
    once,
    run_rounds,
    variables_of,
)
from fedjax_bn.contrib import randconv as method_of
from fedjax_bn.contrib.randconv import disagreement
from fedjax_bn.engine.perturb import randconv, random_kernel
from fedjax_bn.methods import fedavg

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


def test_all_sides_come_and_images_stay_with_their_probability():
    x = images_of().astype(jnp.float32)
    change = jax.jit(randconv(mix=False, identity=0.5, largest=1))
    changed = [np.asarray(change(jax.random.key(seed), x, VALID)) for seed in range(60)]
    same = [np.array_equal(one, x) for one in changed]
    assert 15 < sum(same) < 45
    # How far one bright pixel spreads shows the side of the kernel.
    dot = jnp.zeros((1, 15, 15, 1), jnp.float32).at[0, 7, 7].set(1)
    spread = jax.jit(randconv(mix=False))
    sides = {
        int((np.asarray(spread(jax.random.key(seed), dot, VALID[:1])) != 0).any((0, 2, 3)).sum())
        for seed in range(40)
    }
    assert sides == {1, 3, 5, 7}


def test_the_consistency_is_pytorchs_divergence_from_the_mean(x64):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).normal(size=(3, 5, 4))
    p = torch.softmax(torch.tensor(logits), -1)
    mean = p.mean(0).clamp(1e-7, 1).log()
    kl = [torch.nn.functional.kl_div(mean, one, reduction="batchmean") for one in p]
    ours = disagreement(jnp.asarray(logits)).mean()
    np.testing.assert_allclose(ours, torch.stack(kl).mean(), rtol=1e-10)


@pytest.mark.parametrize("consistency", [0.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_images_that_always_stay_are_fedavg(consistency):
    """Without dropout the three passes agree, and the consistency adds nothing but rounding."""
    options = ON_MAPS["randconv"] | {"identity": 1.0, "consistency": consistency, "largest": 3}
    variables, batches = variables_of(MapNet()), batches_of((9, 4, 6))
    ours, plain = (
        run_rounds(method, variables, batches, rounds=2)[0]
        for method in (
            method_of(MapNet(), SGD, **options),
            once(fedavg, MapNet(), SGD),
        )
    )
    if consistency:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), ours, plain)
    else:
        assert_equal(ours, plain)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="largest=4"):
        randconv(largest=4)
    with pytest.raises(ValueError, match=r"\(4, 6\)"):
        randconv()(KEY, jnp.zeros((4, 6)), VALID)
