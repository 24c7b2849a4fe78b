"""Training images change, and their masks go where their pixels go."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import affine_transform, center_of_mass

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.label_trees import BOXES, CLASS, MASK
from fedjax_bn.data.pixels import mask_augment
from fedjax_bn.data.pixels.mask_augment import of_masks
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.run.experiment.task import choose_loading

SIZE, COUNT = 32, 12
STILL = dict.fromkeys(
    ("flip", "rotate", "scale", "shift", "elastic", "brightness", "contrast", "gamma"), 0.0
)
MOVES = {"flip": 0.5, "quarters": 0.5, "rotate": 40.0, "scale": 0.3, "shift": 0.1, "elastic": 0.03}


def batch_of(images, masks):
    labels = {MASK: jnp.asarray(masks), "volume": jnp.arange(len(masks), dtype=jnp.int32)}
    return {"image": jnp.asarray(images), "label": labels, "valid": jnp.ones(len(masks), bool)}


@cache
def compiled(**how):
    return jax.jit(of_masks(SIZE, **STILL | how).change)


def changed(batch, seed=0, **how):
    return compiled(**how)(jax.random.key(seed), batch)


def noise(seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (COUNT, SIZE, SIZE, 3)).astype(np.uint8)
    return batch_of(images, rng.choice(np.array([0, 1, 2, 255], np.uint8), (COUNT, SIZE, SIZE)))


def test_without_strength_a_batch_keeps_its_bytes():
    batch = noise()
    after = changed(batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, after, batch))


def test_an_image_that_is_its_mask_stays_its_mask():
    """A disc of one class: its pixels move by the same displacements, up to its border."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    disc = ((rows - 12) ** 2 + (columns - 18) ** 2 < 49).astype(np.uint8)
    masks = np.repeat(disc[None], COUNT, 0)
    after = changed(batch_of(np.repeat(255 * masks[..., None], 3, -1), masks), **MOVES)
    images, masks = np.asarray(after["image"]), np.asarray(after["label"][MASK])
    for image, mask in zip(images, masks, strict=True):
        # A bilinear value of 0 or 255 has four equal neighbours, of which the mask has the nearest.
        sure = np.isin(image[..., 0], (0, 255)) & (mask != UNLABELLED)
        assert sure.mean() > 0.4
        assert np.array_equal(image[sure, 0] == 255, mask[sure] == 1)
        inside = np.abs(np.subtract(center_of_mass(image[..., 0]), center_of_mass(mask == 1)))
        assert inside.max() < 0.5
    assert len(np.unique([center_of_mass(mask == 1) for mask in masks], axis=0)) == COUNT


def test_masks_get_no_new_value_but_that_of_pixels_from_outside():
    batch = batch_of(np.zeros((COUNT, SIZE, SIZE, 3), np.uint8), np.full((COUNT, SIZE, SIZE), 3))
    batch["label"][MASK] = batch["label"][MASK].astype(jnp.uint8)
    after = changed(batch, shift=0.3, rotate=30.0)["label"]
    assert set(np.unique(after[MASK])) == {3, UNLABELLED}
    assert after[MASK].dtype == jnp.uint8
    assert np.array_equal(after["volume"], batch["label"]["volume"])


def test_pixels_from_outside_repeat_the_border_of_the_image():
    image = np.broadcast_to(np.arange(SIZE, dtype=np.uint8)[:, None, None], (COUNT, SIZE, SIZE, 3))
    after = changed(batch_of(image, np.zeros((COUNT, SIZE, SIZE), np.uint8)), shift=0.4)
    outside = np.asarray(after["label"][MASK]) == UNLABELLED
    rows = np.asarray(after["image"])[..., 0]
    assert outside.any()
    for own, out in zip(rows, outside, strict=True):
        above = out.all(1) & (np.arange(SIZE) < SIZE // 2)
        assert (own[above] == 0).all()
        below = out.all(1) & (np.arange(SIZE) >= SIZE // 2)
        assert (own[below] == SIZE - 1).all()


@jax.jit
def moved(image, mask, mirror, turns, degrees, scale, shift):
    places = mask_augment.shown_places(
        SIZE, mask_augment.move_matrix(mirror, turns, degrees, scale), jnp.asarray(shift)
    )
    return mask_augment.move_image(image, places), mask_augment.move_mask(mask, places)


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("mirror", [False, True])
def test_quarter_turns_and_mirrors_are_numpys(turns, mirror):
    image = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3)).astype(np.float32)
    mask = image[..., 0].astype(np.uint8)
    found = moved(image, mask, mirror, turns, np.float32(0), np.float32(1), np.zeros(2, np.float32))
    # The image is mirrored before it turns.
    expected = np.rot90(image[:, ::-1] if mirror else image, turns)
    assert np.array_equal(found[0], expected)
    assert np.array_equal(found[1], expected[..., 0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("degrees", "scale", "shift"), [(30, 1, (0, 0)), (-77, 1.3, (0.1, -0.2))])
def test_a_rotation_is_scipys_affine_transform(degrees, scale, shift):
    rng = np.random.default_rng(0)
    image = rng.uniform(size=(SIZE, SIZE, 3))
    mask = rng.integers(0, 3, (SIZE, SIZE)).astype(np.uint8)
    angle, middle = np.deg2rad(degrees), np.full(2, (SIZE - 1) / 2)
    # Counterclockwise, with rows that count downwards: the inverse of this turn of (row, column).
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * scale
    back = np.linalg.inv(turn)
    offset = middle - back @ (middle + np.array(shift) * SIZE)
    wanted = [
        affine_transform(image[..., c], back, offset, order=1, mode="nearest") for c in range(3)
    ]
    how = (False, 0, float(degrees), float(scale), np.array(shift, float))
    found = moved(image, mask, *how)
    np.testing.assert_allclose(found[0], np.stack(wanted, -1), atol=1e-12)
    nearest = partial(affine_transform, mask, back, offset, order=0)
    expected = nearest(mode="grid-constant", cval=UNLABELLED)
    assert np.array_equal(found[1], expected)


def test_a_sample_changes_in_the_same_way_in_a_smaller_batch():
    how = MOVES | {"brightness": 0.2, "contrast": 0.2, "gamma": 0.2}
    batch = noise()
    whole, part = changed(batch, **how), changed(jax.tree.map(lambda leaf: leaf[:5], batch), **how)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[:5], b), whole, part))
    assert not np.array_equal(whole["image"], changed(batch, seed=1, **how)["image"])


def test_the_field_of_displacements_is_smooth_and_has_its_standard_deviation():
    fields = jax.vmap(lambda key: mask_augment.displacements(key, SIZE, jnp.float32))(
        jax.random.split(jax.random.key(0), 200)
    )
    assert fields.shape == (200, 2, SIZE, SIZE)
    middle = fields[:, :, SIZE // 2, SIZE // 2] / SIZE
    assert abs(float(middle.std()) - 1) < 0.1
    steps = jnp.abs(jnp.diff(fields, axis=-1)) / SIZE
    assert float(steps.mean()) < 0.1  # of a standard deviation from pixel to pixel


def test_intensities_change_in_images_alone_as_numpy_says():
    image = np.random.default_rng(0).uniform(size=(SIZE, SIZE, 3))
    bright = np.clip(1.3 * image, 0, 1)
    expected = np.clip(0.7 * bright + 0.3 * bright.mean(), 0, 1) ** 1.2
    found = mask_augment.change_intensities(*map(jnp.float32, (image, 1.3, 0.7, 1.2)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    batch = noise()
    after = changed(batch, brightness=0.5, contrast=0.5, gamma=0.5)
    assert np.array_equal(after["label"][MASK], batch["label"][MASK])
    assert not np.array_equal(after["image"], batch["image"])


def test_features_cannot_be_augmented_with_masks():
    batch = {"image": jnp.zeros((2, 6)), "label": {MASK: jnp.zeros((2, 6), jnp.uint8)}}
    with pytest.raises(ValueError, match=r"data\.augment=masks"):
        of_masks(SIZE).change(jax.random.key(0), batch)


LABELS = {
    "masks": {MASK: np.zeros((1, 8, 8), np.uint8)},
    "boxes": {BOXES: np.float32([[[0, 0, 1, 1]]]), CLASS: np.zeros((1, 1), np.int32)},
    "classes": np.zeros(1, np.int32),
}


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("domainbed", "masks", "choose masks"),
        ("boxes", "masks", "choose masks"),
        ("masks", "boxes", "choose boxes"),
        ("masks:flip=0.0", "classes", "no masks"),
        ("masks:rotate=200", "masks", "rotate=200"),
        ("masks:elastic=0.02", "masks", ""),
        ("none", "masks", ""),
    ],
)
def test_an_augmentation_that_does_not_suit_the_labels_is_refused(text, kind, said):
    part = Split(np.zeros((1, 8, 8, 3), np.uint8), LABELS[kind])
    data = Dataset("toy", 2, (Domain("a", part, None, part),), (0.0,), (1.0,))
    if not said:
        assert callable(choose_loading(text, 28, data))
        return
    with pytest.raises(ConfigError, match=said):
        choose_loading(text, 28, data)
