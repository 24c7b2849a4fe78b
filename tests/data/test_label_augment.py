"""Training images change, and their boxes or masks go where their pixels go."""

import colorsys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import affine_transform, center_of_mass
from scipy.optimize import least_squares

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.labels import BOXES, CLASS, MASK
from fedjax_bn.data.pixels import augment
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.data.pixels.label_augment import of_boxes, of_masks
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.run.experiment.model import choose_loading

SIZE, COUNT = 32, 12
MIDDLE = np.full(2, (SIZE - 1) / 2)
RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (COUNT, SIZE, SIZE, 3)).astype(np.uint8)
# Waves that are long enough for a fit of the place from which a pixel comes.
WAVES = np.sin(np.arange(SIZE)[:, None] / 6 + np.array([0.0, 2.0, 4.0])) * 100 + 120
SMOOTH = ((WAVES[:, None] + WAVES[None]) / 2).astype(np.uint8)


def boxes_of(*rows):
    """Rows (class, x1, y1, x2, y2) of one image."""
    table = jnp.array(rows, jnp.float32)
    return {BOXES: table[:, 1:], CLASS: table[:, 0].astype(jnp.int32)}


def changed_boxes(image, label, count=COUNT, **strengths):
    """The same sample `count` times, each with a draw of its own."""
    sample = {"image": image, "label": label}
    batch = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), sample)
    still = dict.fromkeys(("flip", "scale", "shift", "hue", "saturation", "value"), 0.0)
    after = jax.jit(of_boxes(SIZE, **still | strengths).change)(jax.random.key(1), batch)
    return jax.tree.map(np.asarray, after)


def affine(image, back, offset, **how):
    channels = np.moveaxis(image.astype(float), -1, 0)
    return np.stack([affine_transform(c, back, offset, **how) for c in channels], -1)


def assert_law(law, start, image, spread):
    """Fits the parameters of a law to an image: they are in range, and the rest is rounding."""
    fit = least_squares(lambda parameters: np.ravel(law(*parameters) - image), start)
    assert np.abs(fit.fun).max() < 1.1
    assert (np.abs(fit.x - start) <= np.array(spread) + 0.01).all()
    return fit.x


def test_pixels_move_as_their_boxes_by_scipys_affine_transform():
    label = boxes_of((0, 0.3, 0.3, 0.45, 0.7), (1, 0.55, 0.3, 0.7, 0.7))
    after = changed_boxes(NOISE[0], label, flip=0.5, scale=0.4, shift=0.1)
    mirrored = 0
    for image, boxes in zip(after["image"], after["label"][BOXES], strict=True):
        centres = boxes.reshape(2, 2, 2).mean(1)  # of a box, across and down
        scale = np.array([(centres[1] - centres[0])[0] / 0.25, (boxes[0, 3] - boxes[0, 1]) / 0.4])
        assert np.isclose(abs(scale[0]), scale[1], atol=1e-5)
        mirrored += scale[0] < 0
        shift = centres.mean(0) - 0.5
        assert np.abs(shift).max() <= 0.1
        # From new to old coordinates, of pixel centres: rows first.
        back = np.diag(1 / scale[::-1])
        offset = MIDDLE - back @ (MIDDLE + shift[::-1] * SIZE)
        expected = affine(NOISE[0], back, offset, order=1, mode="grid-constant", cval=GREY)
        assert np.abs(image - expected).max() < 0.51
    assert 0 < mirrored < COUNT


def test_boxes_that_leave_the_image_become_padding_and_crowds_stay_crowds():
    """A crowd that fills the image tells how far the image moved."""
    rows = [(-4, 0, 0, 1, 1), (0, 0.8, 0.4, 1, 0.6), (1, 0.5, 0.5, 0.52, 0.9)]
    after = changed_boxes(NOISE[0], boxes_of(*rows), 2 * COUNT, shift=0.3)["label"]
    assert (after[CLASS][:, [0, 2]] == [-4, -1]).all()  # the third is too narrow
    assert not after[BOXES][:, 2].any()
    left, top, right, low = after[BOXES][:, 0].T
    shift = np.stack([left + right - 1, top + low - 1], 1)
    sides = np.clip([1, 0.6] + shift, 0, 1) - np.clip([0.8, 0.4] + shift, 0, 1)
    stays = (sides > 2 / SIZE).all(1) & (sides.prod(1) > 0.1 * 0.04)
    assert np.array_equal(after[CLASS][:, 1], np.where(stays, 0, -1))
    assert 0 < stays.sum() < len(stays)
    corners = np.clip(np.array([0.8, 0.4, 1, 0.6]) + np.tile(shift, 2), 0, 1)
    np.testing.assert_allclose(after[BOXES][:, 1], corners * stays[:, None], atol=1e-6)


def test_colours_change_as_pythons_hsv():
    spread = {"hue": 0.1, "saturation": 0.7, "value": 0.4}
    after = changed_boxes(NOISE[0], boxes_of((0, 0, 0, 1, 1)), 3, **spread)["image"]
    hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in NOISE[0, :4].reshape(-1, 3) / 255]

    def law(turns, saturation, value):
        return 255 * np.array(
            [
                colorsys.hsv_to_rgb((h + turns) % 1, min(1, s * saturation), min(1, v * value))
                for h, s, v in hsv
            ]
        )

    start, limits = (0, 1, 1), (*spread.values(),)
    fits = [assert_law(law, start, image[:4].reshape(-1, 3), limits) for image in after]
    assert np.ptp(fits, axis=0).min() > 0.01


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


MASKS = RNG.choice(np.array([0, 1, 2, 255], np.uint8), (COUNT, SIZE, SIZE))
BATCH = masked(NOISE, MASKS)


def test_without_strength_a_batch_keeps_its_bytes():
    assert jax.tree.all(jax.tree.map(np.array_equal, changed_masks(BATCH), BATCH))


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


def test_quarter_turns_and_mirrors_are_numpys_and_all_eight_occur():
    images = np.repeat(NOISE[:1], 8 * COUNT, 0)
    after = changed_masks(masked(images, images[..., 0]), quarters=1.0, flip=0.5)
    eight = [np.rot90(image, k) for image in (NOISE[0], NOISE[0][:, ::-1]) for k in range(4)]
    seen = []
    masks = np.asarray(after["label"][MASK])
    for image, mask in zip(np.asarray(after["image"]), masks, strict=True):
        seen += [k for k, turned in enumerate(eight) if np.array_equal(image, turned)]
        assert np.array_equal(mask, image[..., 0])
    assert len(seen) == len(images)
    assert set(seen) == set(range(8))


def test_a_turn_is_scipys_affine_transform():
    images, masks = np.repeat(SMOOTH[None], 3, 0), MASKS[:3]
    how = {"rotate": 40.0, "scale": 0.3, "shift": 0.1}
    after = changed_masks(masked(images, masks), **how)

    def back(degrees, scale, *shift):
        angle = np.deg2rad(degrees)
        # Counterclockwise, with rows that count downwards: the inverse turns (row, column).
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * scale
        matrix = np.linalg.inv(turn)
        return matrix, MIDDLE - matrix @ (MIDDLE + np.array(shift) * SIZE)

    def law(*move):
        return affine(SMOOTH, *back(*move), order=1, mode="nearest")

    start, limits, moves = (0, 1, 0, 0), (40, 0.3, 0.1, 0.1), []
    for k in range(3):
        move = assert_law(law, start, np.asarray(after["image"])[k], limits)
        moves.append(move)
        nearest = affine_transform(
            masks[k], *back(*move), order=0, mode="grid-constant", cval=UNLABELLED
        )
        # The fit is rounded, so that a few pixels near a border take the next one.
        assert (np.asarray(after["label"][MASK])[k] == nearest).mean() > 0.98
    assert (np.ptp(moves, axis=0) > 0.2 * np.array(limits)).all()


def test_a_sample_changes_in_the_same_way_in_a_smaller_batch():
    how = MOVES | {"brightness": 0.2, "contrast": 0.2, "gamma": 0.2}
    whole = changed_masks(BATCH, **how)
    part = changed_masks(jax.tree.map(lambda leaf: leaf[:5], BATCH), **how)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[:5], b), whole, part))
    assert not np.array_equal(whole["image"], changed_masks(BATCH, seed=1, **how)["image"])


def test_intensities_change_in_images_alone_as_numpy_says():
    spread = {"brightness": 0.3, "contrast": 0.5, "gamma": 0.4}
    after = changed_masks(BATCH, **spread)
    assert jax.tree.all(jax.tree.map(np.array_equal, after["label"], BATCH["label"]))

    def law(image, brightness, contrast, gamma):
        bright = np.clip(brightness * image / 255, 0, 1)
        return 255 * np.clip(contrast * bright + (1 - contrast) * bright.mean(), 0, 1) ** gamma

    fits = [
        assert_law(partial(law, before), (1, 1, 1), image, (*spread.values(),))
        for before, image in zip(NOISE, np.asarray(after["image"]), strict=True)
    ]
    assert np.ptp(fits, axis=0).min() > 0.1


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
