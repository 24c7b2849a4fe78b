"""Centralized training."""

import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import pool_clients
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset, scored_part, whole
from fedjax_bn.run.experiment import build as experiment


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


def test_pooled_samples_that_validate_do_not_pass_for_a_test():
    data = dataset()
    untested = data._replace(domains=tuple(d._replace(test=d.validation) for d in data.domains))
    pooled, unseen = pool_clients(untested)
    assert [scored_part(part) for part in (pooled.domains, unseen)] == ["validation"] * 2
    assert [len(whole(domain).images) for domain in unseen] == [2, 2, 2]
    pooled, unseen = pool_clients(data)
    assert [scored_part(part) for part in (pooled.domains, unseen)] == ["test"] * 2
    assert scored_part((*data.domains, *untested.domains)) == "validation and test"


def test_without_validation_splits_the_pooled_client_has_none():
    assert pool_clients(dataset(validation=False))[0].domains[0].validation is None


def test_a_configuration_pools_the_clients_and_tests_on_every_domain(monkeypatch):
    runs.install(monkeypatch)
    built = experiment.build(runs.config(data__partition="pooled", target=""))
    assert [domain.name for domain in built.internal.domains] == ["pooled"]
    assert [domain.name for domain in built.unseen] == list(runs.NAMES)
    with pytest.raises(ConfigError, match="does not go with"):
        experiment.build(runs.config(data__partition="pooled"))
