"""Norms of updates in records: which are far from the others', and what is printed of them."""

import json

import numpy as np
import pytest

from fedjax_bn.training.records import round_record, warnings_of


def record(norms):
    metrics = {"loss": np.ones(4), "weights": np.full(4, 0.25), "norm": np.array(norms)}
    metrics |= {"finite": np.ones(4, bool), "server_finite": True}
    return round_record(["a", "b", "c", "d"], metrics, 1, 0.5)


def test_a_norm_of_more_than_ten_times_the_median_is_recorded_and_is_a_sentence():
    found = record([1.0, 3.0, np.nan, 40.0])
    assert found["norm"] == {"a": 1, "b": 3, "c": None, "d": 40}
    assert found["far_norms"] == {"d": pytest.approx(40 / 3)}
    (sentence,) = warnings_of(found)
    assert sentence == "round 1: the norm of d's update is 13.3 times the median norm"


def test_a_norm_that_overflows_is_far_and_is_a_line_of_json():
    for norms in ([1.0, 3.0, 2.0, np.inf], [1.0, 3.0, np.nan, np.inf]):
        found = record(norms)
        json.dumps(found, allow_nan=False)
        assert found["far_norms"] == {"d": None}
        assert warnings_of(found) == ["round 1: the norm of d's update overflows"]


@pytest.mark.parametrize(
    "norms", [[1, 2, 3, 9.0], [np.nan, np.nan, 1, 99], [0, 0, 0, 5.0], [np.nan] * 4]
)
def test_near_norms_few_clients_and_clients_at_rest_are_no_warning(norms):
    assert warnings_of(record(norms)) == []
