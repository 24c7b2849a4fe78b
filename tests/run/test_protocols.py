"""How clients predict, whose validation selects a round, and when a run stops."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split, whole
from fedjax_bn.data.sampling import validation_batches
from fedjax_bn.engine.images import standardize
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods.selection import validation_score
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.normalization.batch_instance import GATE
from fedjax_bn.run import train
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.model import MODELS
from fedjax_bn.state import Received
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.callbacks.checkpoints import Checkpoints, Lines
from fedjax_bn.training.callbacks.evaluation import Patience, Scores
from fedjax_bn.training.evaluation import evaluate
from fedjax_bn.training.evaluation.scoring import SplitBatches, score_clients
from fedjax_bn.training.experiment import Personalization
from fedjax_bn.training.loop import train as train_rounds
from fedjax_bn.training.records import have_trained, out_of_patience, select_round
from fedjax_bn.training.start import initial_variables


class Slope(nn.Module):
    """Two classes of images of two pixels: whether the first one is above the layer's mean."""

    num_classes: int = 2

    def setup(self):
        self.norm = BatchNorm()

    def features(self, images):
        return self.norm(images)[:, 0, 0]

    def classify(self, first):
        return jnp.concatenate([first, jnp.zeros_like(first)], 1)

    def __call__(self, images):
        return self.classify(self.features(images))


def slopes() -> Split:
    """20 images that fall or rise around 0, one of them far above 0.

    The sign of the first pixel tells all but that one, the sample's own statistics tell all.
    """
    labels = np.arange(20, dtype=np.int32) % 2
    first = 1 - 2 * labels.astype(np.float32)
    images = np.stack([first, -first], 1)[:, None, :, None]
    images[1] += 5
    return Split(images, labels)


def with_instance_norm(tree):
    """The tree with all gates at 0: nothing but the sample's own statistics."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key == GATE else leaf, tree
    )


def test_clients_of_bin_are_scored_by_their_gates_where_running_statistics_lose_one(monkeypatch):
    """One client has the slopes in every split; it also selects its best state by its gates."""
    client = Domain("one", *(slopes() for _ in range(3)))
    runs.install(monkeypatch, Dataset("tiny", 2, (client,), mean=(0.5,), std=(0.5,)))
    monkeypatch.setitem(MODELS, "Slope", Slope)
    keys = {"model": "Slope", "method": "fedig:gates=True", "target": "", "data__image_size": 1}
    built, _, start = train.prepare(runs.config(**keys))
    state = start()
    state = state._replace(personal=with_instance_norm(state.personal))
    data = SplitBatches([slopes()], 8).all_at_once()
    validation = row(validation_batches([slopes()], 8), 0)
    own = row(client_variables(state), 0)
    for rule, expected in ((built.method.statistics, 100), (None, 95)):
        scores = score_clients(built.model, built.prepare, 1, statistics=rule)(state, data)
        np.testing.assert_allclose(scores, [expected], rtol=1e-6)
        score = validation_score(built.model, built.prepare, statistics=rule)
        best = score(own, Received({}, {}, validation=validation))
        np.testing.assert_allclose(best, expected, rtol=1e-6)
    for samples in (0, 4):  # personal accuracy: the steps of rate 0 move running statistics only
        how = Personalization(samples, 0.0, 0) if samples else None
        changed = built._replace(evaluation=built.evaluation._replace(personalization=how))
        record = evaluate.evaluator(changed)(state)
        assert record["accuracy"] == record["validation"] == {"one": 100.0, "mean": 100.0}


@pytest.fixture
def fedbn_run(monkeypatch):
    """A run of FedBN on three clients, and a state in which no two have the same batch norm."""
    runs.install(monkeypatch)

    def prepared(**changes):
        built = experiment.build(runs.config(method="fedbn", adaptations=("running",), **changes))
        key = jax.random.key(0)
        state = built.method.init(key, initial_variables(built, key), 3)
        noisy = lambda x: x + 3 * jax.random.uniform(key, x.shape)  # noqa: E731
        personal = jax.tree.map(noisy, state.personal)
        return built, state._replace(personal=personal, weights=jnp.array([0.5, 0.25, 0.25]))

    return prepared


def row(tree, k):
    """One client's part of a tree."""
    return jax.tree.map(lambda leaf: leaf[k], tree)


def percent(model, variables, split: Split) -> float:
    logits = model.apply(variables, standardize()(jnp.asarray(split.images), np.float32))
    return 100 * float(np.mean(np.asarray(logits).argmax(-1) == split.labels))


def test_own_models_are_tested_and_those_that_never_trained_as_an_unseen_clients(fedbn_run):
    """The server validates with the aggregated model where the protocol says so: FedIG, A.2.

    The training loss is FedBN's, Fig. 3: `test` on the training data, after `communication`.
    """
    built, state = fedbn_run(eval_also=("train_loss",), eval_batch_size=7, validate_with="global")
    state = state._replace(weights=jnp.array([0.75, 0.0, 0.25]))
    evaluator = evaluate.evaluator(built)
    received, own = global_variables(state), client_variables(state)
    record, partly = evaluator(state), evaluator(state, np.array([True, False, True]))
    losses = record["train_loss"]
    for k, domain in enumerate(built.internal.domains):
        logits = np.asarray(built.model.apply(row(own, k), domain.train.images), np.float64)
        right = logits[np.arange(len(logits)), domain.train.labels]
        expected = (np.log(np.exp(logits).sum(1)) - right).mean()
        np.testing.assert_allclose(losses[domain.name], expected, rtol=1e-5)
        for name, model, data in (
            ("validation", received, domain.validation),
            ("accuracy", row(own, k), domain.test),
        ):
            expected = percent(built.model, model, data)
            np.testing.assert_allclose(record[name][domain.name], expected, rtol=1e-5)
        trained = domain.name != "bee"
        assert (record["accuracy"][domain.name] == partly["accuracy"][domain.name]) is trained
    np.testing.assert_allclose(losses["mean"], np.mean([losses[n] for n in runs.NAMES[:3]]))
    expected = percent(built.model, received, built.internal.domains[1].test)
    np.testing.assert_allclose(partly["accuracy"]["bee"], expected, rtol=1e-5)


def test_who_has_trained_is_told_by_losses_and_failures():
    rounds = [
        {"loss": {"a": 1.0, "b": None, "c": 2.0, "d": None}},
        {"loss": {"a": None, "b": None, "c": 2.0, "d": 3.0}, "not_finite": ["d"]},
        {"loss": {"a": None, "b": 0.5, "c": None, "d": None}},
    ]
    assert have_trained(rounds[:2], list("abcd")).tolist() == [True, False, True, False]
    assert have_trained(rounds, list("abcd")).tolist() == [True, True, True, False]


def validated(*means: float | None) -> list[dict]:
    """A record a round, with that mean validation accuracy or not evaluated."""
    return [
        {"round": number} | ({} if mean is None else {"accuracy": {}, "validation": {"mean": mean}})
        for number, mean in enumerate(means, start=1)
    ]


@pytest.mark.parametrize(
    ("means", "patience", "stops"),
    [
        ((50, 60, 60, 59), 2, True),  # as good is no improvement
        ((50, 60, 59, 61), 2, False),
        ((50, 40, 40, None), 2, False),  # not evaluated
        ((None, 50, None, 40), 2, True),
        ((50, 40, 30, 20), 0, False),
        ((), 3, False),
    ],
)
def test_patience_ends_so_many_rounds_behind_the_best_one(means, patience, stops):
    assert out_of_patience(validated(*means), patience) is stops


@pytest.mark.parametrize(
    ("means", "selected"),
    [
        ((None, 50, None, 60, 40), 4),
        ((None, 60, None, 60, 60), 2),  # the first of equals
        ((70, 60, 50), 1),
    ],
)
def test_the_round_with_the_best_mean_validation_accuracy_is_selected(means, selected):
    assert select_round(validated(*means)) == selected


KEYS = {"rounds": 14, "eval_every": 1, "checkpoint_every": 5, "optimizer__learning_rate": 0.3}


@pytest.mark.slow
def test_a_run_out_of_patience_stops_and_tests_unseen_clients_once_in_its_best_round(
    tmp_path, monkeypatch
):
    runs.install(monkeypatch)
    config, said = runs.config(**KEYS, patience=3, eval_also=()), []
    summary = train.run(config, tmp_path, said.append)
    lines = runs.lines(tmp_path)
    means = [line["validation"]["mean"] for line in lines]
    ends = [n for n in range(1, len(means) + 1) if n - 1 - int(np.argmax(means[:n])) >= 3]
    assert ends == [summary["rounds"]] == [len(lines)]
    assert summary["rounds"] < 14
    assert f"stopped after round {len(lines)} of 14" in said[-1]
    assert summary["stopped_early"] is True
    best = lines[-4]
    assert summary["selected_round"] == best["round"] == select_round(lines)
    assert not any("unseen" in line for line in lines)
    assert summary["last_round"] == {"internal": lines[-1]["accuracy"], "unseen": {}}
    assert summary["accuracy"]["internal"] == best["accuracy"]
    built, _, start = train.prepare(config)
    state = runs.saved(tmp_path, jax.eval_shape(start), "selected")
    expected = percent(built.model, global_variables(state), whole(built.unseen[0]))
    assert summary["accuracy"]["unseen"] == {"dog": {"running": pytest.approx(expected)}}


@pytest.mark.parametrize("killed", [3, 7, None])
def test_a_run_that_was_killed_runs_out_of_patience_in_the_same_round(tmp_path, killed):
    """Killed within a round, or behind the last one, before its summary."""
    means = (10, 30, 20, 50, 40, 45, 50, 90, 95)  # no better one in rounds 5, 6 and 7

    def evaluate(state):
        score = {"mean": float(means[int(state["round"]) - 1])}
        return {"accuracy": score, "validation": score}

    def resumed(dies):
        def round(state):
            number = int(state["round"]) + 1
            if number == dies:
                raise runs.Killed
            record = {"round": number, "loss": {}, "weights": {}, "seconds": 0.0}
            return {"round": np.asarray(number, np.int32)}, record

        lines, first = tmp_path / "metrics.jsonl", {"round": np.asarray(0, np.int32)}
        state = checkpoint.latest_state(tmp_path, lambda: first, workdir.rounds_recorded(lines))
        records = workdir.read_lines(lines, int(state["round"]))
        workdir.keep_lines(lines, records)
        callbacks = (
            Scores(evaluate, 1, 9),
            Patience(3, records),
            Lines(tmp_path, records, {}),
            Checkpoints(tmp_path, 2, records),
        )
        if not out_of_patience(records, 3):
            train_rounds(round, state, rounds=9, records=records, callbacks=callbacks)
        return records

    if killed:
        with pytest.raises(runs.Killed):
            resumed(killed)
    for _ in range(2):  # the second time nothing is left to do
        records = resumed(8)
        assert [record["round"] for record in records] == list(range(1, 8))
        assert select_round(records) == 4
        assert runs.steps(tmp_path, "selected") == [4]


@pytest.mark.parametrize("key", [{"patience": 2}, {"validate_with": "global"}])
def test_choices_by_validation_without_validation_samples_are_one_sentence(key, monkeypatch):
    runs.install(monkeypatch, runs.dataset(validation=False))
    ((name, value),) = key.items()
    with pytest.raises(ConfigError, match=rf"config.{name}={value}"):
        experiment.build(runs.config(**key))
