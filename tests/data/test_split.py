"""Which samples train, validate and test, for any labels and names; who is left out."""

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.division.partition import number_groups, share_out_domains
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Source, check_source
from sources import CLASSES, numbers, official, pool, toy

seeds = st.integers(0, 2**32)


def parts_of(labels, split: str, validation: float, test: float, seed: int = 0) -> np.ndarray:
    """The part of each sample of one domain."""
    source = Source("any", CLASSES, (pool("a", labels),), (0.5,), (0.5,))
    parts = np.zeros(len(labels), int)
    try:
        (domain,) = make_clients(source, split=split, validation=validation, test=test, seed=seed)[
            0
        ].domains
    except ValueError as error:
        assert "nothing to validate or test" in str(error)  # noqa: PT017, one of two outcomes
        return parts
    if domain.validation is not None:
        parts[numbers(domain.validation)] = VALIDATION
    if domain.test is not domain.validation:
        parts[numbers(domain.test)] = TEST
    return parts


def expected_sizes(count: int, validation: float, test: float) -> list[int]:
    """floor(share * N) validate, one at least; N - floor((1 - share) * N) test; in fractions."""
    share, kept = Fraction(str(validation)), 1 - Fraction(str(test))
    validating = max(1, floor(share * count)) if validation else 0
    testing = count - floor(kept * count)
    training = count - validating - testing
    return [training, validating, testing] if training > 0 else [count, 0, 0]


@st.composite
def sources(draw):
    """One to three domains, in which some samples share a name, within and across domains."""
    pools = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        size = draw(st.integers(20, 60))
        labels = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        kind = draw(st.sampled_from(["own", "windows", "common", "mixed"]))
        count = {"own": size, "windows": 14, "common": size, "mixed": 30}[kind]
        prefix = "" if kind in ("common", "mixed") else name
        pools.append(pool(name, labels, [f"{prefix}{k % count}" for k in range(size)]))
    return Source("any", CLASSES, tuple(pools), (0.5,), (0.5,))


@settings(deadline=None, max_examples=25)
@given(
    source=sources(),
    split=st.sampled_from(["holdout", "stratified"]),
    shares=st.tuples(st.floats(0.1, 0.4), st.sampled_from([0.0, 0.1, 0.25])),
    seed=seeds,
)
def test_parts_are_disjoint_and_complete_and_never_separate_a_name(source, split, shares, seed):
    dataset, unseen = make_clients(
        source, split=split, validation=shares[0], test=shares[1], seed=seed
    )
    part_of: dict[str, set[str]] = {}
    for domain, origin in zip(dataset.domains, source.pools, strict=True):
        parts = list(splits(domain))[: 3 if shares[1] else 2]
        divided = [sample for _, part in parts for sample in numbers(part)]
        assert sorted(divided) == list(range(len(origin.labels)))
        for name, part in parts:
            np.testing.assert_array_equal(part.labels, origin.labels[numbers(part)])
            np.testing.assert_array_equal(part.names, origin.names[numbers(part)])
            for sample in part.names.tolist():
                part_of.setdefault(sample, set()).add(name)
        assert (domain.test is domain.validation) == (shares[1] == 0)
    assert unseen == ()
    assert all(len(parts) == 1 for parts in part_of.values())


@settings(deadline=None, max_examples=25)
@given(
    labels=st.lists(st.integers(0, 3), min_size=20, max_size=120),
    validation=st.integers(0, 500).map(lambda k: k / 1000),
    test=st.integers(0, 400).map(lambda k: k / 1000),
    seed=seeds,
)
def test_stratified_parts_have_the_promised_sizes_and_proportions(labels, validation, test, seed):
    parts = parts_of(labels, "stratified", validation, test, seed)
    sizes = np.bincount(parts, minlength=3)
    assert sizes.tolist() == expected_sizes(len(labels), validation, test)
    of_class = np.bincount(labels, minlength=4)
    for part in (TRAIN, VALIDATION, TEST):
        share = of_class * sizes[part] / len(labels)
        got = np.bincount(np.array(labels)[parts == part], minlength=4)
        assert (np.abs(got - share) < 2).all()  # rounded once a part


@pytest.mark.parametrize(
    ("count", "validation", "test", "sizes"),
    [
        (1670, 0.2, 0.0, [1336, 334, 0]),  # DomainBed: floor(0.2 N) are held out
        (9298, 0.0, 0.2, [7438, 0, 1860]),  # FedBN's USPS: floor(0.8 N) train
        (10000, 0.1, 0.2, [7000, 1000, 2000]),  # UniFed
        (5, 0.1, 0.1, [3, 1, 1]),
        (2, 0.1, 0.1, [2, 0, 0]),
    ],
)
def test_sizes_of_parts_are_those_of_the_papers(count, validation, test, sizes):
    for split in ("holdout", "stratified"):
        parts = parts_of(np.arange(count) % 4, split, validation, test)
        assert np.bincount(parts, minlength=3).tolist() == sizes
    assert expected_sizes(count, validation, test) == sizes


@settings(deadline=None, max_examples=25)
@given(names=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30), seed=seeds)
def test_groups_are_numbered_by_first_appearance_and_each_has_one_owner(names, seed):
    expected = [list(dict.fromkeys(names)).index(name) for name in names]
    assert number_groups(np.array(names), len(names)).tolist() == expected
    images = np.arange(len(names), dtype=np.float32)[:, None]
    split = Split(images, np.zeros(len(names), np.int32), np.array(names))
    one_domain = Dataset("any", 1, (Domain("a", split, None, split),), (0.5,), (0.5,))
    clients = share_out_domains(one_domain, min(3, max(expected) + 1), seed=seed).domains
    owned = [client.train.images[:, 0].astype(int).tolist() for client in clients]
    assert sorted(np.concatenate(owned)) == list(range(len(names)))
    owners = [set(client.train.names) for client in clients]
    assert sum(map(len, owners)) == len(set(names))


def test_official_lists_are_followed_and_missing_parts_taken_from_training():
    dataset, _ = make_clients(toy(parts=official), validation=0.4, test=0.4)
    assert [[len(p.labels) for _, p in splits(d)] for d in dataset.domains] == [
        [40, 10, 10],
        [20, 10, 10],
        [70, 10, 10],
    ]
    assert sorted(numbers(dataset.domains[1].test)) == list(range(30, 40))
    without = toy(parts=lambda n: np.where(official(n) == VALIDATION, TRAIN, official(n)))
    dataset, _ = make_clients(without, split="official", validation=0.1)
    assert [[len(p.labels) for _, p in splits(d)] for d in dataset.domains] == [
        [45, 5, 10],
        [27, 3, 10],
        [72, 8, 10],
    ]


@pytest.mark.parametrize(
    ("target", "names"), [("b", "b"), ("a, c", "ac"), (("noise",), "a"), (("b", "noise"), "ab")]
)
def test_unseen_domains_are_whole_whatever_else_is_asked(target, names):
    source = toy(groups={"noise": ("a", "elsewhere")}, parts=official)
    dataset, unseen = make_clients(
        source, target=target, truncate=True, fraction=0.3, clients_per_domain=1, seed=2
    )
    assert [domain.name for domain in unseen] == list(names)
    assert [domain.name for domain in dataset.domains] == [n for n in "abc" if n not in names]
    for domain in unseen:
        assert (domain.train, domain.validation) == (None, None)
        size = {"a": 60, "b": 40, "c": 90}[domain.name]
        assert numbers(domain.test) != sorted(numbers(domain.test)) == list(range(size))


def test_a_domain_is_divided_alike_whichever_other_is_left_out():
    parts = []
    for target in ((), "a", "b", "a,b"):
        domain = make_clients(toy(), target=target, test=0.2)[0].domains[-1]
        parts.append([numbers(part) for _, part in splits(domain)])
    assert parts.count(parts[0]) == 4


def test_office_caltech_has_62_training_and_50_validation_images_as_in_fedbn():
    pools = tuple(
        pool(name, np.arange(size) % 10)
        for name, size in (("amazon", 958), ("caltech", 1123), ("dslr", 157), ("webcam", 295))
    )
    source = Source("office", tuple("0123456789"), pools, (0.5,), (0.5,))
    # of the 80 % for training, 40 % of the smallest site validate and 50 % train
    dataset, _ = make_clients(
        source, validation=0.32, test=0.2, truncate=True, fraction=0.5 / 0.6, seed=1
    )
    assert [[len(part.labels) for _, part in splits(d)] for d in dataset.domains] == [
        [62, 50, 192],
        [62, 50, 225],
        [62, 50, 32],
        [62, 50, 59],
    ]


def test_a_domain_without_training_samples_in_its_lists_is_an_error_unless_it_is_unseen():
    source = toy(parts=lambda size: np.full(size, TEST if size == 40 else TRAIN, np.int8))
    with pytest.raises(ValueError, match="'b'"):
        make_clients(source)
    assert len(make_clients(source, target="b")[0].domains) == 2


@pytest.mark.parametrize(
    ("spoil", "culprit"),
    [
        (lambda p: p._replace(labels=p.labels[1:]), "'a'.*59"),
        (lambda p: p._replace(parts=np.full(60, 3)), "'a'.*parts"),
        (lambda p: p._replace(name="b"), "'b'"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(spoil, culprit):
    source = toy()
    assert check_source(source).pools[0].images is source.pools[0].images
    with pytest.raises(ValueError, match=culprit):
        make_clients(source._replace(pools=(spoil(source.pools[0]), *source.pools[1:])))
