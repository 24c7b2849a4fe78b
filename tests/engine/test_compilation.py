"""How large compiled programs become, and what keeps them small on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.backend import all_finite, computed_once, wait_for_all, where_tree

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)


def size_of(function, *arguments):
    """The operations of the compiled program, those of inner computations too."""
    return jax.jit(function).lower(*arguments).compile().as_text().count(" = ")


def leaves(count):
    return [jnp.full(3 + i, i, jnp.float32) for i in range(count)]


def scale(weight, tree):
    return jax.tree.map(lambda leaf: weight * leaf, tree)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "function",
    [
        lambda tree: where_tree(all_finite(tree), tree, jax.tree.map(jnp.cos, tree)),
        lambda tree: scale(jnp.where(all_finite(tree), 0.5, 0), tree),
        wait_for_all,
    ],
    ids=["where_tree", "weight", "wait_for_all"],
)
def test_a_condition_on_all_leaves_makes_a_program_that_grows_as_their_number(function):
    small, large = (size_of(function, leaves(count)) for count in (8, 32))
    assert large < 5 * small  # a copy of the condition in every leaf: more than ten times


@pytest.mark.usefixtures("optimized")
def test_a_chain_of_sums_is_not_computed_anew_by_each_of_its_readers():
    def chain(ws, hold):
        x = X
        for w in ws:
            x = hold(jnp.maximum(x @ w + x, 0))
        return x.sum()

    small, large = (
        size_of(lambda ws: chain(ws, computed_once), [jnp.eye(3)] * count) for count in (5, 20)
    )
    assert large < 5 * small  # every sum computed by all later ones: more than ten times


@pytest.mark.parametrize(
    "transform", [jax.grad, jax.vmap, lambda f: jax.jit(jax.jacfwd(jax.grad(f)))]
)
def test_what_is_computed_once_has_the_same_values_and_derivatives(transform):
    def f(x, hold):
        y, z = hold((jnp.sin(x), x * x))
        return (y * z).sum()

    ours, plain = (transform(lambda x, h=h: f(x, h))(X) for h in (computed_once, lambda x: x))
    np.testing.assert_allclose(ours, plain, rtol=1e-6)
