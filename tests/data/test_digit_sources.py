"""Digit datasets as sources: the benchmark, scanners and Morpho-MNIST."""

from pathlib import Path

import numpy as np
import pytest

from fedjax_bn.data.domain import splits
from fedjax_bn.data.sets import digits, morpho_mnist
from fedjax_bn.data.source import TEST, TRAIN
from tiny_digits import TEST as TESTING
from tiny_digits import TRAIN as TRAINING
from tiny_digits import labels_of, write_mnist, write_originals

SIZES = {"mnist": 0, "svhn": 7, "usps": 0, "synth_digits": 7, "mnist_m": 3}  # above TRAINING


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    return write_originals(tmp_path_factory.mktemp("digits"))


def test_the_benchmark_has_all_samples_in_their_published_parts(originals):
    whole = digits.load(originals, fraction=1.0, truncate=False, resplit=False)
    assert [domain.name for domain in whole.domains] == list(SIZES)
    for domain in whole.domains:
        owned, training = dict(splits(domain)), TRAINING + SIZES[domain.name]
        assert list(owned) == ["train", "test"]
        for name, start, count in (("train", 0, training), ("test", 100, TESTING)):
            levels = np.asarray(owned[name].images)[:, 14, 14, 0]
            np.testing.assert_array_equal(levels, start + np.arange(count))
            np.testing.assert_array_equal(owned[name].labels, labels_of(count))
            assert owned[name].labels.dtype == np.int32


@pytest.fixture(scope="module")
def morpho(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("morpho")
    for name in ("global", "local"):
        write_mnist(folder / name)
    return folder


def test_morpho_mnist_has_two_domains_with_the_parts_of_mnist(morpho):
    source = morpho_mnist.load(morpho)
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
        morpho_mnist.load(tmp_path)
    for name in ("global", "local"):
        write_mnist(tmp_path / name)
    (tmp_path / "local" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"local/t10k-labels.* is missing; Morpho-MNIST"):
        morpho_mnist.load(tmp_path)
