"""The loss of segmentation against PyTorch in float64, and what must not influence it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from fedjax_bn import task
from fedjax_bn.engine.inputs import UNLABELLED

pytestmark = pytest.mark.usefixtures("x64")
LEAD, CLASSES = (3, 6, 5), 4


def drawn(classes=CLASSES, seed=0):
    """Logits, masks with unlabelled pixels, and one sample of three that does not count."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, max(classes, 2), LEAD).astype(np.uint8)
    mask[rng.uniform(size=LEAD) < 0.2] = UNLABELLED
    return rng.normal(size=(*LEAD, classes)), mask, np.array([True, False, True])


def ours(loss):
    """The loss and its gradient by the logits."""
    return jax.jit(jax.value_and_grad(loss))


def theirs(logits, mask, valid, share, by_sample, weight=None):
    """The same with `cross_entropy` and `binary_cross_entropy_with_logits`, sample by sample."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    logits = torch.tensor(logits, requires_grad=True)
    mask, x = torch.tensor(mask.astype(np.int64))[valid], logits[torch.tensor(valid)]
    if logits.shape[-1] == 1:
        known = mask != UNLABELLED
        entropy = functional.binary_cross_entropy_with_logits(
            x[..., 0][known], mask[known].double()
        )
        foreground = torch.sigmoid(x)
    else:
        planes = x.movedim(-1, 1)
        entropy = functional.cross_entropy(planes, mask, weight, ignore_index=UNLABELLED)
        foreground = planes.softmax(1).movedim(1, -1)[..., 1:]
    groups = [[i] for i in range(len(mask))] if by_sample else [list(range(len(mask)))]
    found = []
    for group in groups:
        for c in range(foreground.shape[-1]):
            known = mask[group] != UNLABELLED
            p, y = foreground[group][..., c][known], (mask[group][known] == c + 1).double()
            found.append((2 * (p * y).sum() + 1e-5) / (p.sum() + y.sum() + 1e-5))
    loss = (1 - share) * entropy + share * (1 - torch.stack(found).mean())
    loss.backward()
    return loss.detach().numpy(), logits.grad.numpy()


@pytest.mark.parametrize("classes", [CLASSES, 2, 1])
@pytest.mark.parametrize("by_sample", [False, True])
def test_the_loss_and_its_gradient_are_pytorchs(classes, by_sample):
    logits, mask, valid = drawn(classes)
    loss = task.segmentation(max(classes, 2), dice=0.3, by_sample=by_sample).loss
    value, slope = ours(loss)(jnp.asarray(logits), {"mask": mask}, valid)
    expected, gradient = theirs(logits, mask, valid, 0.3, by_sample)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(slope, gradient, rtol=1e-10, atol=1e-14)


def test_class_weights_are_pytorchs_and_scikit_learns():
    torch = pytest.importorskip("torch")
    logits, mask, valid = drawn()
    pixels = mask[valid][mask[valid] != UNLABELLED]
    balanced = compute_class_weight("balanced", classes=np.arange(CLASSES), y=pixels)
    for weights, expected_weights in (([1, 0, 2, 7], [1.0, 0, 2, 7]), ("balanced", balanced)):
        loss = task.segmentation(CLASSES, dice=0.3, class_weights=weights).loss
        value, slope = ours(loss)(jnp.asarray(logits), {"mask": mask}, valid)
        weight = torch.tensor(expected_weights).double()
        expected, gradient = theirs(logits, mask, valid, 0.3, False, weight)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(slope, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("classes", [CLASSES, 1])
def test_padding_and_unlabelled_pixels_have_no_influence(classes, by_sample):
    logits, mask, valid = drawn(classes)
    unseen = (mask == UNLABELLED) | ~valid[:, None, None]
    loss = ours(task.segmentation(max(classes, 2), by_sample=by_sample).loss)
    value, slope = loss(jnp.asarray(logits), {"mask": mask}, valid)
    assert not slope[unseen].any()
    for other in (np.nan, np.inf, -1e30):
        changed = np.where(unseen[..., None], other, logits)
        again, slopes = loss(jnp.asarray(changed), {"mask": mask}, valid)
        np.testing.assert_allclose(again, value, rtol=1e-12)
        np.testing.assert_allclose(slopes, slope, rtol=1e-12, atol=0)
    masks = mask.copy()
    masks[~valid] = 1
    np.testing.assert_allclose(
        loss(jnp.asarray(logits), {"mask": masks}, valid)[0], value, rtol=1e-12
    )


@pytest.mark.parametrize("by_sample", [False, True])
def test_gradients_are_finite_where_a_class_all_labels_or_all_samples_are_missing(by_sample):
    logits, mask, valid = drawn()
    loss = ours(task.segmentation(CLASSES, by_sample=by_sample).loss)
    empty, some = np.full_like(mask, UNLABELLED), np.where(mask == 2, 0, mask)
    for masks, counted in ((some, valid), (empty, valid), (mask, np.zeros(3, bool))):
        for scale in (1.0, 1e4):  # probabilities of exactly 0 and 1
            value, slope = loss(jnp.asarray(scale * logits), {"mask": masks}, counted)
            assert np.isfinite(value), (value, scale)
            assert np.isfinite(slope).all()


def test_a_value_that_is_no_class_is_no_label_and_other_logits_are_refused():
    """As a label out of range in a compiled program; NaN otherwise."""
    logits, mask, valid = drawn()
    loss = task.segmentation(CLASSES).loss
    other = np.where(mask == UNLABELLED, CLASSES, mask).astype(np.uint8)
    found = [jax.jit(loss)(logits, {"mask": one}, valid) for one in (mask, other)]
    np.testing.assert_array_equal(*found)
    for channels in (1, CLASSES - 1, CLASSES + 1):
        with pytest.raises(ValueError, match=f"num_classes={CLASSES}"):
            loss(logits[..., :1].repeat(channels, -1), {"mask": mask}, valid)


@pytest.mark.parametrize(("dtype", "by_sample"), [(jnp.float16, True), (jnp.bfloat16, False)])
def test_logits_of_16_bits_have_the_loss_of_their_values(dtype, by_sample):
    """4x256x256 pixels are four times as many as float16 can count."""
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 3, (4, 256, 256)).astype(np.uint8)
    logits, valid = jnp.asarray(rng.normal(size=(*mask.shape, 3)), dtype), np.ones(4, bool)
    loss = ours(task.segmentation(3, by_sample=by_sample).loss)
    value, slope = loss(logits, {"mask": mask}, valid)
    expected, gradient = loss(logits.astype(jnp.float64), {"mask": mask}, valid)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert slope.dtype == dtype
    # The gradient of a pixel, about 1e-6, is rounded to multiples of 6e-8 in float16.
    np.testing.assert_allclose(slope, gradient, rtol=0.01, atol=6e-8)
