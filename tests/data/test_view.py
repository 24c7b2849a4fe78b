"""Rows of an array are what NumPy's own indexing gives, and nothing is read before it is needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_bn.data.division.partition import fingerprint, share_out_domains, stratified_sample
from fedjax_bn.data.domain import Dataset, Domain, Rows, Split, blocks, check_dataset, select, whole
from fedjax_bn.data.seeds import generator

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
