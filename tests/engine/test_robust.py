"""Robust rules: the numbers of NumPy in float64, over who counts, on one device and on two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from jax.sharding import Mesh

from collectives import collectives
from federations import assert_close, one_by_one, stacked
from fedjax_bn.aggregation import (
    coordinate_median,
    geometric_median,
    krum,
    norm_clipping,
    trimmed_mean,
)
from fedjax_bn.client import Client, LocalUpdate
from fedjax_bn.engine.privacy import gaussian
from fedjax_bn.federation import federate, global_variables, take_rows
from fedjax_bn.sharing import all_but_statistics

KEY, SHAPE = jax.random.key(0), (3, 2)
START = np.random.default_rng(9).normal(size=SHAPE)


def as_rows(stacked):
    """Both leaves of each client, side by side."""
    return np.concatenate([np.asarray(x).reshape(len(x), -1) for x in stacked.values()], 1)


def by_hand_krum(rows, start, malicious=1, keep=1):
    far = np.square(rows[:, None] - rows[None]).sum(-1)
    nearest = np.sort(far, axis=1)[:, 1 : len(rows) - malicious - 1]  # the first is itself
    kept = np.argsort(nearest.sum(1), kind="stable")[: min(keep, len(rows) - malicious)]
    return rows[kept].mean(0)


def by_hand_geometric_median(rows, start):
    def mean_distance(point):
        far = np.linalg.norm(rows - point, axis=1)
        return far.mean(), ((point - rows) / far[:, None]).mean(0)

    return scipy.optimize.minimize(mean_distance, rows.mean(0), jac=True, options={"gtol": 1e-9}).x


def by_hand_clipping(rows, start, factor=1.0):
    norms = np.linalg.norm(rows - start, axis=1)
    scales = np.minimum(1, factor * np.median(norms) / norms)
    return start + (scales[:, None] * (rows - start)).mean(0)


RULES = {
    "median": (coordinate_median(), lambda rows, start: np.median(rows, 0), 1e-12),
    "trimmed": (trimmed_mean(trim=0.25), lambda r, start: scipy.stats.trim_mean(r, 0.25), 1e-12),
    "krum": (krum(malicious=1), by_hand_krum, 1e-12),
    "multi-krum": (krum(malicious=1, keep=3), functools.partial(by_hand_krum, keep=3), 1e-12),
    "geometric": (geometric_median(iterations=200), by_hand_geometric_median, 1e-6),
    "clipping": (norm_clipping(factor=0.5), functools.partial(by_hand_clipping, factor=0.5), 1e-12),
}


BY_SIZE = {
    "median": coordinate_median(weights="by_size"),
    "trimmed": trimmed_mean(trim=0.25, weights="by_size"),
    "geometric": geometric_median(iterations=200, weights="by_size"),
    "clipping": norm_clipping(factor=0.5, weights="by_size"),
}


@functools.cache
def combined(rule):
    return jax.jit(RULES[rule][0].combine)


def drawn(clients, seed=0, like=np.float64):
    """What clients upload, of which the last is far away."""
    random = np.random.default_rng(seed)
    stacked = {"a": random.normal(size=(clients, *SHAPE)), "b": random.normal(size=(clients, 4))}
    stacked["a"][-1] *= 50
    return jax.tree.map(lambda x: x.astype(like), stacked)


FROM = {"a": START, "b": np.arange(4.0)}
FROM_ROW = np.concatenate([START.ravel(), np.arange(4.0)])


def compare(rule, combine, stacked, sizes, *weights):
    """The rule's formula, of as many equal rows as a client has samples, and `combine`."""
    expected = RULES[rule][1](np.repeat(as_rows(stacked), sizes, axis=0), FROM_ROW)
    for leaf in stacked.values():
        leaf[sizes == 0] = np.nan
    for w in weights:
        leaves, shares = combine(stacked, FROM, w)
        ours = np.concatenate([np.asarray(x).ravel() for x in leaves.values()])
        np.testing.assert_allclose(ours, expected, rtol=RULES[rule][2], atol=RULES[rule][2])
        assert (np.asarray(shares)[sizes == 0] == 0).all()
        np.testing.assert_allclose(shares.sum(), 1, rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_formula_over_the_clients_that_count(x64, rule):
    """Of eight rows some do not count and hold NaN: an even and an odd number of clients."""
    for seed, absent in enumerate([(), (2,), (0, 5, 6), (4, 5, 6)]):
        counts = ~np.isin(np.arange(8), absent)
        compare(rule, combined(rule), drawn(8, seed), counts.astype(int), counts / counts.sum())


@pytest.mark.parametrize("rule", BY_SIZE)
def test_by_size_a_client_of_n_samples_counts_as_n_clients(x64, rule):
    combine = jax.jit(BY_SIZE[rule].combine)
    for sizes in ([1, 2, 3, 4, 5, 8, 13, 20], [1, 0, 1, 2, 0, 3, 1, 2], [0, 3, 0, 2, 1, 0, 2, 2]):
        sizes = np.array(sizes, np.int32)
        # Four of each, so that a quarter of all is whole; weights are sizes, or sum to 1.
        compare(rule, combine, drawn(8, 3), 4 * sizes, sizes, sizes / sizes.sum())


@pytest.mark.parametrize("size", [1e3, 1e15, 1e30])
@pytest.mark.parametrize("rule", RULES)
def test_one_client_cannot_move_a_rule_far(rule, size):
    """In float32, in which the largest of these norms has no finite square."""
    stacked = jax.tree.map(lambda x: x.astype(np.float32), drawn(8))
    for leaf in stacked.values():
        leaf[-1] = size
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), FROM)
    leaves, weights = combined(rule)(stacked, start, jnp.full(8, 1 / 8, jnp.float32))
    assert max(abs(np.asarray(x)).max() for x in leaves.values()) < 6
    if rule != "trimmed" and rule != "median":  # which also takes one of the others less
        assert np.argmin(weights) == 7 or weights[7] == 0
    assert weights[7] < 0.03


def test_who_returns_what_it_received_does_not_stop_the_geometric_median():
    """The iterations would stay at an upload at which they start."""
    updates = np.eye(8, 50, dtype=np.float32) * (np.arange(8) > 0)[:, None]
    stacked, zero = {"w": jnp.asarray(updates)}, {"w": jnp.zeros(50)}
    leaves, weights = geometric_median().combine(stacked, zero, jnp.full(8, 1 / 8))
    np.testing.assert_allclose(leaves["w"], by_hand_geometric_median(updates, 0), atol=0.04)
    assert weights[0] < 0.5


def test_clipping_makes_no_variance_negative():
    start = np.random.default_rng(0).uniform(0.1, 3, 1000).astype(np.float32)
    for clients in (3, 7):
        stacked = {"var": jnp.zeros((clients, 1000))}
        weights = jnp.full(clients, 1 / clients)
        leaves, _ = norm_clipping().combine(stacked, {"var": jnp.asarray(start)}, weights)
        assert (np.asarray(leaves["var"]) >= 0).all()


def test_a_round_with_too_few_for_krum_has_no_weights_and_too_few_rows_are_refused():
    stacked = drawn(6, like=np.float32)
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), FROM)
    weights = np.array([1, 1, 1, 1, 0, 0], np.float32) / 4
    assert (combined("krum")(stacked, start, weights)[1] == 0).all()
    with pytest.raises(ValueError, match="malicious=2"):
        krum(malicious=2).combine(stacked, start, weights)


def echo():
    """A client that uploads its first image, and keeps its label as a statistic."""

    def run(received, batches, key):
        variables = {
            "params": {"w": batches["image"][0, 0]},
            "batch_stats": {"mean": batches["label"][0].astype(jnp.float32)},
        }
        ones = batches["valid"].sum(1, dtype=jnp.int32)
        return LocalUpdate(variables, (), (), jnp.ones(len(ones)), ones)

    return Client(lambda shared, personal: (), run)


def said(clients=8, present=None):
    image = drawn(clients, like=np.float32)["a"].reshape(clients, 1, 1, 6)
    image[1] = np.nan  # a client whose training failed
    batches = {
        "image": jnp.asarray(image),
        "label": jnp.arange(clients, dtype=jnp.int32).reshape(clients, 1, 1),
        "valid": jnp.ones((clients, 1, 1), bool),
        "size": jnp.arange(1, clients + 1, dtype=jnp.int32),
    }
    present = np.ones(clients, bool) if present is None else present
    return batches | {"participates": jnp.asarray(present)}


VARIABLES = {"params": {"w": jnp.zeros(6)}, "batch_stats": {"mean": jnp.zeros(1)}}


def played(batches, **options):
    method = federate(echo(), share=all_but_statistics, **options)
    state = method.init(KEY, VARIABLES, len(batches["valid"]))
    return method.round(state, batches, KEY)


def slow_but(*often):
    """All rules; what a round does with one is tested for the given ones in the default suite."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (n not in often)) for n in RULES]


@pytest.mark.parametrize("rule", slow_but("multi-krum", "clipping"))
def test_a_round_leaves_out_who_is_absent_or_failed_and_keeps_what_is_personal(rule):
    present = np.arange(8) != 3
    batches = said(8, present)
    counts = present & (np.arange(8) != 1)
    state, metrics = played(batches, weigh=BY_SIZE.get(rule, RULES[rule][0]))
    rows = np.asarray(batches["image"]).reshape(8, 6)
    times = counts * (np.arange(4, 36, 4) if rule in BY_SIZE else 1)
    expected = RULES[rule][1](np.repeat(rows, times, axis=0).astype(np.float64), np.zeros(6))
    np.testing.assert_allclose(state.shared["params"]["w"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        state.personal["batch_stats"]["mean"][:, 0], [0, 0, 2, 0, 4, 5, 6, 7]
    )
    norms = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(metrics["norm"], np.where(counts, norms, np.nan), rtol=1e-5)
    # An unseen client has the mean of the personal leaves, with the weights of the rule.
    unseen = global_variables(state)["batch_stats"]["mean"]
    mean = (np.asarray(metrics["weights"]) * np.arange(8)).sum()
    np.testing.assert_allclose(unseen[0], mean, rtol=1e-5)


@pytest.mark.parametrize("rule", slow_but("clipping"))
def test_devices_a_deployment_and_a_cohort_give_the_numbers_of_one_round(rule):
    """Five clients on two devices: a row of padding counts nowhere."""
    weigh, batches = BY_SIZE.get(rule, RULES[rule][0]), said(6)
    batches = jax.tree.map(lambda x: x[:6], batches)
    alone, metrics = played(batches, weigh=weigh)

    mesh = Mesh(np.array(jax.devices()), ("clients",))
    five = jax.tree.map(lambda x: x[1:], batches) | {"participates": jnp.ones(5, bool)}
    pairs = zip(played(five, weigh=weigh, mesh=mesh), played(five, weigh=weigh), strict=True)
    (spread, here), (seen, there) = pairs
    assert_close(seen, there, rtol=1e-5)
    assert_close(spread.shared, here.shared, rtol=1e-5, atol=1e-6)

    method = federate(echo(), share=all_but_statistics, weigh=weigh)
    state = method.init(KEY, VARIABLES, 6)
    after = method.server(state, stacked(one_by_one(method, state, batches, KEY)[1]))
    assert_close(after.shared, alone.shared, rtol=1e-6)
    np.testing.assert_allclose(after.weights, metrics["weights"], rtol=1e-6)

    many = method.init(KEY, VARIABLES, 20)
    rows = jnp.asarray([9, 3, 4, 17, 0, 11], jnp.int32)
    cohort = batches | {"client": rows, "population": jnp.asarray(20, jnp.int32)}
    after, _ = method.round(take_rows(many, rows), cohort, KEY)
    assert_close(after.shared, alone.shared, rtol=1e-6)


def test_on_a_mesh_a_rule_has_two_reductions_of_which_the_first_holds_all_uploads():
    mesh = Mesh(np.array(jax.devices()), ("clients",))
    method = federate(echo(), share=all_but_statistics, weigh=krum(malicious=1), mesh=mesh)
    state = method.init(KEY, VARIABLES, 8)
    program = method.round.lower(state, said(8), KEY).compile()
    kinds, numbers = zip(*collectives(program.as_text()), strict=True)
    assert kinds == ("all-reduce",) * 2
    small, large = sorted(numbers)
    assert large >= 8 * 6 > small - 8 * 8


def test_a_method_with_messages_and_privacy_are_refused():
    client, batches = echo(), said(6)

    def talking(*given):
        return client.run(*given)._replace(message=jnp.zeros(3))

    method = federate(client._replace(run=talking), share=all_but_statistics, weigh=krum())
    state = method.init(KEY, VARIABLES, 6)
    with pytest.raises(ValueError, match="1 arrays"):
        method.round.eval_shape(state, batches, KEY)
    with pytest.raises(ValueError, match="weigh=uniform"):
        federate(client, weigh=krum(), privacy=gaussian(1.0))
