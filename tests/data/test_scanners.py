"""The embedded dataset: real digits, each with one owner, through scanners that differ."""

import numpy as np
import pytest

from fedjax_bn.data.domain import check_dataset, splits, whole
from fedjax_bn.data.sets import scanners


@pytest.fixture(scope="module")
def dataset():
    return scanners.load_scanners(seed=0)


def test_six_scanners_own_the_documented_numbers_of_images(dataset):
    sizes = [[len(split.labels) for _, split in splits(d)] for d in dataset.domains]
    assert sizes == [[180, 30, 90]] * 3 + [[180, 30, 89]] * 3
    assert [d.name for d in dataset.domains] == [s.name for s in scanners.SCANNERS]
    assert check_dataset(dataset).domains[-1].name == "fax"
    assert dataset.domains[0].train.images.shape == (180, 28, 28, 3)


def test_every_source_image_is_used_exactly_once(monkeypatch):
    """Labels that are the numbers of the scans."""
    ink, _ = scanners.handwriting()
    monkeypatch.setattr(scanners, "handwriting", lambda: (ink, np.arange(1797)))
    parts = [whole(domain) for domain in scanners.load_scanners(seed=5).domains]
    used = np.concatenate([part.labels for part in parts])
    np.testing.assert_array_equal(np.sort(used), np.arange(1797))


def test_scanners_differ_in_the_distribution_of_features(dataset):
    """Mean colours are further apart between any two scanners than within one."""
    means = [domain.train.images.mean(axis=(1, 2)) for domain in dataset.domains]
    centres = np.array([mean.mean(axis=0) for mean in means])
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    assert apart[~np.eye(6, dtype=bool)].min() > 20
