"""Who owns what among the clients of a source; pooled clients; many clients; tested copies."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.division.clients import duplicate_notes, make_clients, pool_clients
from fedjax_bn.data.division.partition import share_out_domains
from fedjax_bn.data.domain import (
    Dataset,
    Domain,
    Rows,
    Split,
    check_dataset,
    check_names_differ,
    scored_part,
    splits,
    whole,
)
from fedjax_bn.data.source import Source
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.train import prepare
from fedjax_bn.training import plots
from fedjax_bn.training.evaluation.evaluate import clients_tested, evaluator
from fedjax_bn.training.plots import data_facts
from fedjax_bn.training.records import QUANTILES, by_client, have_trained, round_record, some_of
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
    with pytest.raises(ValueError, match=r"data\.split"):
        make_clients(divided, split="holdout")


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
        ({"split": "official"}, r"data\.split"),
        ({"validation": 0.0}, r"toy, 'a'.*data\.validation"),
        ({"target": "d"}, "target 'd'.* a, b, c"),
        ({"target": "noise,c"}, "target='noise,c'"),
        ({"partition": "skewed"}, r"data\.partition"),
        ({"partition": "dirichlet"}, r"data\.num_clients"),
        ({"partition": "dirichlet", "clients_per_domain": 2, "sizes": "5"}, r"data\.sizes"),
        ({"partition": "dirichlet", "clients_per_domain": 37}, "toy, 'b': 36"),
        ({"num_clients": 2}, r"data\.num_clients"),
        ({"num_clients": 60}, r"data\.clients_per_domain"),
        ({"sizes": "5,6"}, r"data\.sizes.* 3"),
        ({"sizes": "50"}, r"'b'.*data\.sizes"),
    ],
)
def test_errors_name_the_configuration_key(options, key):
    with pytest.raises(ValueError, match=key):
        make_clients(toy(groups={"noise": ("a", "b")}), **options)


def test_a_dataset_without_validation_samples_holds_some_out_where_official_is_said():
    """A fifth of the groups, pairs of samples with one name; who is left out stays whole."""
    divided, _ = make_clients(toy((40, 60, 20)), validation=0.0, test=0.25)
    domains = []
    for domain in divided.domains:
        pairs = (np.arange(len(domain.train.names)) // 2).astype(str)
        train = domain.train._replace(names=pairs)
        domains.append(domain._replace(train=train, validation=None, test=domain.train))
    data = divided._replace(domains=tuple(domains))
    official, (unseen,) = make_clients(data, target="b", split="official", validation=0.2)
    plain, _ = make_clients(data, target="b", validation=0.2)
    assert all(domain.validation is None for domain in (*plain.domains, unseen))
    for new, old in zip(official.domains, plain.domains, strict=True):
        assert len(new.validation.images) == pytest.approx(len(old.train.images) / 5, abs=2)
        assert not {*new.train.names} & {*new.validation.names}
        assert sorted(numbers(new.train) + numbers(new.validation)) == sorted(numbers(old.train))
        assert new.test is old.test


def test_the_pooled_client_has_every_sample_of_every_client_once():
    data, _ = make_clients(toy(), validation=0.1, test=0.2)
    pooled, unseen = pool_clients(data)
    (client,) = check_dataset(pooled).domains
    for part in ("train", "validation", "test"):
        joined, parts = getattr(client, part), [getattr(d, part) for d in data.domains]
        np.testing.assert_array_equal(joined.images, np.concatenate([p.images for p in parts]))
        np.testing.assert_array_equal(joined.labels, np.concatenate([p.labels for p in parts]))
        np.testing.assert_array_equal(joined.names, np.concatenate([p.names for p in parts]))
    for domain, client in zip(unseen, data.domains, strict=True):
        assert (domain.name, domain.train) == (client.name, None)
        assert domain.test is client.test


def test_pooled_samples_that_validate_do_not_pass_for_a_test():
    data, _ = make_clients(toy(), validation=0.1, test=0.2)
    untested = data._replace(domains=tuple(d._replace(test=d.validation) for d in data.domains))
    pooled, unseen = pool_clients(untested)
    assert [scored_part(part) for part in (pooled.domains, unseen)] == ["validation"] * 2
    assert [len(whole(domain).images) for domain in unseen] == [6, 4, 9]
    pooled, unseen = pool_clients(data)
    assert [scored_part(part) for part in (pooled.domains, unseen)] == ["test"] * 2
    assert scored_part((*data.domains, *untested.domains)) == "validation and test"


def test_a_configuration_pools_the_clients_and_tests_on_every_domain(monkeypatch):
    runs.install(monkeypatch)
    built = experiment.build(runs.config(data__partition="pooled", target=""))
    assert [domain.name for domain in built.internal.domains] == ["pooled"]
    assert [domain.name for domain in built.unseen] == list(runs.NAMES)
    with pytest.raises(ConfigError, match=r"pooled.*config\.target"):
        experiment.build(runs.config(data__partition="pooled"))


RNG = np.random.default_rng(0)


def unlabelled(images) -> Split:
    return Split(images, np.zeros(len(images), np.int32))


def samples(kind: str, count: int) -> np.ndarray:
    """Images or features; all agree in the middle, so that only whole samples tell them apart."""
    if kind == "bytes":
        images = RNG.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    else:
        images = RNG.standard_normal((count, 7), dtype=np.float32)
    images[:, 3] = 1
    return images


@pytest.mark.parametrize("kind", ["bytes", "features"])
@pytest.mark.parametrize("lazy", [False, True])
def test_tested_copies_are_counted_by_domain_as_comparing_all_pairs_counts_them(kind, lazy):
    a, b, new = samples(kind, 20), samples(kind, 30), samples(kind, 10)
    test_a, test_b = np.concatenate([b[:3], samples(kind, 5)]), samples(kind, 4)
    new[[1, 7]] = a[[4, 4]]
    trained = np.concatenate([a, b])
    if lazy:
        a, b = (Rows(images, np.arange(len(images))) for images in (a, b))
    domains = [
        Domain(name, unlabelled(train), None, unlabelled(test))
        for name, train, test in (("a", a, test_a), ("b", b, test_b))
    ]
    data = Dataset("x", 1, tuple(domains), (0.5,), (0.5,))
    (note,) = duplicate_notes(data, (Domain("z", None, None, unlabelled(new)),))
    for name, tested, client in (("a", test_a, "b"), ("z", new, "a")):
        equal = (tested[:, None] == trained).reshape(len(tested), len(trained), -1).all(-1).any(1)
        assert f"{equal.sum()} of the {len(tested)} of {name} (most in {client})" in note
    assert " of b (" not in note
    # Clients that share their test samples are one place.
    both = [domain._replace(test=unlabelled(a[:2])) for domain in domains[:1]] * 2
    (note,) = duplicate_notes(data._replace(domains=tuple(both)))
    assert note.count(" of the 2 of ") == 1


@pytest.mark.parametrize("name", ["mean", "method", "adaptation"])
def test_a_domain_with_the_name_of_a_key_of_the_tables_is_refused(name):
    with pytest.raises(ValueError, match=name):
        check_names_differ(["a", name], "toy")


NAMES = [f"{domain}/{k}" for domain in ("north", "south") for k in range(60)]


def test_few_clients_are_named_and_of_many_the_quantiles_and_means_of_domains_are_told():
    assert by_client(["a", "b"], [1.0, np.nan], 2, mean=False) == {"a": 1.0, "b": None}
    assert by_client(["a", "b"], [1.0, 3.0], 2) == {"a": 1.0, "b": 3.0, "mean": 2.0}
    values = np.random.default_rng(0).normal(size=120)
    values[3] = np.nan
    known, told = np.sort(values[np.isfinite(values)]), by_client(NAMES, values, 100)
    assert [told[name] for name in ("min", "median", "max")] == known[[0, 59, -1]].tolist()
    np.testing.assert_allclose(told["q25"], known[29] * 0.5 + known[30] * 0.5)
    np.testing.assert_allclose(told["mean"], known.mean())
    np.testing.assert_allclose(told["south/*"], values[60:].mean())
    assert set(told) == {"mean", *QUANTILES, "north/*", "south/*"}
    assert by_client(NAMES, np.full(120, np.nan), 100) == dict.fromkeys(told)
    assert some_of(10_000, 5).tolist() == [0, 2500, 5000, 7499, 9999]  # spread evenly


def test_the_record_of_many_clients_says_who_took_part():
    loss = np.full(120, np.nan)
    loss[[5, 70, 90]] = 1.0, 2.0, np.nan
    finite = np.ones(120, bool)
    finite[90] = False
    metrics = {"loss": loss, "weights": np.zeros(120), "finite": finite, "server_finite": True}
    record = round_record(NAMES, metrics, 1, 0.5, 100)
    assert record["clients"] == [5, 70, 90]
    assert record["not_finite"] == [NAMES[90]]
    assert np.flatnonzero(have_trained([record], NAMES)).tolist() == [5, 70]
    named = round_record(NAMES, metrics, 1, 0.5, 120)
    assert "clients" not in named
    assert np.flatnonzero(have_trained([named], NAMES)).tolist() == [5, 70]


def test_a_sample_is_evaluated_as_all_clients_are(monkeypatch):
    runs.install(monkeypatch, runs.dataset())
    config = runs.config(target="", validate_with="global")
    experiment, _, start = prepare(config)
    state, trained = start(), np.array([True, False, True, True])
    few = experiment.evaluation._replace(clients=3)
    told = [
        evaluator(one)(state, trained) for one in (experiment, experiment._replace(evaluation=few))
    ]
    names = [runs.NAMES[k] for k in clients_tested(few, 4)]
    assert len(names) == 3
    for key in ("accuracy", "validation"):
        every, some = (one[key] for one in told)
        assert some == {name: every[name] for name in names} | {
            "mean": np.mean([every[name] for name in names])
        }


def test_drawn_clients_may_be_more_than_the_samples_which_stay_where_they_are():
    split = runs.DATA.domains[0].train
    one_domain = runs.DATA._replace(domains=runs.DATA.domains[:1])
    federation = share_out_domains(one_domain, 50, seed=3, partition="drawn:samples=7")
    clients = [client.train for client in federation.domains]
    assert len(clients) == 50
    for client in clients:
        assert client.images.array is split.images
        np.testing.assert_array_equal(split.labels[client.images.index], client.labels)
        assert len(client.labels) == 7
    counts = np.bincount(np.concatenate([client.images.index for client in clients]))
    assert 2 < counts.min() < counts.max() < 45  # of 350 draws from 22, 16 each
    with pytest.raises(ValueError, match=r"data\.sizes"):
        share_out_domains(runs.DATA, 3, partition="drawn:samples=7", sizes="5")


def test_plots_and_the_page_show_some_of_many_clients(monkeypatch):
    many = share_out_domains(runs.DATA, num_clients=1000, partition="drawn:samples=5")
    monkeypatch.setattr(plots, "png", lambda figure: figure)
    figure = plots.draw_class_counts(many)
    assert figure.axes[0].collections[0].get_array().shape == (3, 200)
    assert figure.axes[0].get_title() == "200 of 1,000 clients"
    facts = data_facts(many, (), limit=3)
    assert list(facts["clients"]) == ["ant/0", "cow/0", "dog/249"]
    assert facts["number"] == 1000
    assert facts["clients"]["ant/0"]["train"]["samples"] == 5
    assert sum(facts["clients"]["ant/0"]["train"]["classes"]) == 5
