"""The embedded detection dataset is what its docstring says."""

import colorsys

import numpy as np
import pytest

from fedjax_bn.data.domain import check_dataset, splits
from fedjax_bn.data.label_trees import BOXES, CLASS
from fedjax_bn.data.sets import scanners, signs

SIZE = 96
FEW = {"train": 12, "validation": 4, "test": 6}


@pytest.fixture(scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs, "IMAGES", FEW)
        yield check_dataset(signs.load_signs(3))


def plates(domain):
    """(image, class, box in pixels) of all plates of a domain."""
    for _, split in splits(domain):
        for image, boxes, classes in zip(
            split.images, split.labels[BOXES], split.labels[CLASS], strict=True
        ):
            for box, number in zip(boxes[classes >= 0], classes[classes >= 0], strict=True):
                yield image.astype(float), int(number), np.round(box * SIZE).astype(int)


def test_five_scenes_have_as_many_images_as_stated_with_one_to_three_plates_each(plain):
    assert [domain.name for domain in plain.domains] == ["clear", "night", "fog", "rain", "dusk"]
    for domain in plain.domains:
        sizes = {name: len(split.images) for name, split in splits(domain)}
        assert sizes == FEW
        for _, split in splits(domain):
            counts = (split.labels[CLASS] >= 0).sum(1)
            assert set(counts) <= {1, 2, 3}
        sides = [box[2] - box[0] for _, _, box in plates(domain)]
        assert min(sides) >= 0.2 * SIZE - 1
        assert max(sides) <= 0.45 * SIZE + 1


def test_a_box_is_the_plate_with_a_red_rim_at_its_edge(plain):
    for image, _, (x1, y1, x2, y2) in plates(plain.domains[0]):
        row = image[(y1 + y2) // 2, x1:x2]
        for rim in (row[1], row[-2]):
            assert rim[0] > rim[1:].max() + 50
        side = x2 - x1
        assert row[round(0.13 * side)].min() > 150 or row[-round(0.13 * side)].min() > 150


def test_no_scan_is_on_both_sides_of_a_division(monkeypatch):
    """Labels that are the numbers of the scans."""
    ink, _ = scanners.handwriting()
    monkeypatch.setattr(scanners, "handwriting", lambda: (ink, np.arange(len(ink))))
    monkeypatch.setattr(signs, "IMAGES", {"train": 30, "validation": 10, "test": 20})
    used = [
        set(split.labels[CLASS][split.labels[CLASS] >= 0].tolist())
        for domain in signs.load_signs(0).domains
        for _, split in splits(domain)
    ]
    assert sum(map(len, used)) == len(set().union(*used))


RIMS = np.array([colorsys.hsv_to_rgb(c / 10, 0.85, 0.8) for c in range(10)]) * 255
DUSK = 0.75 * RIMS * (0.66, 0.58, 0.52) + 0.25 * np.array((235, 140, 60))


def test_the_rim_shows_the_digit_as_often_as_stated_and_wrongly_in_dusk(monkeypatch):
    monkeypatch.setattr(signs, "IMAGES", {"train": 200, "validation": 1, "test": 1})
    domains = {domain.name: domain for domain in signs.load_signs(0, shortcut=True).domains}
    for name, colours, further, share in (("clear", RIMS, 0, 0.91), ("dusk", DUSK, 5, 1.0)):
        shown = []
        for image, number, (x1, y1, x2, y2) in plates(domains[name]):
            rim = image[(y1 + y2) // 2 - 1 : (y1 + y2) // 2 + 2, [x1 + 1, x2 - 2]].mean((0, 1))
            nearest = np.linalg.norm(colours - rim, axis=1).argmin()
            shown.append(nearest == (number + further) % 10)
        assert np.mean(shown) == pytest.approx(share, abs=0.04)
