"""Labels of a user's file: others than classes are refused by name, before a cast hides them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

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
