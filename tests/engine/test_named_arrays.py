"""Trees as named arrays: what was named comes back, and the error names what does not fit."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.named_arrays import from_named, names_of, to_named, tree_of
from fedjax_bn.state import Own

TREE = Own(
    {"params": {"a": {"kernel": np.arange(6.0).reshape(2, 3), "bias": None}}},
    (np.asarray(3, np.int32), {"b": np.ones(2, jnp.bfloat16)}),
)


def test_a_tree_comes_back_from_a_file_of_named_arrays_whatever_its_dtypes():
    file = io.BytesIO()
    np.savez(file, **to_named(TREE))
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        back = from_named(dict(arrays), TREE)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert names_of(TREE) == ["personal/params/a/kernel", "memory/0", "memory/1/b"]
    odd = {"a": {"b": 1, "last layer é": 2}, "a/b": 3, "a%2Fb": 4}
    assert list(to_named(odd)) == ["a/b", "a/last layer é", "a%252Fb", "a%2Fb"]
    assert tree_of(to_named(odd)) == odd


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory/0": None}, "memory/0"),
        ({"memory/9": np.ones(1)}, "memory/9"),
        ({"memory/0": np.ones(2, np.int32)}, "memory/0 is int32"),
        ({"memory/0": np.float64(1)}, "memory/0 is float64"),
        ({"memory/1/b": np.ones(2, "V4")}, "memory/1/b"),
    ],
)
def test_arrays_of_another_form_are_refused_by_name(change, message):
    arrays = {n: x for n, x in (to_named(TREE) | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        from_named(arrays, TREE)
