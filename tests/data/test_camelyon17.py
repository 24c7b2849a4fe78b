"""Camelyon17 from a tiny folder in WILDS' form."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.sets import camelyon17
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

# patient, node, center, slide
SLIDES = (
    (4, 4, 0, 0),
    (9, 1, 0, 1),
    (20, 0, 1, 10),
    (40, 2, 2, 20),
    (60, 3, 3, 30),
    (80, 4, 4, 40),
)
PATCHES = 4  # of each slide
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")


def rows_of(slides=SLIDES) -> list[dict]:
    rows = []
    for patient, node, center, slide in slides:
        for k in range(PATCHES):
            values = (f"{patient:03}", node, 96 * k, 21792, k % 2, slide, center, int(k == 3))
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def write(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    columns = ["", *rows[0]]
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows({"": number} | row for number, row in enumerate(rows))
    for number, row in enumerate(rows):
        if not {"patient", "node", "x_coord", "y_coord"} <= set(row):
            continue
        slide = f"patient_{row['patient']}_node_{row['node']}"
        name = f"patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
        (folder / "patches" / slide).mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (96, 96), (number, 0, 0, 255)).save(folder / "patches" / slide / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("wilds") / "camelyon17_v1.0", rows_of())


def load(path, **options):
    return camelyon17.load_camelyon17(path, progress=False, **options)


def test_hospitals_are_domains_and_every_patch_keeps_its_row(folder):
    source = load(folder)
    assert [pool.name for pool in source.pools] == [f"center{k}" for k in range(5)]
    assert [len(pool.labels) for pool in source.pools] == [8, 4, 4, 4, 4]
    order = np.concatenate([pool.images[:, 50, 50, 0] for pool in source.pools])
    np.testing.assert_array_equal(order, np.arange(24))
    np.testing.assert_array_equal(source.pools[0].labels, [0, 1] * 4)
    assert source.pools[0].names[1].endswith("node_4/patch_patient_004_node_4_x_96_y_21792.png")
    assert source.groups == {"unseen": ("center1", "center2")}
    assert "[8, 4, 4, 4, 4] patches" in source.notes[0]
    assert "a reduced copy" in source.notes[0]


def test_parts_are_those_of_wilds(folder):
    parts = [pool.parts.tolist() for pool in load(folder.parent).pools]
    divided = [TRAIN, TRAIN, TRAIN, VALIDATION]
    assert parts == [divided * 2, [VALIDATION] * 4, [TEST] * 4, divided, divided]


def test_images_are_resized_and_kept_in_the_cache(folder, tmp_path):
    first = load(folder, image_size=32, cache=tmp_path)
    assert first.pools[0].images.shape == (8, 32, 32, 3)
    assert isinstance(first.pools[0].images, np.memmap)
    assert len(list(tmp_path.glob("*.npy"))) == 5


def test_patients_without_leading_zeros_are_the_same_patients(folder, tmp_path):
    text = (folder / "metadata.csv").read_text()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "patches").symlink_to(folder / "patches")
    (copy / "metadata.csv").write_text(re.sub(r"(?m)^(\d+),0+(\d+),", r"\1,\2,", text))
    assert load(copy).pools[0].names[0] == load(folder).pools[0].names[0]


def test_all_missing_patches_up_to_ten_are_named(folder, tmp_path):
    copy = write(tmp_path / "copy", rows_of())
    gone = sorted(copy.glob("patches/patient_00*/*.png"))
    for file in gone[:3]:
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 3 patches .*x_0.*, .*x_192.*, .*x_288"):
        load(copy)
    for file in copy.glob("patches/*/*.png"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 24 patches .* and 14 more; unpack"):
        load(copy)


def test_unreadable_patches_are_named(tmp_path):
    copy = write(tmp_path / "copy", rows_of())
    for file in sorted(copy.glob("patches/patient_004*/*.png"))[:2]:
        file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"x_0_y_21792\.png .*x_192_y_21792\.png"):
        load(copy)


def test_a_missing_table_says_what_to_fetch(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metadata\.csv"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change", [{"center": 5}, {"tumor": 2}, {"split": 3}, {"slide": "x"}, {"center": None}]
)
def test_a_wrong_table_is_refused_naming_it(tmp_path, change):
    rows = rows_of()
    if None in change.values():
        rows = [{key: row[key] for key in row if key not in change} for row in rows]
    else:
        rows[0] |= change
    copy = write(tmp_path / "copy", rows)
    with pytest.raises(ValueError, match=str(copy / "metadata.csv")):
        load(copy)
