"""The short path: arrays to accuracies, with the numbers of the command line."""

from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

import runs
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP
from fedjax_bn.run import train
from fedjax_bn.run.config import base
from fedjax_bn.simulation import simulate


def arrays(names=("ant", "bee", "dog"), size=40):
    rng = np.random.Generator(np.random.PCG64(3))
    return {
        name: (np.asarray(part.images), np.asarray(part.labels))
        for shift, name in enumerate(names)
        for part in [runs.split(rng, size, shift)]
    }


OPTIONS = {"rounds": 3, "batch_size": 8, "eval_every": 1, "seed": 5, "show_progress": False}
ADAPTATIONS = ("running", "tsmobn:momentum=0.5")


CLASSES = np.arange(4) % 2
BYTES = np.random.default_rng(0).integers(0, 256, (4, 8, 9, 3))


def counted_from_1():
    ((images, labels),) = arrays(("ant",)).values()
    return images, labels + 1


class Records(NamedTuple):
    """A user's callback: it sees rounds, and adds a metric of the state."""

    seen: list

    def on_round_end(self, round, state, metrics):
        self.seen.append(round)
        metrics["largest"] = float(max(abs(x).max() for x in jax.tree.leaves(state.shared)))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "profiled"


@pytest.fixture(scope="module")
def result(profiled):
    clients, records = arrays(), []
    method = fedbn(MLP(num_classes=3), optax.sgd(0.05))
    unseen = {"dog": clients.pop("dog")}
    return records, simulate(
        method,
        clients=clients,
        unseen=unseen,
        adaptations=ADAPTATIONS,
        callbacks=[Records(records)],
        profile=(2, profiled),
        **OPTIONS,
    )


def test_it_gives_the_numbers_of_the_command_line_on_the_same_data(result, tmp_path):
    columns = [
        {f"{name}__images": images, f"{name}__labels": labels}
        for name, (images, labels) in arrays().items()
    ]
    np.savez(tmp_path / "own.npz", **(columns[0] | columns[1] | columns[2]))
    config = base()
    config.update({k: v for k, v in OPTIONS.items() if k != "show_progress"})
    config.update(method="fedbn", model="MLP", target="dog", adaptations=ADAPTATIONS)
    config.mesh.clients = 1
    config.data.name, config.data.path = "npz", str(tmp_path / "own.npz")
    config.optimizer.learning_rate, config.compilation_cache = 0.05, ""
    summary = train.run(config, tmp_path / "run", say=lambda text: None)
    records, ours = result
    for key in ("accuracy", "last_round", "selected_round", "measures"):
        assert ours.summary[key] == summary[key]
    assert records == [record["round"] for record in ours.history] == [1, 2, 3]
    assert all(record["largest"] > 0 for record in ours.history)


def test_a_clients_predictions_give_its_accuracy(result):
    _, ours = result
    images, labels = arrays()["dog"]
    found = ours.predict(images, adaptation="tsmobn:momentum=0.5")
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    right = 100 * (ours.predict(images).argmax(1) == labels).mean()
    np.testing.assert_allclose(right, ours.accuracy["unseen"]["dog"]["running"], rtol=1e-6)
    matrix = ours.confusion(images, labels)
    np.testing.assert_allclose(100 * matrix.trace() / matrix.sum(), right)
    assert matrix.sum(1).tolist() == np.bincount(labels, minlength=3).tolist()
    assert "dog [running]" in str(ours)
    with pytest.raises(ValueError, match=r"client 'an' is unknown.*ant"):
        ours.predict(images, client="an")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": {}}, "no domains"),
        ({"clients": {"a": {"training": (1, 2)}}}, "part 'training'; parts are train, validation"),
        ({"unseen": arrays(("ant",))}, "'ant' is both a client and unseen"),
        ({"adaptations": ["tsmobm"]}, "tsmobn"),
        ({"clients": {"a": (np.zeros((4, 6), np.float32), -np.ones(4, int))}}, "label -1"),
        (
            {"clients": {"a": (np.zeros((4, 3, 8, 9), np.uint8), CLASSES)}},
            r"moveaxis\(images, 1, -1",
        ),
        ({"clients": {"a": (BYTES.astype(np.float32), CLASSES)}}, "numbers of bytes"),
        ({"unseen": {"late": counted_from_1()}}, "'late' has label 3.* 3 outputs"),
    ],
)
def test_what_does_not_suit_is_refused_before_anything_compiles(changes, said):
    given = {"clients": arrays()} | OPTIONS | changes
    with pytest.raises(ValueError, match=said):
        simulate(fedbn(MLP(num_classes=3), optax.sgd(0.05)), **given)


def test_a_second_call_with_the_same_method_and_shapes_compiles_nothing(result):
    """Other seeds and samples, of the same number, use the programs of the first call."""
    names = []

    def count(event, seconds, **rest):
        if event.endswith("backend_compile_duration"):
            names.append(event)

    method, clients = result[1].method, arrays()
    unseen = {"dog": clients.pop("dog")}
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        again = simulate(
            method,
            clients={
                name: (images[::-1], labels[::-1]) for name, (images, labels) in clients.items()
            },
            unseen=unseen,
            adaptations=ADAPTATIONS,
            **OPTIONS | {"seed": 6},
        )
    finally:
        if hasattr(jax.monitoring, "unregister_event_duration_listener"):  # jax 0.7 has none
            jax.monitoring.unregister_event_duration_listener(count)
    assert names == []
    assert again.history != result[1].history
