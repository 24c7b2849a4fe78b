"""The short path: arrays to accuracies, with the numbers of the command line."""

import types

import jax
import numpy as np
import optax
import pytest

import runs
from federations import assert_close, assert_equal
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP
from fedjax_bn.simulation import simulate
from fedjax_bn.task import confusion
from fedjax_bn.training.score_tables import comparison

OPTIONS = {"rounds": 3, "batch_size": 8, "eval_every": 1, "seed": 5, "statistics": "precise"}
ADAPTATIONS = ("running", "tsmobn:momentum=0.5")
METHOD = fedbn(MLP(num_classes=3), optax.sgd(0.05))


def arrays(names=("ant", "bee", "dog"), size=40):
    rng = np.random.Generator(np.random.PCG64(3))
    parts = (runs.split(rng, size, shift) for shift in range(len(names)))
    return {name: (p.images, p.labels) for name, p in zip(names, parts, strict=True)}


def simulated(clients, **changes):
    """Two clients, and "dog" unseen."""
    clients = dict(clients)
    options = OPTIONS | {"adaptations": ADAPTATIONS, "show_progress": False} | changes
    unseen = {"dog": clients.pop("dog")}
    return simulate(METHOD, clients=clients, unseen=unseen, **options)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a user's callback saw, which adds a metric of the state, and the result."""
    seen = []

    def on_round_end(round, state, metrics):
        seen.append(round)
        metrics["largest"] = float(max(abs(x).max() for x in jax.tree.leaves(state.shared)))

    callback = types.SimpleNamespace(on_round_end=on_round_end)
    folder = tmp_path_factory.mktemp("profiled")
    result = simulated(arrays(), callbacks=[callback], profile=(2, folder))
    assert [*folder.rglob("*.xplane.pb")]
    return seen, result


def test_it_gives_the_numbers_of_the_command_line_on_the_same_data(result, tmp_path):
    columns = {
        f"{name}__{kind}": array
        for name, pair in arrays().items()
        for kind, array in zip(("images", "labels"), pair, strict=True)
    }
    np.savez(tmp_path / "own.npz", **columns)
    changes = {"method": "fedbn", "adaptations": ADAPTATIONS, "optimizer__learning_rate": 0.05}
    changes |= {"data__name": "npz", "data__path": str(tmp_path / "own.npz")}
    changes |= {"checkpoint_every": 50, "compilation_cache": "", "mesh__clients": 0}
    summary = runs.run(tmp_path / "run", **OPTIONS | changes)
    seen, ours = result
    for key in ("accuracy", "last_round", "selected_round", "measures"):
        assert ours.summary[key] == summary[key]
    assert seen == [record["round"] for record in ours.history] == [1, 2, 3]
    assert all(record["largest"] > 0 for record in ours.history)


def test_a_clients_predictions_give_its_accuracy(result):
    _, ours = result
    images, labels = arrays()["dog"]
    adapted = ours.predict(images, adaptation="tsmobn:momentum=0.5")
    np.testing.assert_allclose(adapted.sum(1), 1, rtol=1e-5)
    right = 100 * (ours.predict(images).argmax(1) == labels).mean()
    np.testing.assert_allclose(right, ours.accuracy["unseen"]["dog"]["running"], rtol=1e-6)
    matrix = confusion(ours.predict(images), labels)
    np.testing.assert_allclose(100 * matrix.trace() / matrix.sum(), right)
    assert matrix.sum(1).tolist() == np.bincount(labels, minlength=3).tolist()
    assert "dog [running]" in str(ours)
    with pytest.raises(ValueError, match=r"'an' is unknown.*ant"):
        ours.predict(images, client="an")


CLASSES = np.arange(4) % 2
BYTES = np.random.default_rng(0).integers(0, 256, (4, 8, 9, 3))
IMAGES, LABELS = arrays()["ant"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"clients": {}}, "no domains"),
        ({"clients": {"a": {"training": (1, 2)}}}, "'training'.*train, validation"),
        ({"unseen": arrays(("ant",))}, "'ant'"),
        ({"adaptations": ["tsmobm"]}, "tsmobn"),
        ({"clients": {"a": (np.zeros((4, 6), np.float32), -np.ones(4, int))}}, "label -1"),
        ({"clients": {"a": (np.zeros((4, 3, 8, 9), np.uint8), CLASSES)}}, "moveaxis"),
        ({"clients": {"a": (BYTES.astype(np.float32), CLASSES)}}, "numbers of bytes"),
        ({"unseen": {"late": (IMAGES, LABELS + 1)}}, "'late' has label 3.* 3 outputs"),
    ],
)
def test_what_does_not_suit_is_refused_before_anything_compiles(changes, match):
    with pytest.raises(ValueError, match=match):
        simulate(METHOD, **{"clients": arrays()} | OPTIONS | changes)


def test_further_seeds_compile_nothing_and_are_those_of_single_calls(result):
    """Other seeds and samples, of the same number, use the programs of the first call."""
    reversed_arrays = {name: (x[::-1], y[::-1]) for name, (x, y) in arrays().items()}
    with runs.compilations() as compiled:
        several = simulated(reversed_arrays, seed=6, seeds=3)
        last = simulated(reversed_arrays, seed=8)
    assert compiled == []
    assert several.history != result[1].history
    assert_equal(several.seeds[2].state, last.state)
    assert several.seeds[2].accuracy == last.accuracy
    assert_equal(several.state, several.seeds[0].state)
    values = [seed.accuracy["unseen"]["dog"]["running"] for seed in several.seeds]
    mean, deviation = np.mean(values), np.std(values, ddof=1)
    np.testing.assert_allclose(several.accuracy["unseen"]["dog"]["running"], mean)
    np.testing.assert_allclose(several.deviation["unseen"]["dog"]["running"], deviation)
    assert f"{mean:.1f} ({deviation:.1f})" in str(several)
    assert several.deviation["internal"].keys() == {"ant", "bee", "mean"}


def test_side_by_side_is_one_after_another_and_a_callback_sees_no_padding():
    """Three clients on the two devices that tests have, of which one has a row of padding."""
    clients = arrays(("ant", "bee", "cow", "dog"))
    unseen = {"dog": clients.pop("dog")}
    rows = []

    def on_round_end(round, state, metrics):
        leaf = jax.tree.leaves(state.personal)[0]
        rows.append((len(leaf), len(leaf.sharding.device_set)))

    results = []
    auto, alone = (
        fedbn(MLP(num_classes=3), optax.sgd(0.05), clients=way) for way in ("auto", "map")
    )
    for method in (auto, auto, alone):
        options = OPTIONS | {"adaptations": ADAPTATIONS, "unseen": unseen}
        callback = types.SimpleNamespace(on_round_end=on_round_end)
        results.append(simulate(method, clients=clients, callbacks=[callback], **options))
    assert rows == [(3, 1)] * 9
    assert_equal(results[0].state, results[1].state)
    assert_close(results[0].state, results[2].state, rtol=1e-4, atol=1e-6)
    assert results[0].accuracy == results[2].accuracy


def test_an_adaptation_that_a_baseline_does_not_serve_is_a_dash():
    scores = {
        "internal": {"ant": 1.0, "mean": 1.0},
        "unseen": {"dog": {"running": 5.0, "own": 6.0}},
    }
    baseline = {**scores, "unseen": {"dog": {"running": 4.0}}}
    rows = [[{"method": "a", "accuracy": scores}], [{"method": "b", "accuracy": baseline}]]
    assert comparison(rows).splitlines()[-1].split() == ["b", "1.0", "1.0", "4.0", "-"]
