"""Strategies over clients, and what their programs compute once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.backend import all_finite, computed_once, traced_for, wait_for_all, where_tree
from fedjax_bn.engine.devices import clients_at_once, map_and_sum, sum_over


@pytest.mark.parametrize(
    "clients", ["auto", "map", "vmap", "vmap:1", "vmap:at_once=2", "vmap:at_once=9"]
)
def test_parts_are_summed_and_rows_and_results_in_order_whatever_the_strategy(clients):
    x, y = jnp.arange(10.0).reshape(5, 2), jnp.arange(5.0)
    total, rows, result = map_and_sum(
        lambda own, a, b, _: (a * b, own + b, {"sum": a.sum() + b, "a": a}),
        clients,
        2 * x,
        x,
        y,
        None,
    )
    np.testing.assert_array_equal(total, np.asarray(x).T @ np.asarray(y))
    np.testing.assert_array_equal(rows, 2 * np.asarray(x) + np.arange(5)[:, None])
    np.testing.assert_array_equal(result["sum"], np.asarray(x).sum(1) + np.arange(5))
    np.testing.assert_array_equal(result["a"], x)


@pytest.mark.parametrize("clients", ["map", "vmap:2"])
def test_leaves_of_any_form_come_back_from_a_program_for_gpu(clients):
    random = np.random.default_rng(0)
    shapes = {"mean": (5, 3), "scale": (5,), "kernel": (5, 2, 2), "empty": (5, 0), "var": (5, 3)}
    rows = {name: random.integers(0, 9, shape).astype(np.float32) for name, shape in shapes.items()}
    rows |= {"count": np.arange(5, dtype=np.int32), "half": np.arange(10.0).reshape(5, 2)}
    rows["half"] = jnp.asarray(rows["half"], jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 5)

    def train(row, x):
        leaves, key = row
        part = {name: leaves[name] * x.astype(leaves[name].dtype) for name in ("var", "count")}
        return part, (jax.tree.map(lambda leaf: leaf + 1, leaves), key), (x, leaves["half"])

    with traced_for("cuda"):
        part, (leaves, after), result = map_and_sum(train, clients, (rows, keys), np.arange(5))
    np.testing.assert_array_equal(part["var"], (rows["var"] * np.arange(5)[:, None]).sum(0))
    assert part["count"] == 30  # 0 + 1 + 4 + 9 + 16
    for name, leaf in leaves.items():
        assert leaf.dtype == rows[name].dtype
        np.testing.assert_array_equal(leaf, rows[name] + 1)
    assert (after == keys).all()
    np.testing.assert_array_equal(result[0], np.arange(5))
    np.testing.assert_array_equal(result[1], rows["half"])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_sum_over_rows_is_numpys_on_every_platform(platform):
    x, y = np.random.default_rng(0).integers(-9, 9, (2, 5, 3)).astype(np.float32)
    with traced_for(platform):
        ours = sum_over(lambda a, b, none: {"product": a * b, "none": none}, x, y, None)
        alone, nothing = sum_over(lambda a: a, x[:1]), sum_over(lambda part: part, ())
    np.testing.assert_array_equal(ours["product"], (x * y).sum(0))
    np.testing.assert_array_equal(alone, x[0])
    assert (ours["none"], nothing) == (None, ())


@pytest.mark.parametrize("clients", ["map", "vmap:4"])
def test_what_clients_keep_is_held_once(clients):
    """A round renews the rows that it is given in place, but for those of the clients under way."""
    rows = jnp.zeros((64, 1000))

    def keep(row, x):
        return row.sum(), jnp.sort(row) + x, ()

    renew = jax.jit(lambda rows, x: map_and_sum(keep, clients, rows, x), donate_argnums=0)
    memory = renew.lower(rows, jnp.zeros(64)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= rows.nbytes
    assert memory.temp_size_in_bytes < rows.nbytes / 2


@pytest.mark.parametrize("clients", ["", "vmap:x", "vmap:at_once=0", "map:2", "scan"])
def test_unknown_strategies_are_refused(clients):
    with pytest.raises(ValueError, match="vmap:at_once=n"):
        clients_at_once(clients)


def train_by(megabytes, row, weights):
    """A client whose steps carry its weights, and make products of so many megabytes."""

    def step(weights, x):
        made = jnp.ones((megabytes * 2**18, 1)) @ x
        return weights + made.sum(), ()

    return jax.lax.scan(step, weights, jnp.zeros((3, 1, 1)))[0].sum(), row, ()


@pytest.mark.parametrize(
    ("platform", "carried", "products", "clients", "expected"),
    [
        ("tpu", 16, 1, 6, {2, 3}),  # two groups of three clients, which fit; three steps
        ("tpu", 16, 1, 8, {2, 3}),  # two of four
        ("tpu", 300, 1, 5, {5, 3}),  # one after another
        ("tpu", 1, 700, 8, {4, 3}),  # the maps of two take less than 1.5 GB
        ("cuda", 16, 1, 6, {3}),
        ("cpu", 16, 1, 6, {6, 3}),
    ],
)
def test_auto_groups_clients_as_they_fit_a_platform(platform, carried, products, clients, expected):
    rows = jax.ShapeDtypeStruct((clients,), jnp.float32)
    weights = jax.ShapeDtypeStruct((clients, carried * 2**18), jnp.float32)
    train = functools.partial(train_by, products)
    with traced_for(platform):
        program = jax.make_jaxpr(lambda *trees: map_and_sum(train, "auto", *trees))(rows, weights)
    # The lengths of the loops over groups of clients and over steps.
    lengths = {int(part.split()[0]) for part in str(program).split("length=")[1:]}
    assert lengths == expected


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
