"""Fundus images and polyps in their published folders."""

import numpy as np
import pytest

import scans
from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.masks import published
from fedjax_bn.data.source import TEST, TRAIN
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build

CENTRES = ("REFUGE", "Drishti", "ORIGA", "BinRushed", "Magrabia")
DISC = (255, 200, 128, 60, 0)  # background, background, disc, disc, cup
HOW = {"image_size": 20, "progress": False}


def write_fundus(root, domains=("Domain1", "Domain2", "Domain3", "Domain4"), inside="ROIs/"):
    for domain in domains:
        for part, count in (("train", 4), ("test", 2)):
            names = [f"{part}{k}" for k in range(count)]
            folder = root / domain / part
            scans.write_pairs(folder, f"{inside}image", f"{inside}mask", names, DISC)
    return root


@pytest.mark.parametrize(("name", "inside"), [("fundus", "ROIs/"), ("fundus_centres", "")])
def test_fundus_masks_are_disc_and_cup_with_the_official_parts(tmp_path, name, inside):
    domains = CENTRES if name == "fundus_centres" else [f"Domain{k}" for k in (1, 2, 3, 4)]
    source = published.load(name, write_fundus(tmp_path, domains, inside), **HOW)
    assert [pool.name for pool in source.pools] == list(domains)
    assert source.classes == ("background", "disc", "cup")
    rows = source.pools[0].labels[MASK][0][:, 0]
    assert rows.tolist() == [0] * 8 + [1] * 8 + [2] * 4
    assert source.pools[0].parts.tolist() == [TEST] * 2 + [TRAIN] * 4
    assert source.pools[0].names[0] == f"{domains[0]}/test/{inside}image/test0.png"
    assert any(f"{name}, {domains[0]}: found 6 images, expected" in n for n in source.notes)
    clients, (unseen,) = make_clients(source, target=domains[1], validation=0.25)
    assert len(unseen.test.images) == 6
    first = clients.domains[0]
    assert [len(part.images) for part in first[1:]] == [3, 1, 2]


def test_polyps_are_white_and_their_masks_may_have_another_suffix(tmp_path):
    for site, suffix in (("Kvasir-SEG", ".png"), ("CVC-300", ".bmp")):
        scans.write_pairs(
            tmp_path / site, "images", "masks", "ab", (0, 100, 101, 255), suffix=suffix
        )
    source = published.load("polyps", tmp_path, domains=("Kvasir", "CVC-300"), **HOW)
    assert [pool.name for pool in source.pools] == ["Kvasir", "CVC-300"]
    assert source.pools[1].labels[MASK][0][:, 0].tolist() == [0] * 10 + [1] * 10
    assert source.pools[0].parts is None
    with pytest.raises(FileNotFoundError, match=r"lacks the folders CVC-ClinicDB, .*data.domains"):
        published.load("polyps", tmp_path, **HOW)


def test_polyps_in_jpeg_are_white_from_101_too(tmp_path):
    """As Kvasir's authors store them."""
    values, places = (0, 0, 115, 115, 255, 255), ("images", "masks")
    scans.write_pairs(tmp_path / "Kvasir", *places, "a", values, suffix=".jpg")
    how = {"image_size": 24, "progress": False}
    (pool,) = published.load("polyps", tmp_path, domains=("Kvasir",), **how).pools
    assert pool.labels[MASK][0][:, 0].tolist() == [0] * 8 + [1] * 16


def remove(name):
    return lambda folder: (folder / name).unlink()


def add(name):
    return lambda folder: (folder / name).write_bytes((folder / "images/a.png").read_bytes())


@pytest.mark.parametrize(
    ("values", "change", "said"),
    [
        (
            (0, 255),
            remove("masks/a.png"),
            "1 images in .*Kvasir have no mask, such as images/a.png",
        ),
        ((0, 255), remove("images/a.png"), "1 masks in .* no image, .*a.png, .*: it must hold CVC"),
        ((0, 255), add("images/a.bmp"), "a.bmp and .*a.png have one name, but an image needs one"),
        ((0, 1), None, "Kvasir has no polyp in any mask, so its masks have other values"),
    ],
)
def test_a_folder_that_is_not_right_is_named(tmp_path, values, change, said):
    folder = tmp_path / "Kvasir"
    scans.write_pairs(folder, "images", "masks", "ab", values)
    if change:
        change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        published.load("polyps", tmp_path, domains=("Kvasir",), **HOW)


def test_the_configuration_leaves_one_site_out_and_scores_the_disc_with_its_cup(tmp_path):
    path = [("data.path", str(write_fundus(tmp_path))), ("data.image_size", "16")]
    small = [*path, ("data.cache", ""), ("model", "UNet:width=2:levels=1")]
    experiment = build(read("configs/fundus.py", small))
    assert [domain.name for domain in experiment.unseen] == ["Domain4"]
    # A tenth of six images validates, at least one; none is kept for testing.
    assert [len(d.train.images) for d in experiment.internal.domains] == [5] * 3
    logits = np.zeros((1, 16, 16, 3), np.float32)
    logits[..., 2] = 1  # cup everywhere
    label = {MASK: np.ones((1, 16, 16), np.uint8)}  # disc everywhere
    found = experiment.task.score.of_batch(logits, label, np.ones(1, bool))
    assert found.counts[0].tolist() == [[256, 256, 256], [0, 256, 0]]
    official = build(read("configs/fundus.py:protocol=official", small))
    assert [len(d.test.images) for d in official.internal.domains] == [2] * 4
