"""Clients whose own parts are in the host's memory: the same numbers, and safe from kills."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import test_power_cut as cut

import runs
from cohorts import KEY, NAMES, method_of, rows_of, unequal_batches
from federations import MapNet, assert_close, variables_of
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.federation import global_variables, put_rows, take_rows
from fedjax_bn.report.page import write_report
from fedjax_bn.run import finished_run as evaluate_finished
from fedjax_bn.run import train
from fedjax_bn.run.experiment.start import prepare
from fedjax_bn.training import checkpoint, population, rounds
from fedjax_bn.training.mesh import form_on
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


def both_ways(folder: Path, **changes) -> list[list[dict]]:
    """The records of a run with its rows on the device, and on the host."""
    for where in ("device", "host"):
        runs.run(folder / where, population=where, **KEYS, **changes)
    return [
        [runs.without_times(line) for line in runs.lines(folder / w)] for w in ("device", "host")
    ]


def assert_same_numbers(told: list[list[dict]]) -> None:
    for one, other in zip(*told, strict=True):
        assert sorted(one) == sorted(other)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


@pytest.fixture
def tiny(monkeypatch):
    runs.install(monkeypatch)


def test_what_the_server_sends_is_of_all_clients_wherever_their_rows_lie(tiny):
    config = runs.config(method="copa", population="host", **KEYS)
    state = jax.eval_shape(prepare(config, traced=False)[2])
    assert len(state.server.sent["kernel"]) == 4
    assert {len(leaf) for leaf in jax.tree.leaves(state.personal)} == {1}


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
        pytest.param((1, 2), {}, marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_what_two_devices_trained_is_restored_on_one(tiny, tmp_path):
    found = []
    for devices in (2, 1):
        config = runs.config(mesh__clients=devices, **ODD)
        experiment, keys, begin = prepare(config, traced=False)
        start = population.start_population(experiment, begin)
        with checkpoint.open_folder(tmp_path / "checkpoints", keep=2) as manager:
            if devices == 1:
                stored = checkpoint.restore(manager, form_on(jax.eval_shape(start), None))
            else:
                stored = start()
                stored, metrics = rounds.open_rounds(experiment, keys, stored).compile(stored)(
                    stored
                )
                assert np.isfinite(metrics["loss"]).sum() == 3
                checkpoint.save(manager, 1, stored)
                checkpoint.settle(manager)
        assert len(stored.round.sharding.device_set) == devices
        found.append(everything_of(stored))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"local_selection": 2},
        *({"method": name} for name in ("perfedavg", "scaffold", "copa", "ditto", "fedrep")),
        {"method": "apfl", "local_selection": 2},
    ],
)
def test_so_does_what_adapts_selects_or_remembers(tiny, tmp_path, changes):
    assert_same_numbers(both_ways(tmp_path, personalize_samples=3, **changes))


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


@pytest.mark.slow
def test_going_on_from_one_of_them_ends_with_the_same_bits(tiny, recorded, tmp_path):
    straight, images, known = recorded
    folder = cut.lay(images[len(images) * 2 // 3], tmp_path / "run")
    runs.run(folder, **KILLED)
    one, two = (list(map(runs.without_times, runs.lines(f))) for f in (folder, straight))
    assert one == two
    stored, _ = train.resume(folder, first_stored())
    jax.tree.map(np.testing.assert_array_equal, everything_of(stored), known[4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "all 4 take part: lower clients_per_round"),
        (
            {"clients_per_round": 2, "adaptations": ("running", "ensemble")},
            "'ensemble'",
        ),
    ],
)
def test_what_rows_on_the_host_do_not_allow_is_refused(tiny, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        runs.run(tmp_path / "run", population="host", **changes)


@pytest.mark.slow
def test_a_finished_population_is_evaluated_and_drawn(tiny, tmp_path):
    """A method with masks, whose records and pictures are of a round's cohort."""
    folder, keys = tmp_path / "run", KEYS | {"target": "dog", "clients_per_round": 2}
    summary = runs.run(folder, population="host", method="fedcd", eval_every=3, **keys)
    request = evaluate_finished.Request(internal=True)
    result, _ = evaluate_finished.run(folder, request, say=lambda text: None)
    assert result["internal"]["own"] == pytest.approx(summary["accuracy"]["internal"])
    assert result["unseen"] == summary["accuracy"]["unseen"]
    write_report(folder)
    last = runs.lines(folder)[-1]
    with np.load(folder / "masks" / "0006.npz") as masks:
        took_part = [name for name, loss in last["loss"].items() if loss is not None]
        assert masks["clients"].tolist() == took_part
        norms = [np.abs(mask).sum() for mask in masks["features"]]
        np.testing.assert_allclose(last["mask_l1"]["mean"], np.mean(norms), rtol=1e-6)
        np.testing.assert_allclose(
            masks["features.mean"],
            sum(last["weights"][n] * m for n, m in zip(took_part, masks["features"], strict=True)),
            rtol=1e-5,
        )


def test_device_memory_does_not_grow_with_the_population(tiny):
    """The form of what a run restores has the clients' rows in NumPy, and all else on a device."""
    experiment, _, begin = prepare(runs.config(**KILLED), traced=False)
    start = population.start_population(experiment, begin)
    like = form_on(jax.eval_shape(start), None)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(like.rows))
    assert not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(like.state))
    state = start()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.rows))
    assert {len(leaf) for leaf in jax.tree.leaves(state.rows)} == {4}
