"""Published fundus images become folders that configs/fundus.py trains on."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import scans
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.masks.mask_folders import load_mask_folders
from fedjax_bn.data.source import TEST, TRAIN
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build

SCRIPT = Path(__file__).parents[2] / "launch/convert/fundus.py"
SITES = [f"Domain{k}" for k in (1, 2, 3, 4)]


@pytest.fixture(scope="module", params=["ROIs/", ""])
def converted(request, tmp_path_factory):
    original, folder = (tmp_path_factory.mktemp(name) for name in ("original", "folder"))
    for site in SITES:
        for part, count in (("train", 4), ("test", 2)):
            names = [f"{part}{k}" for k in range(count)]
            places = f"{request.param}image", f"{request.param}mask"
            scans.write_pairs(original / site / part, *places, names, (255, 200, 128, 60, 0))
    subprocess.run([sys.executable, SCRIPT, original, folder], check=True)
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
    experiment = build(read("configs/fundus.py", small))
    assert [domain.name for domain in experiment.unseen] == ["Domain4"]
    # A tenth of six images validates, at least one; none is kept for testing.
    assert [len(d.train.images) for d in experiment.internal.domains] == [5] * 3
    logits = np.zeros((1, 16, 16, 3), np.float32)
    logits[..., 2] = 1  # cup everywhere
    label = {MASK: np.ones((1, 16, 16), np.uint8)}  # disc everywhere
    scores = experiment.task.score.of_batch(logits, label, np.ones(1, bool))
    assert scores.counts[0].tolist() == [[256, 256, 256], [0, 256, 0]]
    official = build(read("configs/fundus.py:protocol=official", small))
    assert [len(d.test.images) for d in official.internal.domains] == [2] * 4
