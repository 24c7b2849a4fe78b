"""The digits benchmark from tiny archives that the tests write themselves."""

import numpy as np
import pytest

from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.sets.digits import load_digits
from fedjax_bn.run.config import defaults
from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients
from tiny_digits import archive, labels_of, shades

MORPHO = ("morpho_global", "morpho_local")


def with_morpho(path):
    arrays = {}
    for name in MORPHO:
        arrays[f"{name}__test_images"] = shades(6, 28, 28, 3, base=200)
        arrays[f"{name}__test_labels"] = labels_of(6)
    return archive(path, **arrays)


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, [30, 20]),
        ({"fraction": 0.5}, [15, 10]),
        ({"fraction": 0.5, "truncate": True}, [10, 10]),
        ({"fraction": 0.5, "truncate": True, "target": ("alpha",)}, [15, 20]),
    ],
)
def test_training_sets_are_cut_and_test_sets_and_targets_whole(tmp_path, keys, sizes):
    dataset = load_digits(archive(tmp_path / "a.npz"), **keys)
    assert [domain.name for domain in dataset.domains] == ["zeta", "alpha"]
    assert all(domain.validation is None for domain in dataset.domains)
    assert [len(domain.train.labels) for domain in dataset.domains] == sizes
    assert [len(domain.test.labels) for domain in dataset.domains] == [30, 20]


def test_the_shared_archive_loads_whole(shared):
    dataset = load_digits(shared / "data" / "digits.npz")
    sizes = {domain.name: len(domain.train.labels) for domain in dataset.domains}
    assert sizes == {"mnist": 742, "svhn": 554, "usps": 743, "fonts": 743, "mnist_m": 743}


def test_morpho_mnist_only_tests_as_an_unseen_domain(tmp_path):
    path = with_morpho(tmp_path / "a.npz")
    data = load_digits(path, target=MORPHO, fraction=0.5)
    internal, unseen = make_clients(data, target=MORPHO)
    assert [len(domain.train.labels) for domain in internal.domains] == [15, 10]
    for domain in unseen:
        assert domain.test.images[:, 0, 0, 0].tolist() == list(range(200, 206))
    config = defaults.base()
    config.data.name, config.data.path = "digits_morpho", str(path)
    config.target = ",".join(MORPHO)
    _, unseen = configured_clients(DATASETS["digits_morpho"](config), config)
    assert [domain.name for domain in unseen] == list(MORPHO)
    with pytest.raises(ValueError, match="morpho_local"):
        load_digits(path, target=("morpho_global",))


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"zeta__train_images": np.zeros((30, 32, 32, 3), np.uint8)}, "zeta"),
        ({"alpha__test_labels": np.full(20, 10)}, "alpha"),
        ({"alpha__test_labels": None, "alpha__test_images": None}, "alpha"),
    ],
)
def test_another_form_is_refused_naming_file_and_domain(tmp_path, changes, culprit):
    path = archive(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=culprit):
        load_digits(path)
