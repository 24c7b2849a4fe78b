"""Tiles of an image of any size: their places, and the image put together again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedjax_bn.data.pixels.decode import cut, put_together, tile_places
from fedjax_bn.engine.inputs import UNLABELLED

SIDES = st.integers(1, 24)


@given(SIDES, SIDES, SIDES, st.sampled_from([(), (3,), (2, 2)]), st.sampled_from([None, 255]))
def test_tiles_put_together_are_the_image(height, width, size, channels, fill):
    rng = np.random.default_rng(height * 24 + width)
    image = rng.integers(0, 255, (height, width, *channels), dtype=np.uint8)
    tiles, places = cut(image, size, fill)
    assert tiles.shape == (len(tile_places(height, width, size)), size, size, *channels)
    assert np.array_equal(put_together(tiles, places, (height, width)), image)


@given(SIDES, SIDES, SIDES)
def test_each_labelled_pixel_of_a_mask_is_in_one_tile(height, width, size):
    tiles, _ = cut(np.ones((height, width), np.uint8), size, UNLABELLED)
    assert (tiles == 1).sum() == height * width
    assert (tiles == UNLABELLED).sum() == tiles.size - height * width


def test_the_last_tile_is_shifted_inside_and_a_small_image_is_padded_by_its_edge():
    tiles, places = cut(np.arange(5)[None].repeat(2, 0), 2)
    assert places.tolist() == [[0, 0], [0, 2], [0, 3]]
    assert tiles[:, 0].tolist() == [[0, 1], [2, 3], [3, 4]]
    masks, _ = cut(np.arange(5, dtype=np.uint8)[None].repeat(2, 0), 2, UNLABELLED)
    assert masks[:, 0].tolist() == [[0, 1], [2, 3], [UNLABELLED, 4]]
    assert cut(np.array([[7, 8]]), 3)[0].tolist() == [[[7, 8, 8]] * 3]
