"""Pictures of masks have the colours of classes, and of what is right, wrong and missed."""

import io

import numpy as np
from matplotlib.colors import to_rgb
from PIL import Image

import square_masks
from fedjax_bn.tasks.segmentation.overlays import coloured, judged, overlays
from fedjax_bn.training import plots

GREY = 100


def mixed(name):
    """The colour of a grey pixel of which most is a named colour."""
    return np.round(GREY + 0.6 * (255 * np.array(to_rgb(name)) - GREY)).astype(np.uint8)


def test_each_pixel_has_the_colour_of_its_class_or_of_its_judgement():
    image = np.full((1, 7, 1), GREY, np.uint8)
    truth = np.array([[0, 1, 2, 1, 0, 1, 255]], np.uint8)
    predicted = np.array([[0, 1, 2, 2, 1, 0, 1]], np.uint8)
    plain, unknown = [GREY] * 3, mixed("lightgrey")
    first, second = mixed("deepskyblue"), mixed("gold")
    found = coloured(image, truth)[0]
    expected = [plain, first, second, first, plain, first, unknown]
    np.testing.assert_array_equal(found, expected)
    right, other, wrong, missed = map(mixed, ("lime", "magenta", "red", "cyan"))
    expected = [plain, right, right, other, wrong, missed, unknown]
    np.testing.assert_array_equal(judged(image, truth, predicted)[0], expected)


def pixels_of(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def has(pixels, colour):
    return (np.abs(pixels.astype(int) - colour).max(-1) < 4).sum() > 20


def test_a_row_has_truth_and_prediction_of_each_picture_below_a_legend():
    image = np.full((16, 16, 1), GREY, np.uint8)
    truth, predicted = np.zeros((2, 16, 16), np.uint8)
    truth[4:12, 4:12], predicted[6:14, 4:12] = 1, 1
    rows = {"a$b": [(image, truth, predicted, "best")], "_": [(image, truth, truth, "")]}
    found = pixels_of(overlays(rows, ("background", "d$sc")))
    for name in ("deepskyblue", "lime", "red", "cyan"):
        assert has(found, mixed(name)), name
        assert has(found, 255 * np.array(to_rgb(name))), name  # in the legend
    assert not has(found, mixed("magenta"))


def test_samples_and_class_counts_show_masks_and_pixels(monkeypatch):
    data = square_masks.dataset()
    found = pixels_of(plots.samples([*data.domains], classes=square_masks.CLASSES))
    assert has(found, 255 * np.array(to_rgb("gold")))
    monkeypatch.setattr(plots, "png", lambda figure: figure)
    large = data.domains[0].train.labels["mask"].repeat(40, 0)
    split = data.domains[0].train._replace(labels={"mask": large})
    wide = data._replace(domains=(data.domains[0]._replace(train=split),))
    axes, bar = plots.draw_class_counts(wide).axes
    assert bar.get_ylabel() == "training pixels"
    assert axes.collections[0].get_array().max() > 10_000
