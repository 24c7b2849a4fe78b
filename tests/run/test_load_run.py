"""A client's own model, out of a finished run: in Python, and as a served folder."""

import json

import jax
import numpy as np
import pytest

import fedjax_bn as fb
import runs
from fedjax_bn.run.files import finished_run
from fedjax_bn.serving import load
from small_images import dataset_of_images

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
