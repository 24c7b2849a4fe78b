"""A method is a client and a server, and a round is over a cohort: the same numbers every way."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import federations as fed
from cohorts import KEY, NAMES, PRESENT, SGD, method_of, rows_of, unequal_batches
from fedjax_bn.aggregation import conclude, sum_uploads, weighted_part
from fedjax_bn.federation import put_rows, take_rows, traffic
from fedjax_bn.methods import scaffold
from fedjax_bn.methods.scaffold import keeping_variates
from method_table import METHODS


def after_one_round(method):
    variables = fed.in_float64(fed.variables_of(fed.MapNet()))
    state = jax.jit(method.init, static_argnums=2)(KEY, variables, 4)
    return method.round(state, unequal_batches(), KEY)[0]


take, put_back = jax.jit(take_rows), jax.jit(put_rows)


# A rule and an optimizer that remember, and variates that are sent; others have parts of this.
OFTEN = ("fedbn, remembering", "scaffold")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in NAMES]
)
def test_clients_one_by_one_and_the_server_are_the_round_and_so_is_a_cohort(x64, name):
    """In the second round a client sits out; the cohort holds the others, and a row of padding."""
    method = method_of(name)
    state, some = after_one_round(method), unequal_batches(PRESENT)
    after, uploads = fed.one_by_one(method, state, some, KEY)
    alone = method.server(after, fed.stacked(uploads))
    if method.adding:
        running = method.adding.begin(4, uploads[0])
        for upload in uploads:
            running = method.adding.add(running, upload)
        fed.assert_close(method.adding.end(after, running)[0], alone, rtol=1e-12, atol=1e-12)

    client = jnp.asarray([3, 0, 2, 4], jnp.int32)
    cohort, seen = method.round(take(state, client), rows_of(unequal_batches(), client), KEY)
    cohort = put_back(state, cohort, client)

    expected, metrics = method.round(state, some, KEY)
    fed.assert_close(alone, expected, rtol=1e-12, atol=1e-12)
    fed.assert_close(cohort, expected, rtol=1e-12, atol=1e-12)
    for key in ("loss", "risk", "weights"):
        np.testing.assert_allclose(seen[key][:3], metrics[key][client[:3]], rtol=1e-12)


def test_uploads_may_come_in_any_order_and_from_some_clients_only(x64):
    method = method_of("fedbn, remembering")
    state = after_one_round(method)
    after, uploads = fed.one_by_one(method, state, unequal_batches(), KEY)
    in_order = method.server(after, fed.stacked(uploads))
    turned = method.server(after, fed.stacked(uploads[::-1]))
    fed.assert_close(turned, in_order, rtol=1e-12, atol=1e-14)
    some = method.server(after, fed.stacked([uploads[2], uploads[0]]))
    np.testing.assert_array_equal(some.weights[1::2], 0)
    np.testing.assert_array_equal(some.weighing["count"], [2, 1, 2, 1])


def test_a_variate_moves_by_its_share_of_the_whole_population(x64):
    """SCAFFOLD: c' = c + 1/N sum (c_k' - c_k), where N counts those who are not in the cohort."""
    method = method_of("scaffold")
    state = after_one_round(method)
    client = jnp.asarray([0, 2, 8, 8], jnp.int32)
    rows = rows_of(unequal_batches(), client)
    moves = []
    for population in (4, 8):
        who = {"population": jnp.asarray(population, jnp.int32)}
        cohort, _ = method.round(take(state, client), rows | who, KEY)
        moves.append(jax.tree.map(jnp.subtract, cohort.server.sent, state.server.sent))
    fed.assert_close(moves[1], jax.tree.map(lambda move: move / 2, moves[0]), rtol=1e-9, atol=1e-15)


def test_traffic_is_what_travels():
    """FedBN sends no batch norm, SCAFFOLD a variate each way, FedAdam's moments stay."""
    variables, one = fed.variables_of(fed.MapNet()), fed.client(fed.batches_of((4,)), 0)
    sizes = {k: sum(x.nbytes for x in jax.tree.leaves(v)) for k, v in variables.items()}
    sent = {}
    for name in ("fedavg", "fedadam", "fedbn", "scaffold", "singleset"):
        method = METHODS[name](fed.MapNet(), SGD)
        state = jax.eval_shape(lambda method=method: method.init(KEY, variables, 3))
        sent[name] = traffic(method, state, one)
    number, report = 4, 4 + 4 + 4 + 1 + 1 + 4  # size, risk, loss, two flags, client
    whole, norm = sum(sizes.values()), sizes["batch_stats"] + 2 * 2 * 4
    assert sent["fedavg"] == {"down": whole + number, "up": whole + report}
    assert sent["fedadam"] == sent["fedavg"]
    assert sent["fedbn"] == {"down": whole - norm + number, "up": whole - norm + report}
    variate = sizes["params"]
    assert sent["scaffold"] == {"down": whole + variate + number, "up": whole + variate + report}
    assert sent["singleset"] == {"down": number, "up": report}


BITS, SIZES = 32, (6, 9, 4)  # after the point


@pytest.mark.slow
def test_masks_that_cancel_leave_the_sums_of_a_round_as_they_are(x64):
    """In whole numbers modulo 2**64, without recovery (Bonawitz et al., CCS 2017)."""
    sgd = optax.sgd(0.1)
    method, server = scaffold(fed.OneNorm(), sgd), keeping_variates(sgd)["server"]
    state = method.init(KEY, fed.in_float64(fed.variables_of(fed.OneNorm())), len(SIZES))
    _, uploads = fed.one_by_one(method, state, fed.batches_of(SIZES), KEY)
    # A client weighs its part itself: by its number of samples, which the sum of weights divides.
    parts = [weighted_part(server, float(upload.size), upload) for upload in uploads]
    flat = [np.asarray(ravel_pytree(part)[0]) for part in parts]
    fixed_point = [np.round(x * 2.0**BITS).astype(np.int64).view(np.uint64) for x in flat]
    seen = [x.copy() for x in fixed_point]
    for i, j in itertools.combinations(range(len(SIZES)), 2):
        random = np.random.Generator(np.random.PCG64([7, i, j]))
        mask = random.integers(0, 2**64, seen[0].size, np.uint64)
        seen[i] += mask
        seen[j] -= mask
    for plain, hidden in zip(fixed_point, seen, strict=True):
        assert (plain != hidden).all()
    total = np.sum(seen, axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(total, np.sum(fixed_point, axis=0, dtype=np.uint64))
    sums = ravel_pytree(parts[0])[1](jnp.asarray(total.view(np.int64) / 2.0**BITS))
    together = fed.stacked(uploads)
    expected = sum_uploads(server, jnp.asarray(SIZES, float), together)
    fed.assert_close(sums, expected, 1e-12, 2.0**-BITS * len(SIZES))
    after, finite = conclude(server, state, sums, jnp.ones(3, bool), 3)
    assert finite
    expected = method.server(state, together)
    fed.assert_close((after.shared, after.server), (expected.shared, expected.server), 1e-12, 2e-10)
