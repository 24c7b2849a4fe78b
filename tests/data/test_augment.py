"""Augmentations against Pillow and the standard library, and the drawing of samples."""

import colorsys
from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy import stats
from sklearn.datasets import load_sample_images

from fedjax_bn.data.pixels import augment
from fedjax_bn.data.sampling import drawing

PHOTOGRAPHS = [image[40:340:2, 100:500:2] for image in load_sample_images().images]  # 150 x 200
BOXES = [(0, 0, 150, 200, 150), (10, 31, 97, 120, 128), (60, 80, 7, 5, 16)]
crop_and_resize = jax.jit(augment.crop_and_resize, static_argnames="size")
rotate = jax.jit(augment.rotate)
shift_hue = jax.jit(augment.shift_hue)
jitter = jax.jit(augment.jitter)


def levels(image):
    """Pixels in [0, 1] -> byte levels, not rounded."""
    return 255 * np.asarray(image, np.float64)


def pixels(photograph):
    return jnp.asarray(photograph / 255.0)


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def assert_uniform(values, low, high):
    """Kolmogorov-Smirnov; the keys are fixed, so this cannot fail by chance."""
    values = np.asarray(values, np.float64)
    assert low - 1e-6 <= values.min()
    assert values.max() <= high + 1e-6
    assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 0.01


@pytest.mark.parametrize("box", BOXES)
def test_crop_and_resize_equals_pillow_in_floats_and_within_a_level_in_bytes(box):
    top, left, high, wide, size = box
    resize = partial(crop_and_resize, box=box[:4], size=size)
    for photograph in PHOTOGRAPHS:
        cut = Image.fromarray(photograph).crop((left, top, left + wide, top + high))
        theirs = np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR), float)
        single = levels(resize(jnp.asarray(photograph, jnp.float32) / 255))
        assert np.abs(single - theirs).max() <= 1.01  # Pillow rounds twice
        assert np.abs(single - theirs).mean() < 0.4
        with jax.enable_x64(True):
            double = levels(resize(pixels(photograph)))
        for channel in range(3):
            plane = Image.fromarray(photograph[..., channel].astype(np.float32))
            plane = plane.crop((left, top, left + wide, top + high))
            theirs = plane.resize((size, size), Image.Resampling.BILINEAR)
            np.testing.assert_allclose(double[..., channel], theirs, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("angle", [-30.0, -17.31, 0.0, 0.4, 90.0, 151.5])
def test_rotation_equals_pillow_bit_by_bit_and_in_float32_but_for_few_pixels(angle):
    for photograph in PHOTOGRAPHS:
        theirs, image = Image.fromarray(photograph).rotate(angle), jnp.asarray(photograph)
        np.testing.assert_array_equal(rotate(image, angle), theirs)
        single = np.asarray(rotate(image, jnp.float32(angle)))
        assert (single != np.asarray(theirs)).any(-1).mean() < 1e-3


@pytest.mark.parametrize("which", range(3))
def test_brightness_contrast_and_saturation_are_within_rounding_of_pillow(which):
    enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[which]
    order = np.array([which, *(k for k in range(4) if k != which)], np.int32)
    for factor in (0.0, 0.7, 1.0, 2.5):
        factors = jnp.ones(3).at[which].set(factor)
        for photograph in PHOTOGRAPHS:
            theirs = enhancer(Image.fromarray(photograph)).enhance(factor)
            ours = levels(jitter(pixels(photograph), factors, 0.0, order))
            # Pillow rounds the grey (half a level, times |1 - factor|) and cuts (one level).
            assert np.abs(ours - np.asarray(theirs)).max() <= 1.01 + abs(1 - factor) / 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("turns", [-0.5, -0.3, 0.0, 0.1, 1 / 3])
def test_hue_equals_the_standard_librarys(turns):
    photograph = PHOTOGRAPHS[1][::7, ::5]
    special = np.array([[[0, 0, 0], [255, 255, 255], [9, 9, 9], [255, 0, 0], [0, 200, 200]]])
    for image in (photograph, special):
        flat = (image / 255).reshape(-1, 3)
        hsv = [colorsys.rgb_to_hsv(*rgb) for rgb in flat]
        theirs = [colorsys.hsv_to_rgb((h + turns) % 1, s, v) for h, s, v in hsv]
        ours = np.asarray(shift_hue(pixels(image), turns)).reshape(-1, 3)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_jitter_applies_the_four_changes_in_every_given_order():
    image = PHOTOGRAPHS[0][::5, ::5] / 255
    factors, turns = np.array([0.8, 1.3, 0.7]), 0.2

    def changed(image, which):
        """In NumPy, from the definitions."""
        if which == 3:
            return np.asarray(shift_hue(image, turns))
        grey = image @ np.array([[0.299], [0.587], [0.114]])
        other = (np.zeros_like(grey), np.full_like(grey, grey.mean()), grey)[which]
        return np.clip(factors[which] * image + (1 - factors[which]) * other, 0, 1)

    orders = np.array(list(permutations(range(4))), np.int32)
    arguments = map(jnp.asarray, (image, factors, turns))
    ours = jax.jit(jax.vmap(partial(augment.jitter, *arguments)))(orders)
    for order, result in zip(orders, ours, strict=True):
        expected = image
        for which in order:
            expected = changed(expected, which)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12)


def boxes(count, height, width, scale):
    draw = partial(augment.crop_box, height=height, width=width, scale=scale)
    return [np.asarray(values) for values in jax.jit(jax.vmap(draw))(keys(count))]


def test_boxes_have_the_areas_the_ratios_and_the_places_asked_for():
    top, left, high, wide = boxes(4000, 1000, 900, (0.1, 0.3))
    assert_uniform(high * wide / 9e5 + np.linspace(-1e-3, 1e-3, 4000), 0.099, 0.301)
    assert_uniform(np.log(wide / high), np.log(3 / 4) - 2e-3, np.log(4 / 3) + 2e-3)
    for start, length, side in ((top, high, 1000), (left, wide, 900)):
        assert start.min() >= 0
        assert (start + length).max() <= side
        assert_uniform(start / (side - length), 0, 1)


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(10, 100, (0, 43, 10, 13)), (100, 10, (43, 0, 13, 10))]
)
def test_where_no_box_fits_it_is_the_largest_in_the_middle(height, width, expected):
    assert (np.stack(boxes(5, height, width, (0.99, 1.0)), -1) == expected).all()


def test_office_mirrors_half_of_the_images_and_turns_them_by_angles_uniform_in_the_range():
    side = 91
    # Each pixel is its own place, so that a result tells where its pixels came from.
    place = np.stack([*np.meshgrid(np.arange(side), np.arange(side)), np.zeros((side, side))], -1)
    images = jnp.broadcast_to(jnp.asarray(place, jnp.uint8), (300, side, side, 3))
    turned = np.asarray(jax.jit(augment.office())(jax.random.key(0), images), int) - side // 2
    x, y = turned[:, side // 2, side - 3, :2].T
    mirrored = x < 0
    assert stats.binomtest(int(mirrored.sum()), len(mirrored)).pvalue > 0.01
    assert_uniform(np.rad2deg(np.arctan2(y, abs(x))), -30.7, 30.7)  # of nearest pixels


def test_jitter_draws_factors_uniformly_and_all_orders_alike_and_apart(monkeypatch):
    """What a factor does to an image is compared with Pillow above."""
    spread = (0.3, 0.4, 1.2, 0.1)
    monkeypatch.setattr(augment, "jitter", lambda image, *drawn: drawn)
    draw = partial(augment.random_jitter, image=jnp.zeros((1, 1, 3)), spread=spread)
    factors, turns, orders = map(np.asarray, jax.jit(jax.vmap(draw))(keys(4800)))
    for width, column in zip(spread, (*factors.T, 1 + turns), strict=True):
        assert_uniform(column, max(0, 1 - width), 1 + width)
    _, counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 0.01
    correlation = np.corrcoef(np.column_stack([factors, orders]).T)
    assert np.abs(correlation[:3, 3:]).max() < 0.05


RUN = {"domainbed": jax.jit(augment.domainbed(48)), "office": jax.jit(augment.office())}


@pytest.fixture(scope="module")
def batch():
    return jnp.asarray(np.stack([p[i : i + 64, i : i + 64] for p in PHOTOGRAPHS for i in (0, 80)]))


@pytest.mark.parametrize("name", RUN)
def test_a_key_decides_every_bit_and_a_sample_does_not_depend_on_the_others(name, batch):
    run = RUN[name]
    first = np.asarray(run(jax.random.key(3), batch))
    assert first.dtype == np.uint8
    assert (first != np.asarray(run(jax.random.key(4), batch))).mean() > 0.3
    again = run(jax.random.key(3), batch.at[0].set(7).at[3].set(200))
    np.testing.assert_array_equal(again[1:3], first[1:3])
    results = np.asarray(run(jax.random.key(0), jnp.repeat(batch[:1], 4, axis=0)))
    for i, j in zip(*np.triu_indices(4, 1), strict=True):
        assert (results[i] != results[j]).mean() > 0.3


def arrays(sizes=(7, 3), seed=0):
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=(n, 6)).astype(np.float32), random.integers(0, 3, n)) for n in sizes
    ]


def test_every_epoch_holds_each_sample_once_with_its_label():
    clients = arrays()
    draw = drawing(clients, batch_size=4, local_epochs=2)
    first, second = (draw(jax.random.key(seed)) for seed in range(2))
    assert first["label"].shape == (2, 4, 4)
    for k, (images, labels) in enumerate(clients):
        for epoch in (slice(0, 2), slice(2, 4)):
            valid = np.asarray(first["valid"][k, epoch])
            index = np.asarray(first["image"][k, epoch])[valid]
            assert sorted(index) == list(range(len(images)))
            np.testing.assert_array_equal(first["source"][k][index], images[index])
            np.testing.assert_array_equal(first["label"][k, epoch][valid], labels[index])
    assert (first["image"] != second["image"]).any()
    assert first["size"].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([], "no domains"),
        ([(np.zeros((2, 6), np.float32), np.zeros(3, int))], "client 0"),
        ([(np.zeros((2, 6), np.float32), np.array([0.5, 1]))], "the labels of client 0"),
        ([*arrays((2,)), (np.zeros((2, 5), np.float32), np.zeros(2, int))], r"\[5\]"),
        ([(np.zeros((2, 6), int), np.zeros(2, int))], "the images of client 0 have dtype int64"),
    ],
)
def test_arrays_that_do_not_suit_are_refused(clients, said):
    with pytest.raises(ValueError, match=said):
        drawing(clients)
