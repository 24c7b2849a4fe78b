"""Which arrays are read from messages, and which uploads are taken: case by case."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.state import Upload

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from flwr.app import Array, ArrayRecord

from fedjax_bn.flower.members import accept
from fedjax_bn.flower.messages import Answer, Hello, arrays_in, packed, recorded

SHARED = {"params": {"w": np.zeros((2, 2)), "b": np.ones(2)}}
UPLOAD = Upload(
    shared={"params": {"w": np.full((2, 2), 2.0), "b": np.asarray([4.0, 1.0])}},
    message={"c": np.asarray([3.0, 4.0])},
    size=np.int32(7),
    risk=np.float64(0.5),
    loss=np.float64(0.25),
    finite=np.asarray(True),
    participates=np.asarray(True),
    client=np.int32(1),
    population=np.int32(3),
)
HELLO = Hello("", 7, True, True, "{}")


def taken(arrays, upload=UPLOAD, personal=(), shared=SHARED, hello=HELLO, bound=5.0):
    form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (upload, personal))
    return accept(arrays, form, shared, 1, 3, hello, bound)


def test_a_good_upload_is_taken_with_the_norm_of_its_update():
    upload, personal, norm = taken(to_named(UPLOAD))
    jax.tree.map(np.testing.assert_array_equal, upload, UPLOAD)
    assert norm == math.sqrt(4 * 2.0**2 + 3.0**2)
    assert personal == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_norm_is_that_of_all_numbers_of_large_leaves_in_float64(dtype):
    """NumPy's own sum, of leaves that are longer than a block and no multiple of one."""
    random = np.random.default_rng(0)
    start, end = (random.normal(size=(3, 11_117)).astype(dtype) for _ in range(2))
    upload = UPLOAD._replace(shared={"w": end}, message=())
    expected = np.linalg.norm(end.astype(np.float64) - start.astype(np.float64))
    *_, norm = taken(to_named(upload), upload, shared={"w": start}, bound=1e3)
    assert norm == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shared/params/w", np.full((2, 2), np.nan), "shared/params/w is not finite"),
        ("message/c", np.asarray([np.inf, 0.0]), "message/c is not finite"),
        ("finite", np.asarray(False), "not finite"),
        ("shared/params/b", np.asarray([5.0, 1.0]), "norm of its update, 5.657"),
        ("message/c", np.asarray([3.0, 4.1]), "norm of its message, 5.08"),
        ("client", np.int32(2), "client 2"),
        ("population", np.int32(4), "another federation"),
        ("participates", np.asarray(False), "sits out"),
        ("size", np.int32(10**9), "1000000000 samples"),
        ("risk", np.float64(np.nan), "a risk of nan"),
        ("risk", np.float64(np.inf), "risk, inf"),
        ("loss", np.float64(-1e300), r"loss, 1e\+300"),
        ("shared/params/w", np.zeros((2, 3)), r"shared/params/w is float64\[2, 3\]"),
        ("shared/params/w", np.zeros((2, 2), np.float32), "is float32"),
        ("personal/params/w", np.zeros(2), "personal/params/w"),
        ("message/d", np.zeros(2), "message/d"),
        ("message/c", None, "message/c"),
    ],
)
def test_what_is_not_taken_says_why(name, value, message):
    arrays = {n: x for n, x in (to_named(UPLOAD) | {name: value}).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        taken(arrays)


def test_a_client_that_hides_its_losses_and_size_tells_none_and_counts_as_one():
    hello = HELLO._replace(size=0, losses=False)
    hidden = UPLOAD._replace(size=np.int32(1), loss=np.float64(np.nan), risk=np.float64(np.nan))
    assert taken(to_named(hidden), hello=hello)[0].size == 1
    for lie in (hidden._replace(size=np.int32(7)), hidden._replace(risk=np.float64(9))):
        with pytest.raises(ValueError, match=r"7 samples|a risk of 9"):
            taken(to_named(lie), hello=hello)


@pytest.mark.parametrize("kind", ["shared", "personal"])
def test_a_negative_running_variance_is_not_taken(kind):
    tree = {"batch_stats": {"norm": {"mean": np.zeros(2), "var": np.asarray([1.0, -1e-3])}}}
    upload, personal = UPLOAD, tree
    if kind == "shared":
        upload, personal = UPLOAD._replace(shared=tree), ()
    arrays = to_named(upload) | to_named({"personal": personal})
    with pytest.raises(ValueError, match=f"{kind}.*/batch_stats/norm/var"):
        taken(arrays, upload, personal, shared=upload.shared)


def test_personal_leaves_come_only_where_they_are_expected_and_are_checked_alike():
    personal = {"params": {"scale": np.ones(3)}}
    arrays = to_named(UPLOAD) | to_named({"personal": personal})
    assert taken(arrays, personal=personal)[1]["params"]["scale"].tolist() == [1.0] * 3
    for value, message in ((6.0, r"personal leaves, 6\.164"), (np.nan, "not finite")):
        arrays["personal/params/scale"] = np.asarray([1.0, value, 1.0])
        with pytest.raises(ValueError, match=message):
            taken(arrays, personal=personal)


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
    with pytest.raises(ValueError, match=f"weights .*{said}"):
        arrays_in(packed(HEADER, record))
