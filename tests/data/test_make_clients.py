"""Who owns what among the clients of a source: alike, skewed in labels, or of unequal sizes."""

import hashlib
import re

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
        source, partition="dirichlet", alpha=alpha, num_clients=n, seed=seed, split="stratified"
    )
    owned = [numbers(client.train) for client in dataset.domains]
    held = numbers(dataset.domains[0].validation)
    assert sorted(sum(owned, held)) == list(range(len(labels)))
    assert len(owned) == n
    assert min(map(len, owned)) >= min(10, training // n)


def test_alpha_decides_between_one_owner_a_class_and_equal_shares():
    source = Source("any", CLASSES, (pool("a", np.arange(4000) % 4),), (0.5,), (0.5,))

    def largest_share(alpha: float) -> float:
        options = {"partition": "dirichlet", "alpha": alpha, "num_clients": 10}
        dataset, _ = make_clients(source, **options)
        table = np.array([np.bincount(d.train.labels, minlength=4) for d in dataset.domains])
        return float((table.max(0) / table.sum(0)).mean())

    shares = [largest_share(alpha) for alpha in (0.01, 0.1, 0.5, 5, 100)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.85
    assert shares[-1] < 0.15


def test_ten_clients_of_each_source_domain_as_in_fedig():
    source = toy((2048, 2344, 3929))
    dataset, _ = make_clients(source, num_clients=30, partition="dirichlet", alpha=0.1)
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
        ((7, 30, 12), {}, [7, 30, 12]),
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


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.one_of(
        st.floats(0.01, 4).map(lambda x: f"lognormal:sigma={x}"),
        st.floats(0.01, 100).map(lambda x: f"dirichlet:alpha={x}"),
    ),
    n=st.integers(3, 40),
    seed=seeds,
)
def test_drawn_sizes_fit_and_use_up_a_domain_and_leave_nobody_empty(sizes, n, seed):
    dataset, _ = make_clients(toy(), sizes=sizes, num_clients=n, seed=seed)
    owned = {"a": 54, "b": 36, "c": 81}
    clients = dict.fromkeys(owned, 0)
    totals = dict.fromkeys(owned, 0)
    for name, size in zip([d.name[0] for d in dataset.domains], sizes_of(dataset), strict=True):
        clients[name] += 1
        totals[name] += size
    assert all(totals[name] <= owned[name] for name in owned)
    assert any(totals[name] == owned[name] for name in owned)
    for client, size in zip(dataset.domains, sizes_of(dataset), strict=True):
        name = client.name[0]
        assert size >= min(10, owned[name] // clients[name])


def test_log_normal_sizes_have_the_promised_spread():
    source = Source("any", CLASSES, (pool("a", np.arange(60000) % 4),), (0.5,), (0.5,))
    dataset, _ = make_clients(source, sizes="lognormal:sigma=0.5", num_clients=200)
    sizes = np.log(sizes_of(dataset))
    assert abs(sizes.std() - 0.5) < 0.08
    assert sum(sizes_of(dataset)) == 54000


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
        ({"partition": "dirichlet", "num_clients": 9, "alpha": 0.3}, "eaa60e270a5ecceb"),
        ({"sizes": "lognormal:sigma=1", "num_clients": 6}, "c8901828f631303e"),
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
    ("options", "sentence"),
    [
        ({"split": "random"}, "data.split is 'random'; it must be one of official, holdout, strat"),
        ({"split": "official"}, "toy has no official lists for a, b, c; choose 'holdout' or"),
        (
            {"validation": 0.0},
            "toy, 'a' (60 samples) has nothing to validate or test on; set data.",
        ),
        ({"validation": 0.7, "test": 0.3}, "data.validation is 0.7 and data.test is 0.3; they are"),
        ({"validation": -0.1}, "data.validation is -0.1 and"),
        (
            {"target": "d"},
            "target 'd' is not a domain of toy; choose from a, b, c, or a group: noise",
        ),
        ({"target": "noise,d"}, "target 'd' is not a domain of toy"),
        ({"target": "noise,c"}, "target noise,c leaves out every domain of toy; none would train"),
        ({"partition": "skewed"}, "data.partition is 'skewed'; it must be iid, dirichlet"),
        ({"partition": "dirichlet"}, "set data.num_clients or data.clients_per_domain"),
        ({"partition": "dirichlet", "num_clients": 6, "alpha": 0.0}, "data.alpha is 0.0; it must"),
        ({"partition": "dirichlet", "clients_per_domain": 2, "sizes": "5"}, "exclude each other"),
        (
            {"partition": "dirichlet", "clients_per_domain": 37},
            "toy, 'b': 36 samples are too few for 37 clients, one each; lower data.",
        ),
        ({"num_clients": 2}, "data.num_clients is 2; it must be 0, or at least 3, one for each"),
        ({"num_clients": 6, "clients_per_domain": 2}, "exclude each other: leave num_clients at 0"),
        ({"num_clients": 60}, "lower data.clients_per_domain (or data.num_clients) or raise data"),
        ({"sizes": "5,6"}, "one number of at least 1 for all clients, or one for each of the 3"),
        ({"sizes": "0"}, "it must be whole numbers above 0, lognormal:sigma=S"),
        (
            {"sizes": "many"},
            "data.sizes is 'many'; it must be whole numbers above 0, logn",
        ),
        ({"sizes": "lognormal:sigma=-1"}, "sigma=-1.0 must be at least 0.001 and at most 100"),
        ({"sizes": "50"}, "data.sizes asks for 50 training samples of 'b', which has 36; lower it"),
        (
            {"sizes": "lognormal:sigma=1", "clients_per_domain": 37},
            "36 training samples of 'b' are too few for 37 clients, one each; lower data.clients",
        ),
        ({"fraction": 1.1}, "data.fraction is 1.1; it must be above 0 and at most 1"),
        ({"fraction": 0.0}, "data.fraction is 0.0; it must be above 0"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
    ],
)
def test_errors_name_the_configuration_key_and_what_is_allowed(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_clients(toy(groups={"noise": ("a", "b")}), **options)


def test_a_dataset_with_splits_of_its_own_refuses_another():
    divided, _ = make_clients(toy())
    with pytest.raises(ValueError, match="toy comes with splits of its own: leave it empty"):
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
