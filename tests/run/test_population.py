"""Clients whose own parts are in the host's memory: the same numbers; test_power_cut.py kills."""

import functools

import jax
import numpy as np
import pytest

import runs
from cohorts import KEY, NAMES, method_of, rows_of, unequal_batches
from federations import MapNet, assert_close, variables_of
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.federation import global_variables, put_rows, take_rows
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.training import population, rounds
from fedjax_bn.training.population import PopulationState

take, put_back = jax.jit(take_rows), jax.jit(put_rows)
EVERYBODY = np.arange(4, dtype=np.int32)
FAST = "fedbn, remembering"  # which has all three parts


def on_host(state):
    """What `start_population` makes, of a state with a row a client."""
    rows = {part: jax.tree.map(np.array, getattr(state, part)) for part in population.PARTS}
    one = jax.tree.map(lambda x: x[:1], state.personal)
    common = state._replace(weights=np.ones(1), personal=one, memory=(), weighing=())
    return PopulationState(common, rows, EVERYBODY, np.zeros(4, bool))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in NAMES]
)
def test_rounds_of_rows_on_the_host_are_those_of_rows_on_the_device(x64, name):
    """Two overlapping cohorts; in the second a client sits out."""
    method = method_of(name)
    variables = jax.tree.map(lambda x: np.asarray(x, float), variables_of(MapNet()))
    init = jax.jit(method.init, static_argnums=2)
    state = jax.device_get(init(KEY, variables, 4))
    stored, common_round = on_host(state), jax.jit(method.round)
    cohort_round = jax.jit(functools.partial(rounds.cohort_round, method, 4, 2))
    for client, present in (([2, 0], [1, 1, 1, 1]), ([0, 3], [1, 1, 1, 0])):
        client = np.array(client, np.int32)
        batches = rows_of(unequal_batches(np.array(present, bool)), client)
        common, rows, told = cohort_round(stored.state, stored.rows_of(client), batches, KEY)
        trained = np.flatnonzero(np.isfinite(told["loss"]))
        stored.put_rows(client[trained], jax.tree.map(lambda x, t=trained: np.asarray(x)[t], rows))
        stored = PopulationState(common, stored.rows, client, stored.trained)

        cohort, expected = common_round(take(state, client), batches, KEY)
        state = jax.device_get(put_back(state, cohort, client))
        np.testing.assert_allclose(told["loss"], expected["loss"], rtol=1e-12)
    expected = {part: getattr(state, part) for part in population.PARTS}
    assert_close(stored.rows, expected, rtol=1e-12, atol=1e-12)
    assert stored.trained.tolist() == [True, False, True, False]
    assert_close(stored.state.server, state.server, rtol=1e-12, atol=1e-12)
    assert_close(global_variables(stored), global_variables(state), rtol=1e-12, atol=1e-12)


@pytest.fixture
def tiny(monkeypatch):
    runs.install(monkeypatch)


TOLD = {"share": "all_but_batch_norm", "validate_with": "global", "eval_also": ("train_loss",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "scaffold", "participation": "uniform:dropout=0.3", "eval_clients": 3},
        {"method": "scaffold"} | TOLD,
        {"method": "perfedavg", "personalize_samples": 3},
        {"local_selection": 2, "weigh": "uniform"},
    ],
)
def test_rows_on_the_host_have_the_numbers_of_the_device_or_of_two(tiny, tmp_path, changes):
    """Three of four clients, so that on two devices a row is padding."""
    changes |= {"target": "", "clients_per_round": 3, "rounds": 3}
    records = []
    for place, devices in (("device", 1), ("host", 1), ("host", 2)):
        folder = tmp_path / f"{place}{devices}"
        runs.run(folder, population=place, mesh__clients=devices, **changes)
        records.append([runs.without_times(line) for line in runs.lines(folder)])
    for others in records[1:]:
        assert_close(others, records[0], rtol=1e-5)


def test_rows_on_the_host_allow_no_ensemble(tiny, tmp_path):
    changes = {"clients_per_round": 2, "adaptations": ("running", "ensemble")}
    with pytest.raises(ConfigError, match="'ensemble'"):
        runs.run(tmp_path / "run", population="host", **changes)


def test_a_weighing_rule_begins_on_the_host_as_on_the_device(tiny):
    def first_memory(**changes):
        experiment, _, begin = prepare(runs.config(clients_per_round=2, **changes), traced=False)
        return population.start_population(experiment, begin)()

    rule = {"weigh": "generalization_adjustment"}
    on_the_host = first_memory(population="host", **rule).rows["weighing"]
    assert_close(on_the_host, first_memory(population="device", **rule).weighing, rtol=0, atol=0)
