"""Arrays in Flower's messages are NumPy's bytes, read in place."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Array, ArrayRecord

from fedjax_bn.flower.messages import Answer, arrays_in, packed, recorded

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
        ("torch.Tensor", data_of([1.0]), "torch.Tensor"),
        ("numpy.ndarray", b"no header", "magic string"),
        ("numpy.ndarray", data_of([1.0, 2.0])[:-1], "buffer is too small"),
        ("numpy.ndarray", data_of([1.0]).replace(b"'<f8'", b"'|O' "), "object is not what"),
        ("numpy.ndarray", data_of([1.0]).replace(b"(1,)", b"(-1)"), "shape is not valid"),
        (
            "numpy.ndarray",
            data_of([1.0]).replace(b"NUMPY\x01", b"NUMPY\x07"),
            "is not what numpy.save writes",
        ),
    ],
)
def test_an_array_that_cannot_be_read_is_named(stype, data, said):
    record = ArrayRecord({"weights": Array("float64", (1,), stype, data)})
    with pytest.raises(ValueError, match=f"the array weights cannot be read .*{said}"):
        arrays_in(packed(HEADER, record))
