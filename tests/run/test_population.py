"""Clients whose own parts are in the host's memory: the same numbers, and safe from kills."""

import functools

import jax
import numpy as np
import pytest
import test_power_cut as cut

import runs
from cohorts import KEY, NAMES, method_of, rows_of, unequal_batches
from federations import MapNet, assert_close, variables_of
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.federation import global_variables, put_rows, take_rows
from fedjax_bn.run import train
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.training import checkpoint, population, rounds
from fedjax_bn.training.population import PopulationState

take, put_back = jax.jit(take_rows), jax.jit(put_rows)
EVERYBODY = np.arange(4, dtype=np.int32)
FAST = ("scaffold", "fedbn, remembering")


def on_host(state):
    """What `start_population` makes, of a state with a row a client."""
    rows = {part: jax.tree.map(np.array, getattr(state, part)) for part in population.PARTS}
    one = jax.tree.map(lambda x: x[:1], state.personal)
    common = state._replace(weights=np.ones(1), personal=one, memory=(), weighing=())
    return PopulationState(common, rows, EVERYBODY, np.zeros(4, bool))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
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


KEYS = {"target": "", "clients_per_round": 2}


def assert_same_numbers(told: list[list[dict]]) -> None:
    for one, other in zip(*told, strict=True):
        assert sorted(one) == sorted(other)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


@pytest.fixture
def tiny(monkeypatch):
    runs.install(monkeypatch)


THREE = {"personalize_samples": 3}
ODD = {"target": "", "clients_per_round": 3, "population": "host"}


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        pytest.param(
            (2, 0),
            {"method": "scaffold", "participation__dropout": 0.3, "eval_clients": 3},
            marks=pytest.mark.slow,  # the next test has a fast one
        ),
        pytest.param((2, 0), {"method": "perfedavg"} | THREE, marks=pytest.mark.slow),
        pytest.param((2, 0), {"local_selection": 2, "weigh": "uniform"}, marks=pytest.mark.slow),
    ],
)
def test_on_several_devices_the_numbers_are_those_of_one(tiny, tmp_path, devices, changes):
    """Three of four clients, so that a row is padding."""
    told = []
    for clients, batch in ((1, 0), devices):
        folder, where = tmp_path / f"{clients}", {"mesh__clients": clients, "mesh__batch": batch}
        runs.run(folder / f"{batch}", rounds=3, **ODD, **where, **changes)
        told.append([runs.without_times(x) for x in runs.lines(folder / f"{batch}")])
    assert_same_numbers(told)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A straight run, what a disk may hold at any moment, and all rows at its checkpoints."""
    folder, known = tmp_path_factory.mktemp("population") / "run", {}
    real, disk = checkpoint.save, cut.Disk(folder)

    def save(manager, number, stored):
        known[number] = everything_of(stored)
        real(manager, number, stored)
        manager.wait()

    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        patch.setattr(checkpoint, "save", save)
        cut.watch(patch, disk)
        runs.run(folder, **KILLED)
        disk.record()
    return folder, list(disk.images.values()), known


KILLED = KEYS | {
    "population": "host",
    "rounds": 4,
    "method": "scaffold",
    "share": "all_but_batch_norm",
    "validate_with": "global",
    "eval_train_loss": True,
}


def everything_of(stored):
    """The common part and the rows of all clients."""
    return jax.tree.map(np.array, (stored.state, stored.rows, stored.trained))


@pytest.mark.slow
def test_a_run_from_the_host_tells_the_numbers_of_one_on_the_device(tiny, recorded, tmp_path):
    runs.run(tmp_path, **KILLED | {"population": "device"})
    told = [[runs.without_times(x) for x in runs.lines(f)] for f in (tmp_path, recorded[0])]
    assert_same_numbers(told)
    assert "train_loss" in told[0][-1]


def first_stored():
    """What a run of `KILLED` begins with."""
    experiment, _, begin = train.prepare(runs.config(**KILLED))
    return population.start_population(experiment, begin)


def last_of_each_checkpoint(images):
    """For each set of whole checkpoints, the last image that has it: with the most newer rows."""
    last = {
        tuple(sorted(name for name in image if name.endswith(checkpoint.CHECKSUMS))): image
        for image in images
    }
    return list(last.values())


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_killed_or_cut_off_at_any_write_the_rows_are_those_of_the_checkpoint(
    tiny, recorded, tmp_path, every
):
    _, images, known = recorded
    assert len(images) > 20
    reached = set()
    for number, image in enumerate(images if every else last_of_each_checkpoint(images)):
        folder = cut.lay(image, tmp_path / str(number))
        stored, records = train.resume(folder, first_stored())
        done = int(stored.round)
        assert len(records) == done
        if done:
            jax.tree.map(np.testing.assert_array_equal, everything_of(stored), known[done])
        reached.add(done)
    assert reached == {0, 2, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "clients_per_round"),
        ({"clients_per_round": 2, "adaptations": ("running", "ensemble")}, "'ensemble'"),
    ],
)
def test_what_rows_on_the_host_do_not_allow_is_refused(tiny, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        runs.run(tmp_path / "run", population="host", **changes)


def test_a_weighing_rule_begins_on_the_host_as_on_the_device(tiny):
    def first_memory(**changes):
        experiment, _, begin = prepare(runs.config(clients_per_round=2, **changes), traced=False)
        return population.start_population(experiment, begin)()

    rule = {"weigh": "generalization_adjustment"}
    on_the_host = first_memory(population="host", **rule).rows["weighing"]
    assert_close(on_the_host, first_memory(population="device", **rule).weighing, rtol=0, atol=0)
