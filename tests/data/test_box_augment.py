"""Training images change, and their boxes go where their pixels go."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import affine_transform

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.label_trees import BOXES, CLASS
from fedjax_bn.data.pixels import box_augment
from fedjax_bn.data.pixels.box_augment import Move, of_boxes, put_together, tile_moves
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.run.experiment.task import choose_loading

SIZE = 32
move_pixels = jax.jit(box_augment.move_pixels)
change_colours = jax.jit(box_augment.change_colours)
move_boxes = jax.jit(box_augment.move_boxes, static_argnums=2)


def of(scale, shift) -> Move:
    return Move(jnp.asarray(scale, float), jnp.asarray(shift, float))


def labels(*rows):
    """Rows (class, x1, y1, x2, y2) of one image."""
    table = np.array(rows, float)
    boxes, classes = jnp.asarray(table[:, 1:], jnp.float32), jnp.asarray(table[:, 0], jnp.int32)
    return {BOXES: boxes, CLASS: classes}


def test_a_mirror_twice_is_the_identity_for_pixels_and_boxes():
    image = jax.random.uniform(jax.random.key(0), (SIZE, SIZE, 3))
    label, mirror = labels((2, 0.125, 0.25, 0.5, 0.75), (-1, 0, 0, 0, 0)), of((-1, 1), (0, 0))
    np.testing.assert_allclose(move_pixels(image, mirror), image[:, ::-1], atol=1e-6)
    twice = move_boxes(move_boxes(label, mirror, SIZE), mirror, SIZE)
    assert jax.tree.all(jax.tree.map(np.array_equal, twice, label))
    np.testing.assert_allclose(move_pixels(move_pixels(image, mirror), mirror), image, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("scale", "shift"), [((0.7, 0.7), (0.1, -0.2)), ((-1.4, 1.4), (0.05, 0))])
def test_moved_pixels_are_scipys_affine_transform(scale, shift):
    image = np.random.default_rng(0).uniform(size=(SIZE, SIZE, 3))
    # From new to old coordinates, of pixel centres: rows first.
    matrix = np.diag([1 / scale[1], 1 / scale[0], 1])
    middle = SIZE / 2 - 0.5
    moved = np.array([shift[1], shift[0]]) * SIZE
    offset = np.append(middle - (middle + moved) / np.array([scale[1], scale[0]]), 0)
    expected = np.stack(
        [
            affine_transform(
                image[..., c],
                matrix[:2, :2],
                offset[:2],
                order=1,
                mode="grid-constant",
                cval=GREY / 255,
            )
            for c in range(3)
        ],
        -1,
    )
    np.testing.assert_allclose(move_pixels(image, of(scale, shift)), expected, atol=1e-12)


def test_the_pixels_inside_a_moved_box_are_those_of_the_object():
    count = 24
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[8:24, 10:20] = 255
    label = labels((1, 10 / SIZE, 8 / SIZE, 20 / SIZE, 24 / SIZE))
    batch = {
        "image": jnp.broadcast_to(image, (count, *image.shape)),
        "label": jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), label),
        "valid": jnp.ones(count, bool),
    }
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
    label = labels((0, 0.8, 0.4, 1, 0.6), (-4, 0, 0, 1, 1), (1, 0.5, 0.5, 0.52, 0.9))
    moved = move_boxes(label, of((1, 1), (0.19, 0)), SIZE)
    assert moved[CLASS].tolist() == [-1, -4, -1]  # too little left, a crowd, too narrow
    np.testing.assert_allclose(moved[BOXES], [[0] * 4, [0.19, 0, 1, 1], [0] * 4], atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_colours_change_as_pythons_hsv():
    rng = np.random.default_rng(0)
    pixels = rng.uniform(size=(50, 3))
    turns, saturation, value = 0.1, 1.6, 1.3
    expected = []
    for pixel in pixels:
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        new = (h + turns) % 1, min(1, s * saturation), min(1, v * value)
        expected.append(colorsys.hsv_to_rgb(*new))
    changed = change_colours(
        jnp.asarray(pixels[None]), *map(jnp.asarray, (turns, saturation, value))
    )
    np.testing.assert_allclose(changed[0], expected, atol=1e-12)


def test_features_cannot_be_augmented_with_boxes():
    batch = {"image": jnp.zeros((2, 6)), "label": labels((0, 0, 0, 1, 1))}
    with pytest.raises(ValueError, match=r"data\.augment=boxes"):
        of_boxes(SIZE).change(jax.random.key(0), batch)


@pytest.mark.parametrize(
    ("text", "boxed", "said"),
    [
        ("domainbed", True, "choose boxes"),
        ("boxes:flip=0.0", False, "no boxes"),
        ("boxes:flip=2.0", True, "flip=2.0"),
        ("boxes", True, ""),
        ("none", True, ""),
    ],
)
def test_an_augmentation_that_does_not_suit_the_labels_is_refused(text, boxed, said):
    label = jax.tree.map(lambda leaf: np.asarray(leaf)[None], labels((0, 0, 0, 1, 1)))
    part = Split(np.zeros((1, 8, 8, 3), np.uint8), label if boxed else np.zeros(1, np.int32))
    data = Dataset("toy", 1, (Domain("a", part, None, part),), (0.0,), (1.0,))
    if not said:
        assert callable(choose_loading(text, 28, data))
        return
    with pytest.raises((ConfigError, ValueError), match=said):
        choose_loading(text, 28, data)


# A mosaic is four images around a point, and every box surrounds the pixels of its object.

SIDE, COUNT = 16, 6
all_mosaics = jax.jit(of_boxes(SIDE, scale=0.3, hue=0, saturation=0, value=0, mosaic=1.0).change)


def greys_of(valid=None):
    """Image k is of one grey of its own, with one box of class k."""
    greys = np.arange(COUNT, dtype=np.uint8) * 40 + 10
    boxes = np.tile(np.float32([0.25, 0.25, 0.75, 0.75]), (COUNT, 2, 1))
    boxes[:, 1] = 0
    classes = np.stack([np.arange(COUNT), np.full(COUNT, -1)], 1).astype(np.int32)
    return {
        "image": jnp.asarray(np.broadcast_to(greys[:, None, None, None], (COUNT, SIDE, SIDE, 3))),
        "label": {BOXES: jnp.asarray(boxes), CLASS: jnp.asarray(classes)},
        "valid": jnp.asarray(np.ones(COUNT, bool) if valid is None else valid),
    }


def test_four_images_meet_at_the_point_and_cover_everything():
    still = Move(jnp.ones(2), jnp.zeros(2))
    for seed in range(2):
        moves, seen = jax.jit(tile_moves)(jax.random.key(seed), still, 1.0)
        assert bool(seen.all())
        across, down = np.asarray(moves[3].shift) * SIDE  # where the last one begins
        assert min(across, down) >= 0
        assert max(across, down) <= SIDE
        tiles = [jnp.full((SIDE, SIDE, 3), float(t)) for t in range(4)]
        empty = {BOXES: jnp.zeros((4, 1, 4)), CLASS: jnp.full((4, 1), -1, jnp.int32)}
        image = np.asarray(jax.jit(put_together)(tiles, empty, moves, seen)[0])
        for y in range(SIDE):
            for x in range(SIDE):
                if abs(x + 0.5 - across) > 1 and abs(y + 0.5 - down) > 1:  # seams are blended
                    expected = 2 * (y > down) + (x > across)
                    np.testing.assert_allclose(image[y, x], expected, atol=1e-5)


def test_the_box_of_every_image_lies_on_its_pixels():
    changed = all_mosaics(jax.random.key(1), greys_of())
    boxes, classes = (np.asarray(changed["label"][name]) for name in (BOXES, CLASS))
    assert boxes.shape == (COUNT, 8, 4)
    assert (classes >= 0).sum() > COUNT
    for image, own, numbers in zip(np.asarray(changed["image"]), boxes, classes, strict=True):
        for (x1, y1, x2, y2), number in zip(own * SIDE, numbers, strict=True):
            if number >= 0:
                middle = image[int((y1 + y2) / 2), int((x1 + x2) / 2)]
                assert abs(int(middle[0]) - (number * 40 + 10)) <= 1


def test_a_batch_fills_its_mosaics_with_valid_images_only():
    changed = all_mosaics(jax.random.key(2), greys_of(np.arange(COUNT) < 2))
    classes = np.asarray(changed["label"][CLASS])[:2]
    assert set(classes[classes >= 0]) <= {0, 1}
    greys = {10, 50, GREY}
    flat = np.asarray(changed["image"])[:2].reshape(-1)
    assert np.isin(flat, list(greys)).mean() > 0.7  # the others are seams


def test_without_mosaic_images_and_boxes_are_those_of_the_plain_augmentation():
    key = jax.random.key(3)
    plain = jax.jit(of_boxes(SIDE).change)(key, greys_of())
    changed = jax.jit(of_boxes(SIDE, mosaic=1e-9).change)(key, greys_of())
    np.testing.assert_allclose(changed["image"].astype(int), plain["image"].astype(int), atol=1)
    for name in (BOXES, CLASS):
        assert np.array_equal(changed["label"][name][:, :2], plain["label"][name])
    assert (changed["label"][CLASS][:, 2:] == -1).all()
