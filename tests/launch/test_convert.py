"""The converters of published originals, on tiny files of their forms."""

import runpy
import sys

import numpy as np
import pytest

import runs
import scans
import tiny_digits
from boxed import instances, picture, text
from fedjax_bn.data.labels import BOXES, CLASS, MASK, crowd
from fedjax_bn.data.masks.mask_folders import load_mask_folders
from fedjax_bn.data.sets.box_folders import load_boxes
from fedjax_bn.data.sets.digits import load_digits
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from fedjax_bn.run.config.file import read as config_of
from fedjax_bn.run.experiment.build import build


def convert(name, *arguments):
    """Runs a converter as a user does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(runs.ROOT / "launch" / "convert" / f"{name}.py"), run_name="__main__")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return tiny_digits.write_originals(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def files(originals, tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    for name, options in (("plain", ()), ("morpho", ("--morpho",))):
        convert("digits", originals, place / f"{name}.npz", *options)
    return place


def test_the_digits_have_all_samples_with_their_labels_divided_80_to_20(files):
    """The level of a plain image tells its sample; from 100 on those of published tests."""
    trained, tested = tiny_digits.TRAIN, tiny_digits.TEST
    totals = [trained, trained + 7, trained, trained + 7, trained + 3]
    domains = load_digits(files / "plain.npz").domains
    assert [d.name for d in domains] == ["mnist", "svhn", "usps", "synth_digits", "mnist_m"]
    for domain, total in zip(domains, totals, strict=True):
        assert len(domain.train.labels) == 4 * (total + tested) // 5
        levels = [split.images[:, 14, 14, 0].astype(int) for split in (domain.train, domain.test)]
        labels = np.concatenate([domain.train.labels, domain.test.labels])
        levels = np.concatenate(levels)
        np.testing.assert_array_equal(np.sort(levels), [*range(total), *range(100, 100 + tested)])
        np.testing.assert_array_equal(labels, levels % 100 % 10)


def test_no_digit_that_morpho_mnist_shows_trains(files):
    morpho = ("morpho_global", "morpho_local")
    domains = {d.name: d for d in load_digits(files / "morpho.npz", target=morpho).domains}
    plain = {d.name: d for d in load_digits(files / "plain.npz").domains}
    for name, domain in plain.items():
        levels = domains[name].train.images[:, 14, 14, 0]
        assert (levels.max() < 100) == (name in ("mnist", "mnist_m"))
        np.testing.assert_array_equal(domains[name].test.images, domain.test.images)
    for name in morpho:
        assert domains[name].train is None
        assert domains[name].test.images[:, 0, 0, 0].tolist() == list(range(200, 206))


def boxes_in(pool):
    """The class and box in pixels of every object of an image 64 x 32, and of crowds."""
    rows = []
    for boxes, classes in zip(pool.labels[BOXES], pool.labels[CLASS], strict=True):
        wide = np.round(boxes * 64 - (0, 16, 0, 16)).astype(int).tolist()
        rows.append([(k, *box) for k, box in zip(classes.tolist(), wide, strict=True) if k != -1])
    return rows


def read(folder, **options):
    return load_boxes(folder, image_size=32, progress=False, **options)


def voc(*boxes) -> str:
    rows = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax>"
        f"<ymax>{d}</ymax></bndbox></object>"
        for name, a, b, c, d in boxes
    )
    return f"<annotation>{rows}</annotation>"


def test_vocs_corners_are_counted_from_one_and_its_lists_divide(tmp_path):
    for name, box in (("a", ("cat", 1, 1, 8, 8)), ("b", ("dog", 33, 17, 64, 32))):
        picture(tmp_path / f"JPEGImages/{name}.png")
        text(tmp_path / f"Annotations/{name}.xml", voc(box))
    for part, name in (("train", "a"), ("val", "b")):
        text(tmp_path / f"ImageSets/Main/{part}.txt", f"{name}\n")
    convert("voc", tmp_path)
    source = read(tmp_path)
    (pool,) = source.pools
    assert source.classes == ("cat", "dog")
    assert pool.names.tolist() == ["JPEGImages/a.png", "JPEGImages/b.png"]
    assert pool.parts.tolist() == [TRAIN, VALIDATION]
    assert boxes_in(pool) == [[(0, 0, 0, 8, 8)], [(1, 32, 16, 64, 32)]]


def frame(name: str, scene: str, weather: str, *boxes) -> dict:
    rows = [
        {"category": c, "box2d": {"x1": a, "y1": b, "x2": x, "y2": y}} for c, a, b, x, y in boxes
    ]
    attributes = {"scene": scene, "weather": weather, "timeofday": "daytime"}
    return {"name": name, "attributes": attributes, "labels": rows}


@pytest.mark.parametrize(
    ("edition", "person"),
    [
        ("labels/det_20/det_{}.json", "pedestrian"),
        ("labels/bdd100k_labels_images_{}.json", "person"),
    ],
)
def test_both_editions_of_bdd100k_give_table_3s_domains(tmp_path, edition, person):
    first = frame("a.jpg", "highway", "clear", (person, 0, 0, 15, 7), ("car", 32, 16, 63, 31))
    first["labels"] += [{"category": "lane", "poly2d": []}]
    frames = {
        "train": [first, frame("b.jpg", "residential", "rainy", ("bike", 2, 2, 9, 9))],
        "val": [
            frame("c.jpg", "highway", "clear", ("traffic light", 0, 0, 3, 3)),
            frame("d.jpg", "tunnel", "clear", ("car", 0, 0, 3, 3)),
        ],
    }
    frames["val"][0] |= {"labels": None}
    for part, rows in frames.items():
        text(tmp_path / edition.format(part), rows)
        for row in rows:
            picture(tmp_path / "images/100k" / part / row["name"])
    convert("bdd100k", tmp_path, tmp_path / "scenes")
    clear, residential = read(tmp_path / "scenes").pools
    assert (clear.name, residential.name) == ("ClearHighway", "Residential")
    assert boxes_in(clear) == [[(0, 0, 0, 16, 8), (2, 32, 16, 64, 32)], []]
    assert boxes_in(residential) == [[(7, 2, 2, 10, 10)]]
    assert clear.parts.tolist() == [TRAIN, VALIDATION]
    convert("bdd100k", tmp_path, tmp_path / "weathers", "--by", "weather", "--signs")
    source = read(tmp_path / "weathers")
    assert [pool.name for pool in source.pools] == ["clear", "rainy"]
    assert source.classes[-2:] == ("traffic light", "traffic sign")


@pytest.mark.parametrize("fog", ["", "_foggy"])
def test_cityscapes_instances_become_boxes_and_groups_crowds(tmp_path, fog):
    for part in ("train", "val"):
        place = f"leftImg8bit{fog}/{part}/ulm/ulm_0_0_leftImg8bit{fog}"
        picture(tmp_path / f"{place}{'_beta_0.02' if fog else ''}.png")
        label = tmp_path / f"gtFine/{part}/ulm/ulm_0_0_gtFine_instanceIds.png"
        instances(label, (7, 0, 0, 64, 2), (26001, 8, 4, 20, 30), (24, 40, 4, 60, 30))
    convert("cityscapes", tmp_path, tmp_path / "made/cityscapes", *(["--foggy"] if fog else []))
    (pool,) = read(tmp_path / "made").pools
    assert (pool.name, pool.parts.tolist()) == ("cityscapes", [TRAIN, VALIDATION])
    assert boxes_in(pool) == [[(crowd(0), 40, 4, 60, 30), (2, 8, 4, 20, 30)]] * 2


@pytest.mark.parametrize(
    ("inner", "config", "person", "group"),
    [
        ("instances", "config_v1.2.json", "human--person", False),
        ("v2.0/instances", "config_v2.0.json", "human--person--individual", True),
    ],
)
def test_both_versions_of_vistas_are_read_by_their_config(tmp_path, inner, config, person, group):
    names = [person, "object--vehicle--on-rails", "human--person--person-group"]
    rows = [{"name": name, "instances": group} for name in ("construction--flat--road", *names)]
    text(tmp_path / config, {"labels": rows})
    picture(tmp_path / "training/images/a.jpg")
    shown = (5, 0, 0, 64, 32), (257, 0, 0, 8, 8), (515, 30, 10, 64, 32), (770, 8, 0, 16, 8)
    instances(tmp_path / "training" / inner / "a.png", *shown)
    convert("vistas", tmp_path, tmp_path / "made/vistas")
    (pool,) = read(tmp_path / "made").pools
    crowds = [(crowd(0), 8, 0, 16, 8)] if group else []
    assert boxes_in(pool) == [[(0, 0, 0, 8, 8), (5, 30, 10, 64, 32), *crowds]]


SITES = [f"Domain{k}" for k in (1, 2, 3, 4)]


@pytest.fixture(scope="module", params=["ROIs/", ""])
def converted(request, tmp_path_factory):
    original, folder = (tmp_path_factory.mktemp(name) for name in ("original", "folder"))
    for site in SITES:
        for part, count in (("train", 4), ("test", 2)):
            names = [f"{part}{k}" for k in range(count)]
            places = f"{request.param}image", f"{request.param}mask"
            scans.write_pairs(original / site / part, *places, names, (255, 200, 128, 60, 0))
    convert("fundus", original, folder)
    return folder


def test_masks_are_disc_and_cup_with_the_official_parts(converted):
    classes = ("background", "disc", "cup")
    source = load_mask_folders(converted, image_size=20, classes=classes, progress=False)
    assert [pool.name for pool in source.pools] == SITES
    rows = source.pools[0].labels[MASK][0][:, 0]
    assert rows.tolist() == [0] * 8 + [1] * 8 + [2] * 4
    assert sorted(source.pools[0].parts.tolist()) == [TRAIN] * 4 + [TEST] * 2


def test_the_configuration_leaves_one_site_out_and_scores_the_disc_with_its_cup(converted):
    small = [("data.path", str(converted)), ("data.image_size", "16"), ("data.cache", "")]
    small.append(("model", "UNet:width=2:levels=1"))
    experiment = build(config_of("configs/fundus.py", small))
    assert [domain.name for domain in experiment.unseen] == ["Domain4"]
    # A tenth of six images validates, at least one; none is kept for testing.
    assert [len(d.train.images) for d in experiment.internal.domains] == [5] * 3
    logits = np.zeros((1, 16, 16, 3), np.float32)
    logits[..., 2] = 1  # cup everywhere
    label = {MASK: np.ones((1, 16, 16), np.uint8)}  # disc everywhere
    scores = experiment.task.score.of_batch(logits, label, np.ones(1, bool))
    assert scores.counts[0].tolist() == [[256, 256, 256], [0, 256, 0]]
    official = build(config_of("configs/fundus.py:protocol=official", small))
    assert [len(d.test.images) for d in official.internal.domains] == [2] * 4
