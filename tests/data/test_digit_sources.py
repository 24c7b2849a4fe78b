"""Digit datasets as sources: scanners and Morpho-MNIST."""

from pathlib import Path

import numpy as np
import pytest

from fedjax_bn.data.domain import splits
from fedjax_bn.data.sets import digits, scanners
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, as_source
from tiny_digits import TEST as TESTING
from tiny_digits import TRAIN as TRAINING
from tiny_digits import write_mnist


def test_a_dataset_as_a_source_has_its_samples_and_its_splits_as_parts():
    dataset = scanners.load(seed=3)
    source = as_source(dataset)
    for pool, domain in zip(source.pools, dataset.domains, strict=True):
        assert np.bincount(pool.parts).tolist()[:2] == [180, 30]
        for part, (_, split) in zip((TRAIN, VALIDATION, TEST), splits(domain), strict=True):
            np.testing.assert_array_equal(pool.images[pool.parts == part], split.images)
            np.testing.assert_array_equal(pool.labels[pool.parts == part], split.labels)
        assert len(set(pool.names)) == len(pool.names)


@pytest.fixture(scope="module")
def morpho(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("morpho")
    for name in ("global", "local"):
        write_mnist(folder / name)
    return folder


def test_morpho_mnist_has_two_domains_with_the_parts_of_mnist(morpho):
    source = digits.load_morpho_mnist(morpho)
    assert [pool.name for pool in source.pools] == ["morpho_global", "morpho_local"]
    for pool in source.pools:
        assert pool.images.shape == (TRAINING + TESTING, 28, 28, 3)
        np.testing.assert_array_equal(pool.parts, np.repeat([TRAIN, TEST], [TRAINING, TESTING]))
        np.testing.assert_array_equal(pool.images[TRAINING:, 0, 0, 1], 100 + np.arange(TESTING))
        assert pool.names[TRAINING] == "test/00000"
        np.testing.assert_array_equal(pool.names, source.pools[0].names)
    assert len(source.notes) == 2
    assert "a reduced copy" in source.notes[0]


def test_missing_morpho_folders_and_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks the folders global, local; Morpho-MNIST"):
        digits.load_morpho_mnist(tmp_path)
    for name in ("global", "local"):
        write_mnist(tmp_path / name)
    (tmp_path / "local" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"local/t10k-labels.* is missing; Morpho-MNIST"):
        digits.load_morpho_mnist(tmp_path)
