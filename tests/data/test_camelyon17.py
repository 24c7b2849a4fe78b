"""Camelyon17 from a tiny folder in WILDS' form."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_bn.data.sets.camelyon17 import load_camelyon17
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


def write(folder: Path, **change) -> Path:
    """Writes the patches, and their table with changes of its first row."""
    folder.mkdir(exist_ok=True)
    rows = []
    for patient, node, center, slide in SLIDES:
        for k in range(PATCHES):
            values = (f"{patient:03}", node, 96 * k, 21792, k % 2, slide, center, int(k == 3))
            rows.append(dict(zip(COLUMNS, values, strict=True)))
            name = f"patient_{patient:03}_node_{node}"
            patch = folder / "patches" / name / f"patch_{name}_x_{96 * k}_y_21792.png"
            patch.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGBA", (96, 96), (len(rows) - 1, 0, 0, 255)).save(patch)
    rows[0] |= change
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["", *COLUMNS])
        table.writeheader()
        table.writerows({"": number} | row for number, row in enumerate(rows))
    return folder


def load(path, **options):
    return load_camelyon17(path, progress=False, **options)


def test_hospitals_are_domains_with_wilds_parts_and_every_patch_keeps_its_row(tmp_path):
    source = load(write(tmp_path / "camelyon17_v1.0").parent)
    assert [pool.name for pool in source.pools] == [f"center{k}" for k in range(5)]
    assert [len(pool.labels) for pool in source.pools] == [8, 4, 4, 4, 4]
    order = np.concatenate([pool.images[:, 50, 50, 0] for pool in source.pools])
    assert order.tolist() == list(range(24))
    assert source.pools[0].labels.tolist() == [0, 1] * 4
    assert source.pools[0].names[1].endswith("node_4/patch_patient_004_node_4_x_96_y_21792.png")
    assert source.groups == {"unseen": ("center1", "center2")}
    assert "found 8 images, expected 59436" in source.notes[0]
    divided = [TRAIN, TRAIN, TRAIN, VALIDATION]
    parts = [pool.parts.tolist() for pool in source.pools]
    assert parts == [divided * 2, [VALIDATION] * 4, [TEST] * 4, divided, divided]


@pytest.mark.parametrize("change", [{"split": 3}, {"center": None}])
def test_a_wrong_or_missing_table_is_named(tmp_path, change):
    folder = write(tmp_path / "copy", **change)
    with pytest.raises(ValueError, match=str(folder / "metadata.csv")):
        load(folder)
    with pytest.raises(FileNotFoundError, match=r"metadata\.csv"):
        load(tmp_path / "nowhere")
