"""A method is a client and a server, and a round is over a cohort: the same numbers every way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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


@pytest.mark.slow
def test_sums_of_what_clients_weigh_themselves_are_all_that_a_server_needs(x64):
    """So that masks which cancel in a sum may hide each part (Bonawitz et al., CCS 2017)."""
    sgd, sizes = optax.sgd(0.1), (6, 9, 4)
    method, server = scaffold(fed.OneNorm(), sgd), keeping_variates(sgd)["server"]
    state = fed.begun(method, KEY, fed.in_float64(fed.variables_of(fed.OneNorm())), len(sizes))
    _, uploads = fed.one_by_one(method, state, fed.batches_of(sizes), KEY)
    # A client weighs its part by its number of samples, which the sum of weights divides.
    parts = [weighted_part(server, float(upload.size), upload) for upload in uploads]
    sums, together = jax.tree.map(lambda *rows: sum(rows), *parts), fed.stacked(uploads)
    fed.assert_close(sums, sum_uploads(server, jnp.asarray(sizes, float), together), 1e-12)
    after, finite = conclude(server, state, sums, jnp.ones(3, bool), 3)
    assert finite
    expected = method.server(state, together)
    fed.assert_close((after.shared, after.server), (expected.shared, expected.server), 1e-12)
