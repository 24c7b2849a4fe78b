"""A mosaic is four images around a point, and every box surrounds the pixels of its object."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.label_trees import BOXES, CLASS
from fedjax_bn.data.pixels.box_augment import _Move, _put_together, _tile_moves, of_boxes
from fedjax_bn.data.pixels.decode import GREY

SIZE, COUNT = 16, 6
all_mosaics = jax.jit(of_boxes(SIZE, scale=0.3, hue=0, saturation=0, value=0, mosaic=1.0).change)


def batch_of(valid=None):
    """Image k is of one grey of its own, with one box of class k."""
    greys = np.arange(COUNT, dtype=np.uint8) * 40 + 10
    boxes = np.tile(np.float32([0.25, 0.25, 0.75, 0.75]), (COUNT, 2, 1))
    boxes[:, 1] = 0
    classes = np.stack([np.arange(COUNT), np.full(COUNT, -1)], 1).astype(np.int32)
    return {
        "image": jnp.asarray(np.broadcast_to(greys[:, None, None, None], (COUNT, SIZE, SIZE, 3))),
        "label": {BOXES: jnp.asarray(boxes), CLASS: jnp.asarray(classes)},
        "valid": jnp.asarray(np.ones(COUNT, bool) if valid is None else valid),
    }


def test_four_images_meet_at_the_point_and_cover_everything():
    still = _Move(jnp.ones(2), jnp.zeros(2))
    for seed in range(2):
        moves, seen = jax.jit(_tile_moves)(jax.random.key(seed), still, 1.0)
        assert bool(seen.all())
        across, down = np.asarray(moves[3].shift) * SIZE  # where the last one begins
        assert min(across, down) >= 0
        assert max(across, down) <= SIZE
        tiles = [jnp.full((SIZE, SIZE, 3), float(t)) for t in range(4)]
        empty = {BOXES: jnp.zeros((4, 1, 4)), CLASS: jnp.full((4, 1), -1, jnp.int32)}
        image = np.asarray(jax.jit(_put_together)(tiles, empty, moves, seen)[0])
        for y in range(SIZE):
            for x in range(SIZE):
                if abs(x + 0.5 - across) > 1 and abs(y + 0.5 - down) > 1:  # seams are blended
                    expected = 2 * (y > down) + (x > across)
                    np.testing.assert_allclose(image[y, x], expected, atol=1e-5)


def test_the_box_of_every_image_lies_on_its_pixels():
    changed = all_mosaics(jax.random.key(1), batch_of())
    boxes, classes = (np.asarray(changed["label"][name]) for name in (BOXES, CLASS))
    assert boxes.shape == (COUNT, 8, 4)
    assert (classes >= 0).sum() > COUNT
    for image, own, numbers in zip(np.asarray(changed["image"]), boxes, classes, strict=True):
        for (x1, y1, x2, y2), number in zip(own * SIZE, numbers, strict=True):
            if number >= 0:
                middle = image[int((y1 + y2) / 2), int((x1 + x2) / 2)]
                assert abs(int(middle[0]) - (number * 40 + 10)) <= 1


def test_a_batch_fills_its_mosaics_with_valid_images_only():
    changed = all_mosaics(jax.random.key(2), batch_of(np.arange(COUNT) < 2))
    classes = np.asarray(changed["label"][CLASS])[:2]
    assert set(classes[classes >= 0]) <= {0, 1}
    greys = {10, 50, GREY}
    flat = np.asarray(changed["image"])[:2].reshape(-1)
    assert np.isin(flat, list(greys)).mean() > 0.7  # the others are seams


def test_without_mosaic_images_and_boxes_are_those_of_the_plain_augmentation():
    key = jax.random.key(3)
    plain = jax.jit(of_boxes(SIZE).change)(key, batch_of())
    changed = jax.jit(of_boxes(SIZE, mosaic=1e-9).change)(key, batch_of())
    np.testing.assert_allclose(changed["image"].astype(int), plain["image"].astype(int), atol=1)
    for name in (BOXES, CLASS):
        assert np.array_equal(changed["label"][name][:, :2], plain["label"][name])
    assert (changed["label"][CLASS][:, 2:] == -1).all()
