"""Who owns which samples, and rows of an array that nobody reads before they are needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_bn.data.division.partition import (
    fingerprint,
    fraction_size,
    share_out_domains,
    stratified_sample,
)
from fedjax_bn.data.domain import Dataset, Domain, Rows, Split, blocks, check_dataset, select, whole
from fedjax_bn.data.seeds import generator
from sources import numbers, pool

BASE = np.arange(60, dtype=np.uint8).reshape(12, 1, 1, 5)


class Unreadable:
    """An array far larger than memory: whoever reads it has failed."""

    shape, dtype, ndim = (6000, 10**6, 10**6, 3), np.dtype(np.uint8), 4

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, item):
        raise AssertionError(f"read {item}")


@pytest.fixture(scope="module", params=["in memory", "memory-mapped"])
def base(request, tmp_path_factory) -> np.ndarray:
    if request.param == "in memory":
        return BASE
    path = tmp_path_factory.mktemp("rows") / "base.npy"
    np.save(path, BASE)
    return np.load(path, mmap_mode="r")


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_rows_are_indexed_as_an_array_is(base, data):
    index = np.array(data.draw(st.lists(st.integers(0, 11), max_size=9)), np.int64)
    rows, array = Rows(base, index), BASE[index]
    n = len(index)
    row = st.integers(-n, max(n - 1, -n))
    item = data.draw(
        st.one_of(
            st.slices(n),
            st.lists(st.booleans(), min_size=n, max_size=n).map(lambda x: np.array(x, bool)),
            *([row, st.lists(row).map(lambda x: np.array(x, np.int64))] if n else []),
            *([st.lists(st.tuples(row, row), min_size=1).map(np.array)] if n else []),
        )
    )
    assert type(rows[item]) is np.ndarray
    np.testing.assert_array_equal(rows[item], array[item])


def test_rows_look_like_an_array(base):
    index = np.array([3, 0, 3, 11], np.uint8)
    rows, array = Rows(base, index), BASE[index]
    assert (rows.shape, rows.dtype, rows.ndim, rows.nbytes, len(rows)) == (
        (array.shape, array.dtype, array.ndim, array.nbytes, len(array))
    )
    np.testing.assert_array_equal(np.asarray(rows), array)
    np.testing.assert_array_equal(np.asarray(rows, np.float32), array.astype(np.float32))
    np.testing.assert_array_equal(np.stack(list(rows)), array)
    np.testing.assert_array_equal(np.concatenate([rows, array]), np.concatenate([array, array]))
    np.testing.assert_array_equal(np.pad(rows, [(0, 1)] + [(0, 0)] * 3)[:4], array)
    np.testing.assert_array_equal(np.concatenate(list(blocks(rows, 3))), array)


def test_rows_of_rows_are_rows_of_the_array(base):
    rows = Rows(Rows(base, np.arange(12)[::-1]), np.array([0, 4]))
    assert rows.array is base
    np.testing.assert_array_equal(np.asarray(rows), BASE[[11, 7]])


def big() -> Dataset:
    """Clients of an array that cannot be read."""
    names = np.array([f"image {k:04}.png" for k in range(6000)])
    labels = np.arange(6000, dtype=np.int32) % 3
    split = Split(Rows(Unreadable(), np.arange(6000)), labels, names)
    parts = np.split(generator(1).permutation(6000), [4000, 5000])
    domain = Domain("one", *(select(split, part) for part in parts))
    return Dataset("big", 3, (domain,), (0.5,), (0.5,))


def test_nothing_is_read_to_check_split_and_hash_named_samples():
    dataset = share_out_domains(check_dataset(big()), clients_per_domain=4, fraction=0.5, seed=3)
    assert [len(client.train.images) for client in dataset.domains] == [500] * 4
    assert len(whole(big().domains[0]).images) == 6000
    assert len(stratified_sample(whole(big().domains[0]), 7, generator(0)).images) == 7
    assert fingerprint(dataset) == fingerprint(dataset) != fingerprint(big())


def test_the_hash_of_named_samples_depends_on_names_labels_order_form_and_key():
    def hash_of(split: Split, key: str = "") -> str:
        domain = Domain("a", None, None, split)
        return fingerprint(Dataset("toy", 3, (domain,), (0.5,), (0.5,), key=key))

    split = Split(Rows(BASE, np.arange(3)), np.arange(3, dtype=np.int32), np.array(["a", "b", "c"]))
    others = [
        hash_of(split._replace(names=np.array(["a", "b", "d"]))),
        hash_of(split._replace(labels=np.array([0, 2, 2], np.int32))),
        hash_of(select(split, np.array([1, 0, 2]))),
        hash_of(split._replace(images=Rows(BASE[..., :4], np.arange(3)))),
        hash_of(split, key="sizes"),
        hash_of(split._replace(names=None)),
    ]
    assert len({hash_of(split), *others}) == 7
    same = split._replace(images=np.asarray(split.images), names=split.names.astype("U40"))
    assert hash_of(same) == hash_of(split)


def test_whole_counts_samples_that_validate_and_test_once():
    part = Split(Rows(BASE, np.arange(3)), np.zeros(3, np.int32), np.array(list("abc")))
    rest = Split(Rows(BASE, np.arange(3, 8)), np.ones(5, np.int32), np.array(list("defgh")))
    joined = whole(Domain("a", rest, part, part))
    assert isinstance(joined.images, Rows)
    np.testing.assert_array_equal(np.asarray(joined.images), BASE[[3, 4, 5, 6, 7, 0, 1, 2]])
    assert "".join(joined.names) == "defghabc"


label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=80)
seeds = st.integers(0, 2**32)


def numbered(labels) -> Split:
    samples = pool("any", labels)
    return Split(samples.images, samples.labels)


def dealt(split: Split, n: int, seed: int, **options) -> list[Split]:
    """The training splits of n clients of one domain."""
    dataset = Dataset("any", 5, (Domain("a", split, None, split),), (0.5,), (0.5,))
    return [c.train for c in share_out_domains(dataset, n, seed=seed, **options).domains]


def toy() -> Dataset:
    labels, rows = np.arange(20, dtype=np.int32) % 2, np.arange(20, dtype=np.float32)[:, None]
    parts = [Split(np.full((20, 3), k, np.float32) + rows, labels) for k in range(3)]
    domains = tuple(Domain("abc"[k], part, parts[0], parts[1]) for k, part in enumerate(parts))
    return Dataset("toy", 2, domains, (0.5,), (0.5,))


@settings(deadline=None, max_examples=25)
@given(labels=label_lists, fraction=st.floats(0.01, 1), seed=seeds)
def test_a_fraction_keeps_every_class_where_it_can(labels, fraction, seed):
    split = numbered(labels)
    taken = stratified_sample(split, fraction_size(len(labels), fraction), generator(seed))
    assert len(taken.labels) == fraction_size(len(labels), fraction)
    assert set(numbers(taken)) <= set(range(len(labels)))
    np.testing.assert_array_equal(taken.labels, split.labels[taken.images[:, 0].astype(int)])
    if len(taken.labels) >= len(set(labels)):
        assert set(taken.labels) == set(labels)


@settings(deadline=None, max_examples=25)
@given(labels=label_lists, n=st.integers(1, 10), seed=seeds)
def test_clients_of_a_domain_are_disjoint_and_alike(labels, n, seed):
    split = numbered(labels * n)
    clients = dealt(split, n, seed)
    sizes = [len(client.labels) for client in clients]
    assert sorted(k for client in clients for k in numbers(client)) == numbers(split)
    assert max(sizes) - min(sizes) <= 1
    counts = np.array([np.bincount(client.labels, minlength=5) for client in clients])
    assert (counts.max(0) - counts.min(0) <= 1).all()


def test_the_smallest_client_is_a_choice_of_whoever_names_the_partition():
    split = numbered(np.arange(400) % 4)

    def sizes(partition: str) -> list[int]:
        clients = dealt(split, 20, 1, partition=f"{partition}:alpha=0.05")
        return sorted(len(client.labels) for client in clients)

    assert sizes("dirichlet") == sizes("dirichlet:smallest=10")
    assert [sizes(f"dirichlet:smallest={n}")[0] for n in (1, 3, 10, 20, 99)] == [1, 3, 10, 20, 20]


def test_dirichlet_counts_are_the_draws_rounded_by_largest_remainder():
    labels = np.repeat([0, 1], 10_000)
    clients = dealt(numbered(labels), 5, 3, partition="dirichlet:alpha=5.0")
    counts = np.array([np.bincount(client.labels, minlength=2) for client in clients]).T
    rng = generator(3)
    draws = np.stack([rng.dirichlet(np.full(5, 5.0)) for _ in range(2)])
    assert (np.abs(counts - draws * 10_000) < 1.001).all()


def test_clients_share_training_samples_only_and_are_named_after_their_domain():
    dataset = toy()
    assert share_out_domains(dataset) == dataset
    clients = share_out_domains(dataset, clients_per_domain=2, fraction=0.5, seed=1)
    assert (fraction_size(7438, 0.1), fraction_size(100, 0.29)) == (743, 29)  # as in FedBN
    names = [client.name for client in clients.domains]
    assert names == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    assert [len(client.train.labels) for client in clients.domains] == [5] * 6
    assert clients.domains[2].test is dataset.domains[1].test
    assert clients.domains[2].validation is dataset.domains[1].validation


def with_train(dataset: Dataset, **changes) -> Dataset:
    first, *others = dataset.domains
    first = first._replace(train=first.train._replace(**changes))
    return dataset._replace(domains=(first, *others))


def test_fingerprint_depends_on_every_byte_and_name_but_not_on_memory_layout():
    dataset = toy()
    reference, domain = fingerprint(dataset), dataset.domains[0]
    images, labels, _ = domain.train
    layout = {"images": np.asfortranarray(images), "labels": labels.astype(">i4")}
    assert fingerprint(with_train(dataset, **layout)) == reference
    changed = [
        with_train(dataset, images=images + (np.arange(60).reshape(20, 3) == 22)),
        with_train(dataset, labels=labels ^ (np.arange(20) == 3)),
        dataset._replace(domains=(domain._replace(name="z"), *dataset.domains[1:])),
        dataset._replace(domains=(domain._replace(validation=None), *dataset.domains[1:])),
        dataset._replace(std=(0.25,)),
    ]
    assert len({reference, *map(fingerprint, changed)}) == 6


NO_LABELS = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"labels": np.full(20, 2, np.int32)}, "'a'.* label 2 at index 0"),
        ({"labels": np.zeros(3, np.int32)}, r"'a'.* 20 images .*\[3\]"),
        ({"images": np.zeros((0, 3), np.float32), "labels": NO_LABELS}, "'a'.*at least one"),
        ({"images": np.zeros((20, 3))}, "float64"),
        ({"images": np.zeros((20, 4), np.float32)}, "'a'.* one form"),
        ({"images": np.full((20, 3), np.nan, np.float32)}, "'a'.*sample 0"),
    ],
)
def test_check_names_what_is_wrong_with_a_dataset_and_where(changes, culprit):
    dataset = toy()
    assert check_dataset(dataset) is dataset
    with pytest.raises(ValueError, match=culprit):
        check_dataset(with_train(dataset, **changes))
    for domains in ((), dataset.domains[:1] * 2):
        with pytest.raises(ValueError, match="toy"):
            check_dataset(dataset._replace(domains=domains))
