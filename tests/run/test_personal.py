"""A client's own model: personalized, tested, and taken out of a finished run."""

import json
from functools import partial

import jax
import numpy as np
import optax
import pytest

import fedjax_bn as fb
import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Split, whole
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.models import SmallCNN
from fedjax_bn.run.experiment.build import prepare, read_evaluation
from fedjax_bn.run.files import finished_run
from fedjax_bn.serving import load
from fedjax_bn.training.evaluation import evaluate
from fedjax_bn.training.experiment import Personalization, check_labelled, set_aside
from method_table import METHODS
from small_images import dataset_of_images

HOW = Personalization(samples=4, rate=0.5, seed=3)


@pytest.mark.parametrize("windows", [1, 3])
def test_labelled_samples_and_others_of_their_recording_are_never_tested(windows):
    images, names = np.arange(30, dtype=np.float32)[:, None], [i // windows for i in range(30)]
    split = Split(images, np.zeros(30, np.int32), np.array(names).astype(str))
    labelled, tested = (part.images[:, 0].tolist() for (part,) in set_aside([split], HOW))
    assert len(labelled) == 4
    recordings = {names[int(i)] for i in labelled}
    assert tested == [i for i in range(30) if names[i] not in recordings]  # in order, none is lost


@pytest.mark.parametrize(
    ("method", "given", "samples"),
    [("perfedavg", None, 16), ("fedavg", None, 0), ("perfedavg", 0, 0), ("fedbn", 5, 5)],
)
def test_perfedavg_is_personalized_unless_told_otherwise_and_others_where_told(
    method, given, samples
):
    config = runs.config(method=method, personalize_samples=given)
    rate = {"inner_rate": 0.3} if method == "perfedavg" else {}
    own = METHODS[method](SmallCNN(), optax.sgd(0.1), **rate)
    choice = read_evaluation(config, own).personalization
    assert (choice.samples if choice else 0) == samples
    if choice:
        assert choice.rate == rate.get("inner_rate", 0.01)


@pytest.mark.parametrize("client", ["ant", "cow", "dog"])  # cow's validation, dog unseen
def test_too_few_samples_are_a_sentence_that_names_the_client(client):
    (domain,) = [domain for domain in runs.DATA.domains if domain.name == client]
    sizes = [len(split.labels) for split in domain[1:]]  # training samples come first
    internal, unseen, most = (domain,), (), min(sizes[1:])
    if client == "dog":
        internal, unseen, most = (), (domain,), sum(sizes)
    internal = runs.DATA._replace(domains=internal)
    check_labelled(HOW._replace(samples=most - 1), internal, unseen)
    with pytest.raises(ConfigError, match=f"samples={most}.*'{client}'"):
        check_labelled(HOW._replace(samples=most), internal, unseen)


@pytest.mark.parametrize("frozen", ["", pytest.param("dense1,norm1", marks=pytest.mark.slow)])
def test_each_client_is_tested_with_its_own_adapted_model_on_the_other_samples(frozen, monkeypatch):
    runs.install(monkeypatch)
    config = runs.config(method="fedbn", frozen=frozen, adaptations=("running",))
    built, _, start = prepare(config, traced=False)
    how = HOW._replace(seed=config.seed)
    built = built._replace(evaluation=built.evaluation._replace(personalization=how))
    state, random = start(), np.random.default_rng(0)
    shared, personal = jax.tree.map(
        lambda x: np.asarray(x) + random.uniform(0, 0.3, x.shape).astype(x.dtype),
        (state.shared, state.personal),
    )
    state = state._replace(shared=shared, personal=personal)
    record = evaluate.evaluator(built)(state)
    options = {"inner_rate": 0.5, "prepare": built.prepare, "frozen": state.frozen}
    adapt = jax.jit(partial(personalize, built.model, **options))
    answer = jax.jit(lambda own, x: built.model.apply(own, built.prepare(x, np.float32)).argmax(-1))

    def percent(variables, split):
        (labelled,), (rest,) = set_aside([split], how)
        own = adapt(variables, np.asarray(labelled.images), labelled.labels)
        images = np.resize(rest.images, (64, *rest.images.shape[1:]))  # one shape, one program
        right = answer(own, images)[: len(rest.labels)] == rest.labels
        assert len(rest.labels) == len(split.labels) - 4
        return 100 * float(right.mean())

    models = client_variables(state)
    for k, domain in enumerate(built.internal.domains):
        own = jax.tree.map(lambda x, k=k: x[k], models)
        for name, split in (("accuracy", domain.test), ("validation", domain.validation)):
            np.testing.assert_allclose(record[name][domain.name], percent(own, split), rtol=1e-5)
    (dog,) = built.unseen
    expected = {"running": percent(global_variables(state), whole(dog))}
    assert record["unseen"] == {"dog": pytest.approx(expected)}


DATA = dataset_of_images(runs.NAMES, 0.4, 0.3, ("dark", "grey", "bright"))
KEYS = {"data__image_size": 8, "rounds": 2, "model": "MLP", "target": ""}
WAYS = {
    "gates": {"method": "fedig:gates=True", "model": "SmallCNN"},
    "own model": {"method": "ditto"},
    "own head": {"method": "fedrod"},
    "absent clients": {"method": "fedbn", "clients_per_round": 1},
    "on the disk": {"method": "fedbn", "clients_per_round": 1, "population": "host"},
}
SLOW = ("gates", "on the disk", "own head", "own model")


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS],
)
def run(request, tmp_path_factory):
    """A workdir, and the accuracies that `evaluate --internal` writes."""
    place = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, DATA)
        runs.run(place, **KEYS | WAYS[request.param])
        assert runs.command("evaluate", f"--workdir={place}", "--internal") == 0
    scores = json.loads((place / "evaluations" / "evaluation.json").read_text())
    return place, scores["internal"]["own"]


def test_a_clients_predictions_are_those_of_evaluate_and_of_its_served_model(run, tmp_path):
    place, accuracy = run
    result = fb.load_run(place)
    assert result.clients == runs.NAMES
    probabilities = {}
    for domain in DATA.domains:
        images, labels, _ = domain.test
        found = probabilities[domain.name] = result.predict(images, client=domain.name)
        assert 100 * (found.argmax(1) == labels).mean() == pytest.approx(accuracy[domain.name])
    images = DATA.domains[1].test.images
    given = [f"--workdir={place}", f"--export={tmp_path / 'bee'}", "--client=bee"]
    assert runs.command("serve", *given) == 0
    assert json.loads((tmp_path / "bee" / "model.json").read_text())["client"] == "bee"
    np.testing.assert_allclose(load(tmp_path / "bee")(images), probabilities["bee"], atol=1e-6)
    unseen = result.predict(images)  # by what an unseen client receives, as one never drawn has it
    if not json.loads((place / "config.json").read_text())["config"]["clients_per_round"]:
        assert np.abs(unseen - probabilities["bee"]).max() > 1e-4


def test_the_variables_are_the_rows_of_the_state_and_other_clients_have_none(tmp_path, capfd):
    place = runs.finished(tmp_path / "run", method="fedbn")
    result = fb.load_run(place)
    about = finished_run.read_about(place)
    config = finished_run.configuration(about["config"])
    _, state, _ = finished_run.restore(place, config, about["form"])
    jax.tree.map(np.testing.assert_array_equal, result.state, state)
    for k, client in enumerate(result.clients):
        own = result.variables(client)
        means = state.personal["batch_stats"]["norm1"]["mean"]
        np.testing.assert_array_equal(own["batch_stats"]["norm1"]["mean"], means[k])
        kernel = state.shared["params"]["dense1"]["kernel"]
        np.testing.assert_array_equal(own["params"]["dense1"]["kernel"], kernel)
    summary = json.loads((place / "summary.json").read_text())
    assert result.accuracy == summary["accuracy"]
    with pytest.raises(ValueError, match=r"'an'.*'ant'.*bee"):
        result.variables("an")
    given = [f"--workdir={place}", f"--export={tmp_path / 'x'}", "--client=dog"]
    assert runs.command("serve", *given) == 2  # which did not train
    assert "valid are ant, bee, cow" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x").exists()
