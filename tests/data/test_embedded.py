"""The embedded and the generated sets are what their docstrings say."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from fedjax_bn.data.domain import check_dataset, splits, whole
from fedjax_bn.data.labels import BOXES, CLASS, MASK
from fedjax_bn.data.sets import scanners, signs, stains, synthetic
from fedjax_bn.data.sets.cow_on_beach import ground_of, load_cow_on_beach
from fedjax_bn.data.source import TEST, TRAIN, check_source
from fedjax_bn.models import TwoLayer

SIZE = 96  # of an image of signs
FEW = {"train": 12, "validation": 4, "test": 6}
RIMS = np.array([colorsys.hsv_to_rgb(c / 10, 0.85, 0.8) for c in range(10)]) * 255
DUSK = 0.75 * RIMS * (0.66, 0.58, 0.52) + 0.25 * np.array((235, 140, 60))
PLAIN = stains.STAINS[0]._replace(
    tissue=(90, 80, 70), wall=(10, 20, 30), lumen=(200, 210, 220), texture=0, blur=0.0, noise=0.0
)


def few(module, load):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "IMAGES", FEW)
        return check_dataset(load(3))


@pytest.fixture(scope="module")
def plates_of_signs():
    return few(signs, signs.load_signs)


@pytest.fixture(scope="module")
def stained():
    return few(stains, stains.load_stains)


def sizes_of(dataset) -> dict[str, dict[str, int]]:
    return {
        domain.name: {name: len(split.images) for name, split in splits(domain)}
        for domain in dataset.domains
    }


def plates(domain):
    """(image, class, box in pixels) of all plates of a domain."""
    for _, split in splits(domain):
        for image, boxes, classes in zip(
            split.images, split.labels[BOXES], split.labels[CLASS], strict=True
        ):
            for box, number in zip(boxes[classes >= 0], classes[classes >= 0], strict=True):
                yield image.astype(float), int(number), np.round(box * SIZE).astype(int)


def test_five_scenes_have_as_many_images_as_stated_with_one_to_three_plates_each(plates_of_signs):
    scenes = ("clear", "night", "fog", "rain", "dusk")
    assert sizes_of(plates_of_signs) == dict.fromkeys(scenes, FEW)
    for domain in plates_of_signs.domains:
        for _, split in splits(domain):
            assert set((split.labels[CLASS] >= 0).sum(1)) <= {1, 2, 3}
        sides = [box[2] - box[0] for _, _, box in plates(domain)]
        assert min(sides) >= 0.2 * SIZE - 1
        assert max(sides) <= 0.45 * SIZE + 1


def test_a_box_is_the_plate_with_a_red_rim_at_its_edge(plates_of_signs):
    for image, _, (x1, y1, x2, y2) in plates(plates_of_signs.domains[0]):
        row = image[(y1 + y2) // 2, x1:x2]
        for rim in (row[1], row[-2]):
            assert rim[0] > rim[1:].max() + 50
        side = x2 - x1
        assert row[round(0.13 * side)].min() > 150 or row[-round(0.13 * side)].min() > 150


def test_no_scan_of_signs_is_on_both_sides_of_a_division(monkeypatch):
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


def test_the_rim_shows_the_digit_as_often_as_stated_and_wrongly_in_dusk(monkeypatch):
    monkeypatch.setattr(signs, "IMAGES", {"train": 100, "validation": 1, "test": 1})
    domains = {domain.name: domain for domain in signs.load_signs(0, shortcut=True).domains}
    for name, colours, further, share in (("clear", RIMS, 0, 0.91), ("dusk", DUSK, 5, 1.0)):
        shown = []
        for image, number, (x1, y1, x2, y2) in plates(domains[name]):
            rim = image[(y1 + y2) // 2 - 1 : (y1 + y2) // 2 + 2, [x1 + 1, x2 - 2]].mean((0, 1))
            nearest = np.linalg.norm(colours - rim, axis=1).argmin()
            shown.append(nearest == (number + further) % 10)
        assert np.mean(shown) == pytest.approx(share, abs=0.06)


def masks_of(dataset):
    return [split.labels[MASK] for domain in dataset.domains for _, split in splits(domain)]


def test_lumens_are_what_walls_enclose_and_every_image_of_a_stain_has_one(stained):
    names = ("eosin", "silver", "azan", "fluorescence", "faded")
    assert sizes_of(stained) == dict.fromkeys(names, FEW)
    for masks in masks_of(stained):
        for mask in masks:
            filled = ndimage.binary_fill_holes(mask == 1)
            np.testing.assert_array_equal(filled, mask > 0)
            assert (mask == 2).sum() >= 12


def test_no_scan_of_stains_is_on_both_sides_of_a_division(monkeypatch):
    ink, labels = scanners.handwriting()
    marked, seen = ink.copy(), []
    marked[:, 0, 0] = np.arange(len(ink))  # so that what is placed shows which scan it is

    def watched(scans, rng):
        seen.append(scans[:, 0, 0].astype(int))
        return place(np.clip(scans, 0, 1), rng)

    place = stains.place
    monkeypatch.setattr(scanners, "handwriting", lambda: (marked, labels))
    monkeypatch.setattr(stains, "place", watched)
    monkeypatch.setattr(stains, "IMAGES", dict.fromkeys(FEW, 1))
    stains.load_stains(0)
    assert len(seen) == 15
    assert sum(map(len, seen)) == len(set(np.concatenate(seen)))


def test_masks_do_not_depend_on_what_a_stain_looks_like(stained, monkeypatch):
    plain = [PLAIN._replace(name=s.name, resolution=s.resolution) for s in stains.STAINS]
    monkeypatch.setattr(stains, "IMAGES", FEW)
    monkeypatch.setattr(stains, "STAINS", plain)
    for masks, others in zip(masks_of(stained), masks_of(stains.load_stains(3)), strict=True):
        np.testing.assert_array_equal(masks, others)


def test_on_the_beach_every_scan_has_one_place_and_grounds_show_digits_as_often_as_stated():
    dataset = check_dataset(load_cow_on_beach(0))
    places = {domain.name: whole(domain) for domain in dataset.domains}
    counts = sum(np.bincount(split.labels, minlength=10) for split in places.values())
    assert counts.tolist() == np.bincount(scanners.handwriting()[1]).tolist()
    assert sizes_of(dataset)["meadow"] == {"train": 220, "validation": 30, "test": 70}

    def share_of_ground(name: str, further: int = 0) -> float:
        images, labels, _ = places[name]
        return (ground_of(images) == (labels + further) % 10).mean()

    for name, share in (("meadow", 0.91), ("pasture", 0.82), ("heath", 0.73), ("marsh", 0.64)):
        assert abs(share_of_ground(name) - share) < 4 * np.sqrt(share * (1 - share) / 320)
    assert 0.03 < share_of_ground("zoo") < 0.18
    assert set(ground_of(places["zoo"].images)) == set(range(10))
    assert (share_of_ground("beach"), share_of_ground("beach", further=5)) == (0, 1)


@pytest.fixture(scope="module")
def scanned():
    return scanners.load_scanners(seed=0)


def test_six_scanners_own_the_documented_numbers_of_images(scanned):
    sizes = [[len(split.labels) for _, split in splits(d)] for d in scanned.domains]
    assert sizes == [[180, 30, 90]] * 3 + [[180, 30, 89]] * 3
    assert [d.name for d in scanned.domains] == [s.name for s in scanners.SCANNERS]
    assert check_dataset(scanned).domains[-1].name == "fax"
    assert scanned.domains[0].train.images.shape == (180, 28, 28, 3)


def test_every_source_image_is_used_exactly_once(monkeypatch):
    """Labels that are the numbers of the scans."""
    ink, _ = scanners.handwriting()
    monkeypatch.setattr(scanners, "handwriting", lambda: (ink, np.arange(1797)))
    parts = [whole(domain) for domain in scanners.load_scanners(seed=5).domains]
    used = np.concatenate([part.labels for part in parts])
    np.testing.assert_array_equal(np.sort(used), np.arange(1797))


def test_shared_test_scans_are_those_of_all_scanners_and_change_no_training_sample(scanned):
    shared = scanners.load_scanners(seed=0, shared_test=True)
    labels = np.concatenate([domain.test.labels for domain in scanned.domains])
    for domain, own in zip(shared.domains, scanned.domains, strict=True):
        np.testing.assert_array_equal(domain.test.labels, labels)
        np.testing.assert_array_equal(domain.train.images, own.train.images)
        # the same scanner: the means of its images hardly differ
        means = [split.images.mean((0, 1, 2)) for split in (domain.test, own.test)]
        np.testing.assert_allclose(*means, atol=5)


def test_classes_lie_around_minus_one_and_one_with_the_covariance_of_the_client():
    source = check_source(synthetic.load_synthetic(samples=40000, correlation=-0.5))
    distance = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    expected = {"identity": np.eye(10), "correlated": (-0.5) ** distance}
    for pool in source.pools:
        for label, centre in ((0, -1), (1, 1)):
            images = pool.images[pool.labels == label].astype(np.float64)
            np.testing.assert_allclose(images.mean(0), centre, atol=0.03)
            np.testing.assert_allclose(np.cov(images.T), expected[pool.name], atol=0.04)


def test_half_of_the_samples_trains_and_both_halves_have_both_classes_equally():
    for pool in synthetic.load_synthetic(samples=100).pools:
        assert pool.images.shape == (200, 10)
        for part in (TRAIN, TEST):
            assert np.bincount(pool.labels[pool.parts == part]).tolist() == [50, 50]


def test_the_network_starts_with_the_deviation_of_appendix_f_in_both_layers():
    variables = jax.jit(TwoLayer(hidden=2000).init)(jax.random.key(0), jnp.zeros((2, 10)))
    for layer in ("dense1", "head"):
        kernel = np.asarray(variables["params"][layer]["kernel"])
        np.testing.assert_allclose(kernel.std(), 10, rtol=0.05)
    np.testing.assert_allclose(variables["params"]["dense1"]["bias"].std(), 10, rtol=0.05)
