"""Clients whose own parts are on the disk: the same numbers, and safe from kills."""

import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import test_power_cut as cut

import runs
from cohorts import KEY, NAMES, method_of, rows_of, unequal_batches
from federations import MapNet, assert_close, variables_of
from fedjax_bn.arguments.errors import CheckpointError, ConfigError
from fedjax_bn.federation import global_variables, put_rows, take_rows
from fedjax_bn.report.page import write_report
from fedjax_bn.run import finished_run as evaluate_finished
from fedjax_bn.run import train
from fedjax_bn.run.experiment import start
from fedjax_bn.run.experiment.start import prepare
from fedjax_bn.training import checkpoint, population, rounds
from fedjax_bn.training.mesh import form_on
from fedjax_bn.training.population import UNTOUCHED, RowStore

take, put_back = jax.jit(take_rows), jax.jit(put_rows)
EVERYBODY = np.arange(4, dtype=np.int32)
FAST = ("scaffold", "fedbn, remembering")


def form(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def held_by(state, folder):
    """What `population.start_held` makes, of a state with a row a client."""
    first = {part: jax.tree.map(lambda x: x[0], getattr(state, part)) for part in population.PARTS}
    store = RowStore(folder, form(first), 4)
    one = jax.tree.map(lambda x: x[:1], state.personal)
    common = state._replace(weights=np.ones(1), personal=one, memory=(), weighing=())
    return population.Held(common, first, EVERYBODY, np.full(4, UNTOUCHED, np.uint8), store)


def written(store, slots, client, rows):
    """The slots of all clients after some have new rows."""
    slots = store.new_slots(slots, client)
    store.write(slots, client, rows)
    return slots


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_rounds_from_the_store_are_those_of_rows_on_the_device(x64, tmp_path, name):
    """Two overlapping cohorts; in the second a client sits out."""
    method = method_of(name)
    variables = jax.tree.map(lambda x: np.asarray(x, float), variables_of(MapNet()))
    init = jax.jit(method.init, static_argnums=2)
    state = jax.device_get(init(KEY, variables, 4))
    held, common_round = held_by(state, tmp_path), jax.jit(method.round)
    stored_round = jax.jit(functools.partial(rounds._stored_round, method, 4, 2))
    for client, present in (([2, 0], [1, 1, 1, 1]), ([0, 3], [1, 1, 1, 0])):
        client = np.array(client, np.int32)
        batches = rows_of(unequal_batches(np.array(present, bool)), client)
        rows = population.rows_of_clients(held, client)
        common, rows, told = stored_round(held.state, rows, batches, KEY)
        trained = np.flatnonzero(np.isfinite(told["loss"]))
        rows = jax.tree.map(lambda x, trained=trained: np.asarray(x)[trained], rows)
        slots = written(held.store, held.slots, client[trained], rows)
        held = population.Held(common, held.first, client, slots, held.store)

        cohort, expected = common_round(take(state, client), batches, KEY)
        state = jax.device_get(put_back(state, cohort, client))
        np.testing.assert_allclose(told["loss"], expected["loss"], rtol=1e-12)
    ours = population.rows_of_clients(held, EVERYBODY)
    theirs = {part: getattr(state, part) for part in population.PARTS}
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_close(held.state.server, state.server, rtol=1e-12, atol=1e-12)
    assert_close(global_variables(held), global_variables(state), rtol=1e-12, atol=1e-12)


KEYS = {"target": "", "clients_per_round": 2}


def both_ways(folder: Path, **changes) -> list[list[dict]]:
    """The records of a run with its rows on the device, and on the disk."""
    for where in ("device", "disk"):
        runs.run(folder / where, population=where, **KEYS, **changes)
    return [
        [runs.without_times(line) for line in runs.lines(folder / w)] for w in ("device", "disk")
    ]


def assert_same_numbers(told: list[list[dict]]) -> None:
    for one, other in zip(*told, strict=True):
        assert sorted(one) == sorted(other)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


@pytest.fixture
def tiny(monkeypatch):
    runs.install(monkeypatch)


def test_what_the_server_sends_is_of_all_clients_wherever_their_rows_lie(tiny):
    config = runs.config(method="copa", population="disk", **KEYS)
    state = jax.eval_shape(prepare(config, traced=False)[2])
    assert len(state.server.sent["kernel"]) == 4
    assert {len(leaf) for leaf in jax.tree.leaves(state.personal)} == {1}


THREE = {"personalize_samples": 3}
ODD = {"target": "", "clients_per_round": 3, "population": "disk"}


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
        start = population.start_held(experiment, begin, tmp_path)
        with checkpoint.open_folder(tmp_path / "checkpoints", keep=2) as manager:
            if devices == 1:
                held = checkpoint.restore(manager, form_on(jax.eval_shape(start), None))
            else:
                held = start()
                held, metrics = rounds.open_rounds(experiment, keys, held).compile(held)(held)
                assert np.isfinite(metrics["loss"]).sum() == 3
                checkpoint.save(manager, 1, held)
                checkpoint.settle(manager)
        assert len(held.round.sharding.device_set) == devices
        found.append(everything_of(held))
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
    real, write, disk = checkpoint.save, RowStore.write, cut.Disk(folder)

    def save(manager, number, held):
        known[number] = everything_of(held)
        real(manager, number, held)
        manager.wait()

    def one_by_one(store, slots, client, rows):
        """A kill may come between the rows; each is written as a whole, by tensorstore."""
        for k in range(len(client)):
            write(store, slots, client[k : k + 1], jax.tree.map(lambda x, k=k: x[k : k + 1], rows))
            disk.record()

    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        patch.setattr(cut, "PARTS", (*cut.PARTS, "population"))
        patch.setattr(checkpoint, "save", save)
        patch.setattr(RowStore, "write", one_by_one)
        cut.watch(patch, disk)
        runs.run(folder, **KILLED)
        disk.record()
    return folder, list(disk.images.values()), known


KILLED = KEYS | {
    "population": "disk",
    "rounds": 4,
    "method": "scaffold",
    "share": "all_but_batch_norm",
    "validate_with": "global",
    "eval_train_loss": True,
}


def everything_of(held):
    """The common part and the rows of all clients."""
    return jax.tree.map(np.asarray, (held.state, population.rows_of_clients(held, EVERYBODY)))


@pytest.mark.slow
def test_a_run_from_the_disk_tells_the_numbers_of_one_on_the_device(tiny, recorded, tmp_path):
    runs.run(tmp_path, **KILLED | {"population": "device"})
    told = [[runs.without_times(x) for x in runs.lines(f)] for f in (tmp_path, recorded[0])]
    assert_same_numbers(told)
    assert "train_loss" in told[0][-1]
    assert (recorded[0] / "population" / "personal" / "zarr.json").exists()
    assert not (tmp_path / "population").exists()


def first_held(folder):
    """What a run of `KILLED` in that folder begins with."""
    experiment, _, begin = train.prepare(runs.config(**KILLED))
    return population.start_held(experiment, begin, folder)


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
    assert len(images) > 50
    reached = set()
    for number, image in enumerate(images if every else last_of_each_checkpoint(images)):
        folder = cut.lay(image, tmp_path / str(number))
        held, records = train.resume(folder, first_held(folder))
        done = int(held.round)
        assert len(records) == done
        if done:
            jax.tree.map(np.testing.assert_array_equal, everything_of(held), known[done])
        reached.add(done)
    assert reached == {0, 2, 4}


@pytest.mark.slow
def test_going_on_from_one_of_them_ends_with_the_same_bits(tiny, recorded, tmp_path):
    straight, images, known = recorded
    folder = cut.lay(images[len(images) * 2 // 3], tmp_path / "run")
    runs.run(folder, **KILLED)
    one, two = (list(map(runs.without_times, runs.lines(f))) for f in (folder, straight))
    assert one == two
    held, _ = train.resume(folder, first_held(folder))
    jax.tree.map(np.testing.assert_array_equal, everything_of(held), known[4])


def store_of(folder: Path, clients: int = 5) -> tuple[RowStore, dict]:
    like = {"personal": {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.int32)}}
    return RowStore(folder, form(like) | {"memory": ()}, clients), like["personal"]


def rows(value: float, count: int) -> dict:
    a = np.full((count, 2, 3), value, np.float32)
    return {"personal": {"a": a, "b": np.full(count, value, np.int32)}, "memory": ()}


def test_rows_that_a_checkpoint_names_stay_and_others_give_their_room(tmp_path):
    store, first = store_of(tmp_path)
    slots, saved = np.full(5, UNTOUCHED, np.uint8), []
    client = np.array([1, 3])
    for value in range(40):
        slots = written(store, slots, client, rows(value, 2))
        if value % 4 == 0:
            kind = "selected" if value % 8 else "latest"
            store.keep(kind, slots)
            saved.append((kind, value, slots))
        for kind, kept in (("latest", 3), ("selected", 2)):
            for _, known, named in [s for s in saved if s[0] == kind][-kept:]:
                found = store.read("personal", named, np.array([0, 3]), first)
                assert found["b"].tolist() == [0, known]
                np.testing.assert_array_equal(found["a"][1], np.full((2, 3), known, np.float32))
    again, _ = store_of(tmp_path)  # of a process that continues from these checkpoints
    for kind, _, named in saved[-6:]:
        again.keep(kind, named)
    for value in range(90, 99):
        written(again, slots, client, rows(value, 2))
        found = again.read("personal", saved[-2][2], np.array([1]), first)
        assert found["b"].tolist() == [saved[-2][1]]
    assert slots[[0, 2, 4]].tolist() == [UNTOUCHED] * 3
    assert slots.max(where=slots != UNTOUCHED, initial=0) < 6  # five checkpoints, and the new row
    assert not (tmp_path / "memory").exists()


def test_a_large_population_takes_the_disk_of_those_who_trained(tmp_path):
    store, _ = store_of(tmp_path, clients=1_000_000)
    slots = np.full(1_000_000, UNTOUCHED, np.uint8)
    written(store, slots, np.array([5, 400_000, 999_999]), rows(0.0, 3))
    assert len(list((tmp_path / "personal").glob("c.*"))) == 3
    assert store.taken_bytes() < 100_000


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "pipe"])
def test_a_damaged_row_is_named(tmp_path, damage):
    store, first = store_of(tmp_path / "population")
    slots = written(store, np.full(5, UNTOUCHED, np.uint8), np.array([2]), rows(3.0, 1))
    path = tmp_path / "population" / "personal" / "c.0.2.0"
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage != "gone":
        content[3] ^= 1
        path.write_bytes(content[:9] if damage == "short" else content)
    message = r"which the checkpoints in .* name \(.*c\.0\.2\.0.*put them back.* --workdir"
    with pytest.raises(CheckpointError, match=message):
        store.read("personal", slots, np.array([0, 2]), first)


def test_rows_of_an_earlier_version_are_refused_in_one_sentence(tmp_path):
    store, first = store_of(tmp_path)
    (tmp_path / "personal.npy").write_bytes(b"rows")
    message = r"personal\.npy holds rows of clients in the form of an earlier version.*--workdir$"
    slots = written(store, np.full(5, UNTOUCHED, np.uint8), np.array([2]), rows(3.0, 1))
    assert store.read("personal", slots, np.array([1, 2]), first)["b"].tolist() == [0, 3]
    slots[0] = 1  # of an earlier version
    with pytest.raises(CheckpointError, match=message) as error:
        store.read("personal", slots, np.array([0, 2]), first)
    assert "\n" not in str(error.value)


def test_more_than_the_disk_has_is_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    usage = population.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(population.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = r"4 clients of scaffold, .* KB each, .* 1000 bytes free: .*--workdir.*remembers no"
    with pytest.raises(ConfigError, match=message):
        runs.run(tmp_path / "run", **KILLED)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "all 4 take part: lower clients_per_round"),
        (
            {"clients_per_round": 2, "adaptations": ("running", "ensemble")},
            "'ensemble', which holds the models of all clients",
        ),
    ],
)
def test_what_rows_on_the_disk_do_not_allow_is_refused(tiny, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        runs.run(tmp_path / "run", population="disk", **changes)


@pytest.mark.slow
def test_a_finished_population_is_evaluated_and_drawn(tiny, tmp_path):
    """A method with masks, whose records and pictures are of a round's cohort."""
    folder, keys = tmp_path / "run", KEYS | {"target": "dog", "clients_per_round": 2}
    summary = runs.run(folder, population="disk", method="fedcd", eval_every=3, **keys)
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


def test_a_weighing_rule_that_begins_differently_by_client_is_refused(tiny):
    config = runs.config(**KILLED)
    experiment, keys, _ = train.prepare(config)

    def init(key, variables, num_clients):
        state = experiment.method.init(key, variables, num_clients)
        return state._replace(weighing={"number": np.arange(num_clients)})

    method = experiment.method._replace(init=init)
    with pytest.raises(ConfigError, match="other memory for some clients"):
        start._check_rows_alike(experiment._replace(method=method), keys)
