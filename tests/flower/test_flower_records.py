"""Arrays in Flower's messages are NumPy's bytes, read in place; uploads share one array."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Array, ArrayRecord

from fedjax_bn.flower.host import Kept, _by_stack, _side_by_side
from fedjax_bn.flower.messages import Answer, arrays_in, packed, recorded
from fedjax_bn.state import Upload


class State(NamedTuple):
    round: np.ndarray
    weights: np.ndarray
    uploads: Any = ()


HEADER = Answer("one", "fedbn", 0, 0)
ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "neither": np.arange(24, dtype=np.int32).reshape(2, 3, 4)[:, ::2, ::3],
    "scalar": np.array(True),
    "empty": np.zeros((0, 3), np.float16),
    "narrow": np.asarray(jnp.ones(3, jnp.bfloat16)),
}


def test_arrays_travel_as_the_bytes_that_flower_itself_writes():
    record = recorded(ARRAYS)
    for name, array in ARRAYS.items():
        own = Array(array)
        written = record[name]
        assert (written.dtype, written.shape, written.stype) == (own.dtype, own.shape, own.stype)
        assert written.data == own.data


def test_arrays_that_arrive_are_those_that_numpy_reads_and_are_not_copied():
    record = ArrayRecord({name: Array(array) for name, array in ARRAYS.items()})
    for name, array in arrays_in(packed(HEADER, record)).items():
        read = record[name].numpy()
        assert (array.dtype, array.shape) == (read.dtype, read.shape)
        assert array.tobytes() == read.tobytes()
        assert not array.flags.owndata
        assert not array.flags.writeable


def data_of(array):
    return Array(np.asarray(array)).data


@pytest.mark.parametrize(
    ("stype", "data", "said"),
    [
        ("torch.Tensor", data_of([1.0]), "its form is torch.Tensor"),
        ("numpy.ndarray", b"no header", "magic string"),
        ("numpy.ndarray", data_of([1.0, 2.0])[:-1], "buffer is too small"),
        ("numpy.ndarray", data_of([1.0]).replace(b"'<f8'", b"'|O' "), "it holds objects"),
        ("numpy.ndarray", data_of([1.0]).replace(b"(1,)", b"(-1)"), "shape is not valid"),
        ("numpy.ndarray", data_of([1.0]).replace(b"NUMPY\x01", b"NUMPY\x07"), "version"),
    ],
)
def test_an_array_that_cannot_be_read_is_named(stype, data, said):
    record = ArrayRecord({"weights": Array("float64", (1,), stype, data)})
    with pytest.raises(ValueError, match=f"the array weights cannot be read .*{said}"):
        arrays_in(packed(HEADER, record))


def test_uploads_are_stacked_in_the_same_memory_each_round():
    stack = _side_by_side({"x": np.zeros((2, 3), np.float32), "n": np.int32(0)})
    first = [{"x": np.full((2, 3), k, np.float32), "n": np.int32(k)} for k in range(4)]
    found = stack(first)
    where = found["x"].ctypes.data
    np.testing.assert_array_equal(found["x"], np.stack([tree["x"] for tree in first]))
    np.testing.assert_array_equal(found["n"], range(4))
    again = stack(first[::-1])
    assert again["x"].ctypes.data == where
    assert where % 64 == 0
    np.testing.assert_array_equal(again["n"], range(4)[::-1])
    assert stack(first[:2])["x"].shape == (2, 2, 3)


def test_who_sits_out_has_an_upload_of_zeros_that_does_not_count():
    form = Upload(
        shared={"w": np.ones((3, 2), np.float32)},
        message=(),
        size=np.int32(5),
        risk=np.float32(1),
        loss=np.float32(1),
        finite=np.array(False),
        participates=np.array(True),
        client=np.int32(9),
        population=np.int32(9),
    )
    begun = Kept(State(np.int32(1), np.ones(4, np.float32)), (), np.zeros(4, np.int32))
    _, step = _by_stack(lambda state, uploads: (state._replace(uploads=uploads), True), form, ())
    kept, *_ = step(begun, None, np.array([2], np.int32))
    found = kept.state.uploads
    assert (found.participates, found.finite) == (False, True)
    assert (found.client, found.population) == (2, 4)
    np.testing.assert_array_equal(found.shared["w"], np.zeros((1, 3, 2), np.float32))
    np.testing.assert_array_equal(kept.taken, np.zeros(4))
