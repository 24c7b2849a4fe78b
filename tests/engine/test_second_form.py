"""A method is a client and a server, and a round is over a cohort: the same numbers every way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cohorts import KEY, NAMES, PRESENT, SGD, method_of, rows_of, unequal_batches
from federations import (
    MapNet,
    assert_close,
    batches_of,
    in_float64,
    one_by_one,
    stacked,
    variables_of,
)
from fedjax_bn.federation import put_rows, take_rows, traffic
from method_table import METHODS


def after_one_round(method):
    variables = in_float64(variables_of(MapNet()))
    state = jax.jit(method.init, static_argnums=2)(KEY, variables, 4)
    return method.round(state, unequal_batches(), KEY)[0]


take, put_back = jax.jit(take_rows), jax.jit(put_rows)


# A rule and an optimizer that remember, variates that are sent, risks and masks: all the others
# have a part of their form, and no state of another kind.
OFTEN = ("fedbn, remembering", "scaffold", "fedcd")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in NAMES]
)
def test_clients_one_by_one_and_the_server_are_the_round_and_so_is_a_cohort(x64, name):
    """In the second round a client sits out; the cohort holds the others, and a row of padding."""
    method = method_of(name)
    state, some = after_one_round(method), unequal_batches(PRESENT)
    after, uploads = one_by_one(method, state, some, KEY)
    alone = method.server(after, stacked(uploads))
    if method.adding:
        running = method.adding.begin(4, uploads[0])
        for upload in uploads:
            running = method.adding.add(running, upload)
        assert_close(method.adding.end(after, running)[0], alone, rtol=1e-12, atol=1e-12)

    client = jnp.asarray([3, 0, 2, 4], jnp.int32)
    cohort, seen = method.round(take(state, client), rows_of(unequal_batches(), client), KEY)
    cohort = put_back(state, cohort, client)

    expected, metrics = method.round(state, some, KEY)
    assert_close(alone, expected, rtol=1e-12, atol=1e-12)
    assert_close(cohort, expected, rtol=1e-12, atol=1e-12)
    for key in ("loss", "risk", "weights"):
        np.testing.assert_allclose(seen[key][:3], metrics[key][client[:3]], rtol=1e-12)


def test_uploads_may_come_in_any_order_and_from_some_clients_only(x64):
    method = method_of("fedbn, remembering")
    state = after_one_round(method)
    after, uploads = one_by_one(method, state, unequal_batches(), KEY)
    in_order = method.server(after, stacked(uploads))
    turned = method.server(after, stacked(uploads[::-1]))
    assert_close(turned, in_order, rtol=1e-12, atol=1e-14)
    some = method.server(after, stacked([uploads[2], uploads[0]]))
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
    assert_close(moves[1], jax.tree.map(lambda move: move / 2, moves[0]), rtol=1e-9, atol=1e-15)


def test_traffic_is_what_travels():
    """FedBN sends no batch norm, SCAFFOLD a variate each way, FedAdam's moments stay."""
    variables, one = variables_of(MapNet()), {k: v[0] for k, v in batches_of((4,)).items()}
    sizes = {k: sum(x.nbytes for x in jax.tree.leaves(v)) for k, v in variables.items()}
    sent = {}
    for name in ("fedavg", "fedadam", "fedbn", "scaffold", "singleset"):
        method = METHODS[name](MapNet(), SGD)
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
