"""FedDG's contrast of boundaries against SciPy and PyTorch in float64, and where it acts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import ndimage

from federations import in_float64
from fedjax_bn import task
from fedjax_bn.contrib import feddg
from fedjax_bn.contrib.feddg import boundary_contrast
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.methods.learning import learning
from fedjax_bn.models import UNet
from fedjax_bn.state import broadcast_of, own_of

CLASSES, SIDE, KEY = 3, 16, jax.random.key(2)


def masks(count=4, unlabelled=True):
    """Discs, some at the edge, with cups; the last sample has no cup."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    mask = np.zeros((count, SIDE, SIDE), np.uint8)
    for b in range(count):
        far = np.hypot(rows - 5 - b, columns - 3 * b)
        mask[b] = 1 * (far < 5) + (far < 2.5)
    mask[-1] = np.minimum(mask[-1], 1)
    if unlabelled:
        mask[0, :3] = UNLABELLED
    return mask


def by_hand(maps, mask, valid, nested):
    """Sample by sample and pair by pair: SciPy's morphology, PyTorch's cosines and gradient."""
    torch = pytest.importorskip("torch")
    maps = torch.tensor(maps, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for region in range(1, CLASSES):
        vectors = []
        for b in np.flatnonzero(valid):
            unknown = mask[b] == UNLABELLED
            inside = ~unknown & ((mask[b] >= region) if nested else (mask[b] == region))
            border = inside & ~ndimage.binary_erosion(inside | unknown, border_value=1)
            band = ndimage.binary_dilation(inside, iterations=5) & ~inside & ~unknown
            for kind, places in enumerate((border, band)):
                for m in range(len(maps)):
                    if places.any():
                        vectors.append((kind, maps[m, b][torch.tensor(places)].mean(0)))
        pairs = []
        for i, (kind, v) in enumerate(vectors):
            near = [torch.cosine_similarity(v, w, 0, 1e-12) / 0.05 for _, w in vectors]
            others = [torch.exp(n) for n, (k, _) in zip(near, vectors, strict=True) if k != kind]
            for j, (k, _) in enumerate(vectors):
                if k == kind and i != j:
                    own = torch.exp(near[j])
                    pairs.append(-torch.log(own / (own + sum(others))))
        total = total + torch.stack(pairs).mean()
    (slope,) = torch.autograd.grad(total, maps)
    return total.detach().numpy(), slope.numpy()


@pytest.mark.parametrize("nested", [False, True])
def test_the_contrast_and_its_gradient_are_those_of_pairs_by_hand(x64, nested):
    maps = np.maximum(np.random.default_rng(0).normal(size=(2, 4, SIDE, SIDE, 5)) + 0.5, 0)
    mask, valid = masks(), np.array([True, False, True, True])
    ours = jax.jit(
        jax.value_and_grad(lambda x: boundary_contrast(x, mask, valid, CLASSES, nested=nested))
    )
    value, slope = ours(jnp.asarray(maps))
    expected, gradient = by_hand(maps, mask, valid, nested)
    np.testing.assert_allclose(value, expected, rtol=1e-11)
    np.testing.assert_allclose(slope, gradient, rtol=1e-9, atol=1e-14)
    # What does not count may be anything.
    maps[:, 1] = np.nan
    again, slopes = ours(jnp.asarray(maps))
    np.testing.assert_allclose(again, value, rtol=1e-12)
    np.testing.assert_allclose(slopes, slope, rtol=1e-12, atol=0)


def test_without_borders_or_without_features_the_contrast_has_finite_gradients():
    maps = jnp.zeros((2, 3, SIDE, SIDE, 4))
    ours = jax.jit(jax.value_and_grad(lambda x, m, v: boundary_contrast(x, m, v, CLASSES)))
    for fill, valid in ((0, True), (1, True), (UNLABELLED, True), (None, True), (None, False)):
        mask = masks(3) if fill is None else np.full((3, SIDE, SIDE), fill, np.uint8)
        value, slope = ours(maps, mask, np.full(3, valid))
        assert np.isfinite(value)
        assert np.isfinite(slope).all()
        assert (value > 0) == (fill is None and valid)


@pytest.mark.slow
def test_the_episode_adds_the_contrast_of_the_maps_of_both_passes(x64):
    """The maps are those that the last layer reads, of x at w and of x' at the inner weights."""
    model, rng = UNet(CLASSES, width=2, levels=1), np.random.default_rng(1)
    images = jnp.asarray(rng.normal(size=(4, SIDE, SIDE, 3)))
    start = jax.jit(model.init)(jax.random.key(0), images.astype(jnp.float32))
    variables = in_float64(start)
    mask, valid = masks(), np.ones(4, bool)
    batch = {"image": images, "label": {"mask": mask}, "valid": valid}
    bank = {
        "amplitudes": jnp.asarray(rng.normal(size=(2, 1, 1, 1, 3)) * 100),
        "known": jnp.ones((2, 1)),
    }
    options = {"task": task.segmentation(CLASSES), "prepare": lambda x, dtype: x}
    learned = learning(model, **options)[0]

    def gradient(weight):
        """The gradient of a client's loss is what a step of SGD at the rate 1 takes away."""
        steps = {"inner_rate": 0.5, "clip": 0.01, "boundary": weight}
        method = feddg(model, optax.sgd(1.0), spectra=1, **steps, **options)
        state = method.init(KEY, variables, num_clients=2)
        broadcast = broadcast_of(state)._replace(message=bank)
        own, batches = own_of(state, 0), jax.tree.map(lambda x: x[None], batch)
        batches |= {"client": jnp.zeros((), jnp.int32), "population": jnp.asarray(2)}
        _, upload = method.client(broadcast, own, batches, KEY)
        return jax.tree.map(jnp.subtract, variables["params"], upload.shared["params"])

    def by_hand_of(params):
        """The map is recovered from flax's intermediates, not from the handler."""
        mean = lambda x: x.mean((1, 2), keepdims=True)  # noqa: E731
        other = images - mean(images) + bank["amplitudes"][1, 0] / SIDE**2

        def tap(params, x):
            given = {**variables, "params": params}
            _, kept = model.apply(
                given, x, capture_intermediates=True, mutable=["batch_stats", "intermediates"]
            )
            return kept["intermediates"]["tap0"]["__call__"][0]

        def loss(params):
            return learned.trained({**variables, "params": params}, images, batch, KEY)[0]

        inner = jax.tree.map(
            lambda w, g: w - 0.5 * jnp.clip(g, -0.01, 0.01), params, jax.grad(loss)(params)
        )
        both = jnp.stack([tap(params, images), tap(inner, other)])
        return boundary_contrast(both, mask, valid, CLASSES)

    contrast = jax.jit(jax.grad(by_hand_of))(variables["params"])
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(a - b, 0.3 * c, rtol=1e-7, atol=1e-10),
        gradient(0.3),
        gradient(0.0),
        contrast,
    )


def test_a_model_without_a_map_for_the_contrast_is_refused_and_a_classifier_needs_none():
    class Other(UNet):
        taps = {}  # noqa: RUF012

    options = {"spectra": 2, "task": task.segmentation(2)}
    with pytest.raises(ValueError, match="UNet"):
        feddg(Other(), optax.sgd(0.1), **options)
    assert feddg(Other(), optax.sgd(0.1), boundary=0.0, **options).learned.task.segments == 2
    feddg(Other(), optax.sgd(0.1), spectra=2)
