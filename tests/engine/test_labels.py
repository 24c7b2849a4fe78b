"""Labels of a user's file: others than classes are refused by name, before a cast hides them."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedjax_bn.data.sets import npz
from fedjax_bn.engine.inputs import class_labels

NUMBERS = st.one_of(arrays.integer_dtypes(), arrays.unsigned_integer_dtypes())
ANY = st.one_of(
    NUMBERS,
    arrays.floating_dtypes(),
    arrays.boolean_dtypes(),
    arrays.complex_number_dtypes(),
    arrays.timedelta64_dtypes(),
    arrays.datetime64_dtypes(),
    arrays.unicode_string_dtypes(),
)


@given(st.data())
def test_labels_are_kept_exactly_or_refused(data):
    dtype = data.draw(ANY)
    labels = data.draw(arrays.arrays(dtype, st.integers(1, 4)))
    classes, first = data.draw(st.sampled_from([2, 10, 1000, None])), data.draw(st.integers(0, 1))
    most = 2**31 if classes is None else classes
    # Python's own numbers, which neither wrap around nor round
    right = dtype.kind in "iuf" and all(
        one == one and abs(one) != float("inf") and one == int(one) and first <= one < first + most
        for one in labels.tolist()
    )
    if not right:
        with pytest.raises(ValueError, match=r"^the file "):
            class_labels(labels, "the file", classes, first)
        return
    found = class_labels(labels, "the file", classes, first)
    assert found.dtype == np.int32
    assert found.tolist() == [int(one) - first for one in labels.tolist()]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.float64])
def test_where_no_count_is_known_all_that_i32_holds_are_labels(dtype, first):
    last = 2**31 - 1 + first
    assert class_labels(np.array([first, last], dtype), "it", None, first).tolist() == [
        0,
        2**31 - 1,
    ]
    with pytest.raises(ValueError, match=f"has label {last + 1}.* at index 0"):
        class_labels(np.array([last + 1], dtype), "it", None, first)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.array([0, 2**32 + 3]), "has label 4294967299 at index 1"),
        (np.array([0, 2**64 - 1], np.uint64), "has label 18446744073709551615 at index 1"),
        (np.array([0, np.nan]), "has label nan at index 1"),
        (np.array([0, 1], "m8[s]"), "is timedelta64[s] (2,)"),
        (np.array([0, 1], object), "is object (2,)"),
        (np.array(["0", "1"]), "is <U1 (2,)"),
        (np.array([False, True]), "is bool (2,)"),
        (np.array(1), "is int64 ()"),
    ],
)
def test_what_is_no_class_is_named(labels, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        class_labels(labels, "it", 10)


def test_times_are_no_labels_of_an_archive(tmp_path):
    images = np.zeros((2, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "a.npz", a__images=images, a__labels=np.array([0, 1], "m8[s]"))
    with pytest.raises(ValueError, match=r"a\.npz: a__labels is timedelta64"):
        npz.load_npz(tmp_path / "a.npz")
