"""Centralized training, and the digits benchmark beside Morpho-MNIST."""

import gzip

import numpy as np
import pytest

import runs
import tiny_digits
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import make_clients, pool_clients
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.sets import digits
from fedjax_bn.run.config import defaults
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients


def split(size: int, first: int, named: bool = True) -> Split:
    images = np.arange(first, first + size, dtype=np.float32)[:, None]
    names = np.array([f"sample/{i}" for i in range(first, first + size)]) if named else None
    return Split(images, np.arange(size, dtype=np.int32) % 2, names)


def dataset(validation: bool = True, named: bool = True) -> Dataset:
    domains = tuple(
        Domain(
            name,
            split(4 + k, 100 * k, named),
            split(2, 100 * k + 20, named) if validation else None,
            split(3 + k, 100 * k + 40, named),
        )
        for k, name in enumerate(("ant", "bee", "cow"))
    )
    return check_dataset(Dataset("tiny", 2, domains, (0.0,), (1.0,)))


@pytest.mark.parametrize("named", [True, False])
def test_the_pooled_client_has_every_sample_of_every_client_once(named):
    data = dataset(named=named)
    pooled, _ = pool_clients(data)
    (client,) = check_dataset(pooled).domains
    for part in ("train", "validation", "test"):
        own, parts = getattr(client, part), [getattr(d, part) for d in data.domains]
        np.testing.assert_array_equal(own.images, np.concatenate([p.images for p in parts]))
        np.testing.assert_array_equal(own.labels, np.concatenate([p.labels for p in parts]))
        assert (own.names is not None) == named


def test_every_domain_tests_the_pooled_model_on_its_own_test_split():
    data = dataset()
    unseen = pool_clients(data)[1]
    assert [domain.name for domain in unseen] == ["ant", "bee", "cow"]
    for domain, own in zip(unseen, data.domains, strict=True):
        assert domain.train is None
        assert domain.test is own.test


def test_without_validation_splits_the_pooled_client_has_none():
    assert pool_clients(dataset(validation=False))[0].domains[0].validation is None


@pytest.fixture
def folder(tmp_path):
    """The five digits, and a small copy of Morpho-MNIST."""
    tiny_digits.write_originals(tmp_path)
    for name in ("global", "local"):
        place = tmp_path / "Morpho-MNIST" / name
        place.mkdir(parents=True)
        for part, count, base in (("train", 12, 0), ("t10k", 6, 200)):
            arrays = {
                "images-idx3": tiny_digits.shades(count, 28, 28, base=base),
                "labels-idx1": tiny_digits.labels_of(count),
            }
            for kind, array in arrays.items():
                raw = gzip.compress(tiny_digits.idx_bytes(array))
                (place / f"{part}-{kind}-ubyte.gz").write_bytes(raw)
    return tmp_path


def test_morpho_mnist_is_unseen_and_has_its_test_part_alone(folder):
    data = digits.load_with_morpho_mnist(folder, target=digits._UNSEEN, fraction=0.5)
    internal, unseen = make_clients(data, target=digits._UNSEEN)
    assert [d.name for d in internal.domains] == list(digits.ORIGINALS)
    assert [d.name for d in unseen] == ["morpho_global", "morpho_local"]
    for domain in unseen:
        assert domain.test.images[:, 0, 0, 0].tolist() == list(range(200, 206))
        assert domain.test.labels.tolist() == list(range(6))
    plain = digits.load(folder, fraction=0.5)
    for one, two in zip(internal.domains, plain.domains, strict=True):
        np.testing.assert_array_equal(np.sort(one.train.labels), np.sort(two.train.labels))
        np.testing.assert_array_equal(one.test.images, two.test.images)


@pytest.mark.parametrize("seed", range(3))
def test_no_digit_that_morpho_mnist_shows_trains(folder, seed):
    """Published test samples have levels from 100 on; Morpho-MNIST shows these digits."""
    data = digits.load_with_morpho_mnist(folder, target=digits._UNSEEN, seed=seed, fraction=0.5)
    plain = digits.load(folder, seed=seed, fraction=0.5)
    trained = {d.name: d.train.images[:, 0, 0, 0].tolist() for d in data.domains if d.train}
    before = {domain.name: domain.train.images[:, 0, 0, 0].tolist() for domain in plain.domains}
    for name in ("mnist", "mnist_m"):
        assert max(trained[name]) < 100 <= max(before[name])
        assert len({*trained[name]}) == len(trained[name]) == len(before[name])
    assert all(trained[name] == before[name] for name in ("svhn", "usps", "synth_digits"))


def test_a_configuration_names_the_digits_with_morpho_mnist(folder):
    config = defaults.base()
    config.data.name, config.data.path = "digits_morpho", str(folder)
    config.data.fraction, config.data.truncate = 0.5, False
    config.target = ",".join(digits._UNSEEN)
    data = DATASETS["digits_morpho"](config)
    internal, unseen = configured_clients(data, config)
    plain = digits.load(folder, fraction=0.5, truncate=False)
    sizes = [len(domain.train.labels) for domain in plain.domains]
    assert [len(domain.train.labels) for domain in internal.domains] == sizes
    assert [domain.name for domain in unseen] == list(digits._UNSEEN)


def test_morpho_mnist_must_be_a_target(folder):
    with pytest.raises(ValueError, match=r"config\.target=morpho_global,morpho_local"):
        digits.load_with_morpho_mnist(folder, target=("morpho_global",))


def test_a_missing_morpho_mnist_is_said(folder):
    (folder / "Morpho-MNIST" / "local").rename(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match="lacks the folders local"):
        digits.load_with_morpho_mnist(folder, target=digits._UNSEEN)


def test_a_configuration_pools_the_clients_and_tests_on_every_domain(monkeypatch):
    runs.install(monkeypatch)
    built = experiment.build(runs.config(data__partition="pooled", target=""))
    assert [domain.name for domain in built.internal.domains] == ["pooled"]
    assert [domain.name for domain in built.unseen] == list(runs.NAMES)
    with pytest.raises(ConfigError, match="does not go with"):
        experiment.build(runs.config(data__partition="pooled"))
