"""Who owns what among the clients of a source: alike, skewed in labels, or of unequal sizes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.domain import splits
from fedjax_bn.data.source import Source
from sources import CLASSES, numbers, pool, sizes_of, toy

seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=40)
@given(
    labels=st.lists(st.integers(0, 3), min_size=12, max_size=150),
    alpha=st.floats(0.01, 100),
    n=st.integers(2, 150),
    seed=seeds,
)
def test_dirichlet_clients_are_disjoint_complete_and_never_below_the_minimum(
    labels, alpha, n, seed
):
    source = Source("any", CLASSES, (pool("a", labels),), (0.5,), (0.5,))
    training = len(labels) - max(1, len(labels) // 10)
    n = min(n, training)
    dataset, _ = make_clients(
        source, partition=f"dirichlet:alpha={alpha}", num_clients=n, seed=seed, split="stratified"
    )
    owned = [numbers(client.train) for client in dataset.domains]
    held = numbers(dataset.domains[0].validation)
    assert sorted(sum(owned, held)) == list(range(len(labels)))
    assert len(owned) == n
    assert min(map(len, owned)) >= min(10, training // n)


def test_alpha_decides_between_one_owner_a_class_and_equal_shares():
    source = Source("any", CLASSES, (pool("a", np.arange(4000) % 4),), (0.5,), (0.5,))

    def largest_share(alpha: float) -> float:
        options = {"partition": f"dirichlet:alpha={alpha}", "num_clients": 10}
        dataset, _ = make_clients(source, **options)
        table = np.array([np.bincount(d.train.labels, minlength=4) for d in dataset.domains])
        return float((table.max(0) / table.sum(0)).mean())

    shares = [largest_share(alpha) for alpha in (0.01, 0.1, 0.5, 5, 100)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.85
    assert shares[-1] < 0.15


def test_ten_clients_of_each_source_domain_as_in_fedig():
    source = toy((2048, 2344, 3929))
    dataset, _ = make_clients(source, num_clients=30, partition="dirichlet:alpha=0.1")
    names = [domain.name for domain in dataset.domains]
    assert names == [f"{domain}/{k}" for domain in "abc" for k in range(10)]
    dataset, unseen = make_clients(source, target="b", num_clients=7)
    assert [d.name for d in dataset.domains] == ["a/0", "a/1", "a/2", "c/0", "c/1", "c/2", "c/3"]
    assert sum(sizes_of(dataset)) == 2048 - 204 + 3929 - 392
    assert len(unseen[0].test.labels) == 2344


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ("7,30,12", {}, [7, 30, 12]),
        ("20", {}, [20, 20, 20]),
        ("5,6,7,8,9,10", {"num_clients": 6}, [5, 6, 7, 8, 9, 10]),
        ("9", {"clients_per_domain": 2, "target": "c", "fraction": 0.5}, [9] * 4),
    ],
)
def test_listed_sizes_are_the_clients_sizes(sizes, options, expected):
    dataset, _ = make_clients(toy(), sizes=sizes, **options)
    assert sizes_of(dataset) == expected
    for client in dataset.domains:
        counts = np.bincount(client.train.labels, minlength=4)
        assert counts.max() - counts.min() <= 1


def test_a_dataset_with_splits_of_its_own_keeps_them():
    source = toy()
    divided, _ = make_clients(source, validation=0.2, test=0.2)
    dataset, unseen = make_clients(divided, target="b", num_clients=4, partition="dirichlet")
    assert [d.name for d in dataset.domains] == ["a/0", "a/1", "c/0", "c/1"]
    assert unseen == (divided.domains[1],)
    assert dataset.domains[0].test is divided.domains[0].test


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({"validation": 0.1, "test": 0.2}, "56e17bc946dfd6c1"),
        ({"truncate": True, "fraction": 0.5, "num_clients": 5}, "3ba8b3b200d6ae64"),
        ({"partition": "dirichlet:alpha=0.3", "num_clients": 9}, "eaa60e270a5ecceb"),
    ],
)
def test_a_split_is_this_one_on_any_machine(options, digest):
    dataset, unseen = make_clients(toy(), target="b", seed=11, **options)
    owned = [
        (domain.name, name, numbers(part))
        for domain in (*dataset.domains, *unseen)
        for name, part in splits(domain)
    ]
    assert hashlib.sha256(repr(owned).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"split": "random"}, r"data\.split"),
        ({"split": "official"}, r"data\.split"),
        ({"validation": 0.0}, r"toy, 'a'.*data\.validation"),
        ({"validation": 0.7, "test": 0.3}, r"data\.validation"),
        ({"target": "d"}, "target 'd'.* a, b, c"),
        ({"target": "noise,d"}, "target 'd'"),
        ({"target": "noise,c"}, "target='noise,c'"),
        ({"partition": "skewed"}, r"data\.partition"),
        ({"partition": "dirichlet"}, r"data\.num_clients"),
        ({"partition": "dirichlet:alpha=0.0", "num_clients": 6}, "alpha"),
        ({"partition": "dirichlet", "clients_per_domain": 2, "sizes": "5"}, r"data\.sizes"),
        ({"partition": "dirichlet", "clients_per_domain": 37}, "toy, 'b': 36"),
        ({"num_clients": 2}, r"data\.num_clients"),
        ({"num_clients": 6, "clients_per_domain": 2}, r"data\.num_clients"),
        ({"num_clients": 60}, r"data\.clients_per_domain"),
        ({"sizes": "5,6"}, r"data\.sizes.* 3"),
        ({"sizes": "50"}, r"'b'.*data\.sizes"),
        ({"seed": -1}, "seed"),
    ],
)
def test_errors_name_the_configuration_key(options, key):
    with pytest.raises(ValueError, match=key):
        make_clients(toy(groups={"noise": ("a", "b")}), **options)


def test_a_dataset_with_splits_of_its_own_refuses_another():
    divided, _ = make_clients(toy())
    with pytest.raises(ValueError, match=r"data\.split"):
        make_clients(divided, split="holdout")


def test_a_dataset_without_validation_samples_holds_some_out_where_official_is_said():
    """Every fifth of each class, never one name apart; who is left out stays whole."""
    divided, _ = make_clients(toy((40, 60, 20)), validation=0.0, test=0.25)
    named = divided._replace(
        domains=tuple(d._replace(validation=None, test=d.train) for d in divided.domains)
    )
    pairs = [np.arange(len(d.train.names)) // 2 for d in named.domains]
    domains = [
        d._replace(train=d.train._replace(names=pair.astype(str)))
        for d, pair in zip(named.domains, pairs, strict=True)
    ]
    for data in (named, named._replace(domains=tuple(domains))):
        official, (unseen,) = make_clients(data, target="b", split="official", validation=0.2)
        plain, _ = make_clients(data, target="b", validation=0.2)
        assert all(domain.validation is None for domain in (*plain.domains, unseen))
        for new, old in zip(official.domains, plain.domains, strict=True):
            assert len(new.validation.images) == pytest.approx(len(old.train.images) / 5, abs=2)
            assert not {*new.train.names} & {*new.validation.names}
            kept = np.concatenate([new.train.images, new.validation.images])
            assert sorted(x.tobytes() for x in kept) == sorted(
                x.tobytes() for x in np.asarray(old.train.images)
            )
            assert new.test is old.test
