"""Which uploads are taken: the stated rule, case by case."""

import math

import jax
import numpy as np
import pytest

from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.state import Upload

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.accept import Expected, accept

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
FORM = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), UPLOAD)
EXPECTED = Expected(FORM, (), SHARED, client=1, population=3, size=7, losses=True, norm_bound=5.0)


def test_a_good_upload_is_taken_with_the_norm_of_its_update():
    found = accept(to_named(UPLOAD), EXPECTED)
    jax.tree.map(np.testing.assert_array_equal, found.upload, UPLOAD)
    assert found.norm == math.sqrt(4 * 2.0**2 + 3.0**2)
    assert found.personal == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_norm_is_that_of_all_numbers_of_large_leaves_in_float64(dtype):
    """NumPy's own sum, of leaves that are longer than a block and no multiple of one."""
    random = np.random.default_rng(0)
    start, end = (random.normal(size=(3, 11_117)).astype(dtype) for _ in range(2))
    upload = UPLOAD._replace(shared={"w": end}, message=())
    form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), upload)
    expected = EXPECTED._replace(upload=form, shared={"w": start}, norm_bound=1e3)
    wanted = np.linalg.norm(end.astype(np.float64) - start.astype(np.float64))
    assert accept(to_named(upload), expected).norm == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shared/params/w", np.full((2, 2), np.nan), "not finite"),
        ("message/c", np.asarray([np.inf, 0.0]), "not finite"),
        ("finite", np.asarray(False), "not finite"),
        ("shared/params/b", np.asarray([5.0, 1.0]), "norm of its update, 5.657, is above"),
        ("message/c", np.asarray([3.0, 4.1]), "norm of its message, 5.08, is above norm-bound=5"),
        ("client", np.int32(2), "speaks for client 2"),
        ("population", np.int32(4), "another federation"),
        ("participates", np.asarray(False), "sits out"),
        ("size", np.int32(10**9), "claims 1000000000 samples, where it said 7"),
        ("risk", np.float64(np.nan), "its risk, nan, is not within"),
        ("risk", np.float64(np.inf), "its risk, inf, is not within"),
        ("loss", np.float64(-1e300), r"its loss, -1e\+300, is not within"),
        ("shared/params/w", np.zeros((2, 3)), r"upload/shared/params/w is float64\[2, 3\]"),
        ("shared/params/w", np.zeros((2, 2), np.float32), "is float32"),
        ("personal/params/w", np.zeros(2), "unknown personal/params/w"),
        ("message/d", np.zeros(2), "unknown upload/message/d"),
        ("message/c", None, "lack upload/message/c"),
    ],
)
def test_what_is_not_taken_says_why(name, value, message):
    arrays = {n: x for n, x in (to_named(UPLOAD) | {name: value}).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        accept(arrays, EXPECTED)


def test_a_client_that_hides_its_losses_and_size_tells_none_and_counts_as_one():
    expected = EXPECTED._replace(size=0, losses=False)
    hidden = UPLOAD._replace(size=np.int32(1), loss=np.float64(np.nan), risk=np.float64(np.nan))
    assert accept(to_named(hidden), expected).upload.size == 1
    with pytest.raises(ValueError, match="claims 7 samples, where it said nothing and counts as"):
        accept(to_named(hidden._replace(size=np.int32(7))), expected)
    with pytest.raises(ValueError, match="it sends a risk, 9, though it reports none"):
        accept(to_named(hidden._replace(risk=np.float64(9))), expected)


@pytest.mark.parametrize("where", ["shared", "personal"])
def test_a_negative_running_variance_is_not_taken(where):
    tree = {"batch_stats": {"norm": {"mean": np.zeros(2), "var": np.asarray([1.0, -1e-3])}}}
    form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if where == "shared":
        upload, expected = UPLOAD._replace(shared=tree), EXPECTED._replace(shared=tree)
        arrays = to_named(upload)
        expected = expected._replace(upload=expected.upload._replace(shared=form))
    else:
        arrays = to_named(UPLOAD) | to_named({"personal": tree})
        expected = EXPECTED._replace(personal=form)
    with pytest.raises(ValueError, match=f"variance, {where}/batch_stats/norm/var, is negative"):
        accept(arrays, expected)


def test_personal_leaves_come_only_where_they_are_expected_and_are_checked_alike():
    personal = {"params": {"scale": np.ones(3)}}
    arrays = to_named(UPLOAD) | to_named({"personal": personal})
    expected = EXPECTED._replace(personal=personal)
    np.testing.assert_array_equal(accept(arrays, expected).personal["params"]["scale"], np.ones(3))
    arrays["personal/params/scale"] = np.asarray([1.0, 6.0, 1.0])
    with pytest.raises(ValueError, match=r"norm of its personal leaves, 6\.164, is above norm"):
        accept(arrays, expected)
    arrays["personal/params/scale"] = np.asarray([1.0, np.nan, 1.0])
    with pytest.raises(ValueError, match="not finite"):
        accept(arrays, expected)
