"""Training images change, and their boxes or masks go where their pixels go."""

import colorsys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import affine_transform, center_of_mass

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.labels import BOXES, CLASS, MASK
from fedjax_bn.data.pixels import augment, label_augment
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.data.pixels.label_augment import of_boxes, of_masks
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.run.experiment.method import choose_loading

SIZE, COUNT = 32, 12
move_pixels = jax.jit(label_augment.move_pixels)
change_colours = jax.jit(label_augment.change_colours)
move_boxes = jax.jit(label_augment.move_boxes, static_argnums=3)


def of(scale, shift):
    return jnp.asarray(scale, float), jnp.asarray(shift, float)


def boxes_of(*rows):
    """Rows (class, x1, y1, x2, y2) of one image."""
    table = np.array(rows, float)
    boxes, classes = jnp.asarray(table[:, 1:], jnp.float32), jnp.asarray(table[:, 0], jnp.int32)
    return {BOXES: boxes, CLASS: classes}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("scale", "shift"), [((0.7, 0.7), (0.1, -0.2)), ((-1.4, 1.4), (0.05, 0))])
def test_moved_pixels_are_scipys_affine_transform(scale, shift):
    image = np.random.default_rng(0).uniform(size=(SIZE, SIZE, 3))
    # From new to old coordinates, of pixel centres: rows first.
    sides, moved = np.array(scale[::-1]), np.array(shift[::-1]) * SIZE
    middle = SIZE / 2 - 0.5
    move = partial(affine_transform, order=1, mode="grid-constant", cval=GREY / 255)
    channels = [
        move(image[..., c], np.diag(1 / sides), middle - (middle + moved) / sides) for c in range(3)
    ]
    found = move_pixels(image, *of(scale, shift))
    np.testing.assert_allclose(found, np.stack(channels, -1), atol=1e-12)


def test_the_pixels_inside_a_moved_box_are_those_of_the_object():
    count = 24
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[8:24, 10:20] = 255
    sample = {"image": image, "label": boxes_of((1, 10 / SIZE, 8 / SIZE, 20 / SIZE, 24 / SIZE))}
    batch = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), sample)
    augment = of_boxes(SIZE, scale=0.5, shift=0.4, hue=0.0, saturation=0.0, value=0.0)
    changed = jax.jit(augment.change)(jax.random.key(1), batch)
    seen = 0
    for pixels, boxes, classes in zip(
        np.asarray(changed["image"]), *map(np.asarray, changed["label"].values()), strict=True
    ):
        x1, y1, x2, y2 = boxes[0] * SIZE
        if classes[0] == -1:
            assert not boxes.any()
            continue
        seen += 1
        inside = pixels[int(np.ceil(y1 + 1)) : int(y2 - 1), int(np.ceil(x1 + 1)) : int(x2 - 1)]
        assert not inside.size or inside.min() == 255
        dark = pixels.copy()
        dark[max(0, int(y1) - 1) : int(y2) + 2, max(0, int(x1) - 1) : int(x2) + 2] = 0
        assert dark.max() <= GREY
    assert seen > count / 2
    assert len(np.unique(np.asarray(changed["label"][BOXES])[:, 0, 0])) > count / 2


def test_boxes_that_leave_the_image_become_padding_and_crowds_stay_crowds():
    label = boxes_of((0, 0.8, 0.4, 1, 0.6), (-4, 0, 0, 1, 1), (1, 0.5, 0.5, 0.52, 0.9))
    moved = move_boxes(label, *of((1, 1), (0.19, 0)), SIZE)
    assert moved[CLASS].tolist() == [-1, -4, -1]  # too little left, a crowd, too narrow
    np.testing.assert_allclose(moved[BOXES], [[0] * 4, [0.19, 0, 1, 1], [0] * 4], atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_colours_change_as_pythons_hsv():
    pixels = np.random.default_rng(0).uniform(size=(50, 3))
    factors = turns, saturation, value = 0.1, 1.6, 1.3
    expected = []
    for pixel in pixels:
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        changed = (h + turns) % 1, min(1, s * saturation), min(1, v * value)
        expected.append(colorsys.hsv_to_rgb(*changed))
    changed = change_colours(jnp.asarray(pixels[None]), *map(jnp.asarray, factors))
    np.testing.assert_allclose(changed[0], expected, atol=1e-12)


# Masks

STILL = dict.fromkeys(
    ("flip", "rotate", "scale", "shift", "elastic", "brightness", "contrast", "gamma"), 0.0
)
MOVES = {"flip": 0.5, "quarters": 0.5, "rotate": 40.0, "scale": 0.3, "shift": 0.1, "elastic": 0.03}


def masked(images, masks):
    labels = {MASK: jnp.asarray(masks), "volume": jnp.arange(len(masks), dtype=jnp.int32)}
    return {"image": jnp.asarray(images), "label": labels, "valid": jnp.ones(len(masks), bool)}


@cache
def compiled(**how):
    return jax.jit(of_masks(SIZE, **STILL | how).change)


def changed_masks(batch, seed=0, **how):
    return compiled(**how)(jax.random.key(seed), batch)


def noise():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (COUNT, SIZE, SIZE, 3)).astype(np.uint8)
    return masked(images, rng.choice(np.array([0, 1, 2, 255], np.uint8), (COUNT, SIZE, SIZE)))


def test_without_strength_a_batch_keeps_its_bytes():
    batch = noise()
    assert jax.tree.all(jax.tree.map(np.array_equal, changed_masks(batch), batch))


def test_an_image_that_is_its_mask_stays_its_mask():
    """A disc of one class: its pixels move by the same displacements, up to its border."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    disc = ((rows - 12) ** 2 + (columns - 18) ** 2 < 49).astype(np.uint8)
    masks = np.repeat(disc[None], COUNT, 0)
    after = changed_masks(masked(np.repeat(255 * masks[..., None], 3, -1), masks), **MOVES)
    images, masks = np.asarray(after["image"]), np.asarray(after["label"][MASK])
    for image, mask in zip(images, masks, strict=True):
        # A bilinear value of 0 or 255 has four equal neighbours, of which the mask has the nearest.
        sure = np.isin(image[..., 0], (0, 255)) & (mask != UNLABELLED)
        assert sure.mean() > 0.4
        assert np.array_equal(image[sure, 0] == 255, mask[sure] == 1)
        inside = np.abs(np.subtract(center_of_mass(image[..., 0]), center_of_mass(mask == 1)))
        assert inside.max() < 0.5
    assert len(np.unique([center_of_mass(mask == 1) for mask in masks], axis=0)) == COUNT


@jax.jit
def moved(image, mask, *move):
    places = label_augment.shown_places(SIZE, *move)
    return label_augment.move_image(image, places), label_augment.move_mask(mask, places)


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
    channels = [
        affine_transform(image[..., c], back, offset, order=1, mode="nearest") for c in range(3)
    ]
    how = (False, 0, float(degrees), float(scale), np.array(shift, float))
    found = moved(image, mask, *how)
    np.testing.assert_allclose(found[0], np.stack(channels, -1), atol=1e-12)
    nearest = partial(affine_transform, mask, back, offset, order=0)
    assert np.array_equal(found[1], nearest(mode="grid-constant", cval=UNLABELLED))


def test_a_sample_changes_in_the_same_way_in_a_smaller_batch():
    how = MOVES | {"brightness": 0.2, "contrast": 0.2, "gamma": 0.2}
    batch = noise()
    whole = changed_masks(batch, **how)
    part = changed_masks(jax.tree.map(lambda leaf: leaf[:5], batch), **how)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[:5], b), whole, part))
    assert not np.array_equal(whole["image"], changed_masks(batch, seed=1, **how)["image"])


def test_intensities_change_in_images_alone_as_numpy_says():
    image = np.random.default_rng(0).uniform(size=(SIZE, SIZE, 3))
    bright = np.clip(1.3 * image, 0, 1)
    expected = np.clip(0.7 * bright + 0.3 * bright.mean(), 0, 1) ** 1.2
    found = label_augment.change_intensities(*map(jnp.float32, (image, 1.3, 0.7, 1.2)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    batch = noise()
    after = changed_masks(batch, brightness=0.5, contrast=0.5, gamma=0.5)
    assert jax.tree.all(jax.tree.map(np.array_equal, after["label"], batch["label"]))
    assert not np.array_equal(after["image"], batch["image"])


@pytest.mark.parametrize(("make", "label"), [(of_boxes, CLASS), (of_masks, MASK)])
@pytest.mark.parametrize("images", [jnp.zeros((2, 6)), jnp.zeros((2, 4, 6, 3), jnp.uint8)])
def test_features_and_images_that_are_not_square_cannot_be_augmented(make, label, images):
    batch = {"image": images, "label": {label: jnp.zeros((2, 6), jnp.uint8)}}
    with pytest.raises(ValueError, match="none"):
        make(SIZE).change(jax.random.key(0), batch)


@pytest.mark.parametrize("change", [augment.office(), augment.domainbed(8), augment.randaug()])
@pytest.mark.parametrize("images", [jnp.zeros((2, 9)), jnp.zeros((2, 9, 9, 1))])
def test_features_and_floats_cannot_be_augmented_as_pictures(change, images):
    with pytest.raises(ValueError, match="u8"):
        change(jax.random.key(0), images)


LABELS = {
    "masks": {MASK: np.zeros((1, 8, 8), np.uint8)},
    "boxes": {BOXES: np.float32([[[0, 0, 1, 1]]]), CLASS: np.zeros((1, 1), np.int32)},
    "classes": np.zeros(1, np.int32),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize(
    ("text", "suits"),
    [("domainbed", "classes"), ("masks:elastic=0.02", "masks"), ("boxes:flip=0.0", "boxes")],
)
def test_an_augmentation_that_does_not_suit_the_labels_is_refused(text, suits, kind):
    part = Split(np.zeros((1, 8, 8, 3), np.uint8), LABELS[kind])
    data = Dataset("toy", 2, (Domain("a", part, None, part),), (0.0,), (1.0,))
    assert callable(choose_loading("none", 28, data))
    if suits == kind:
        assert callable(choose_loading(text, 28, data))
        return
    with pytest.raises(ConfigError, match=r"data\.augment.*toy"):
        choose_loading(text, 28, data)
