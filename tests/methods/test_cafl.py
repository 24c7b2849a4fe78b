"""How FedIG's CAFL reduces over features: the paper's sum, or the mean from random weights."""

import html
import inspect
import json
import re
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runs
from fedjax_bn.methods import fedbn, fedig
from fedjax_bn.methods.fedig import _client_agnostic
from fedjax_bn.methods.learning import learning
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.report.page import write_report
from fedjax_bn.run import commands, train
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.method import option_values
from fedjax_bn.state import Received

KEY = jax.random.key(0)


class Pair(nn.Module):
    """One spatial batch norm, and five features before the classifier."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(5, (3, 3), param_dtype=images.dtype)(images)
        x = BatchNorm(param_dtype=images.dtype)(x)
        return nn.Dense(self.num_classes, param_dtype=images.dtype)(nn.relu(x).mean((1, 2)))


def squares(features, mixed):
    return jnp.square(features - mixed).sum(1)


def largest(features, mixed):
    assert features.shape == mixed.shape == (4, 5)
    return jnp.abs(features - mixed).max(1)


@cache
def values():
    """The objective by (lambda_2, cafl) on one batch in float64, one of its samples padding."""
    rng = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(rng.normal(size=(4, 6, 6, 2))),
        "label": jnp.asarray([0, 1, 2, 0]),
        "valid": jnp.asarray([True, True, True, False]),
    }
    cases = [(0.0, "sum"), (4.0, "sum"), (4.0, "mean"), (0.8, "sum")]
    cases += [(4.0, squares), (4.0, largest)]

    @jax.jit
    def compute():
        variables = Pair().init(KEY, batch["image"])
        received = Received({}, {}, server=variables["batch_stats"])

        def value(lambda_2, cafl):
            objective = _client_agnostic(learning(Pair())[0], 0.1, lambda_2, cafl=cafl)
            return objective(variables, batch, received, KEY)[0]

        return [value(*case) for case in cases]

    return dict(zip(cases, map(float, compute()), strict=True))


def test_the_mean_is_the_sum_over_the_number_of_features(x64):
    found = values()
    assert found[4.0, "sum"] > found[0.0, "sum"] + 0.01
    np.testing.assert_allclose(found[4.0, "mean"], found[0.8, "sum"], rtol=1e-12)


def test_cafl_may_be_a_function_of_both_passes_features(x64):
    found = values()
    np.testing.assert_allclose(found[4.0, squares], found[4.0, "sum"], rtol=1e-12)
    assert abs(found[4.0, largest] - found[4.0, "sum"]) > 1e-3


def test_a_reading_of_cafl_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="cafl='average' is unknown; valid are mean, sum"):
        fedig(Pair(), optax.sgd(0.1), cafl="average")


@pytest.mark.parametrize("name", ["pacs", "vlcs", "officehome", "pacs_30_clients"])
def test_one_default_of_cafl_holds_in_python_and_in_every_config(name):
    default = inspect.signature(fedig).parameters["cafl"].default
    for pretrained in ("", "weights.safetensors"):
        config = read(f"configs/{name}.py", [("pretrained", pretrained)])
        options = option_values(config.method)
        assert (options["cafl"], options["lambda_2"]) == (default, 4.0) == ("mean", 4.0)
    config = read(f"configs/{name}.py", [("method", "fediga:cafl=sum")])
    assert option_values(config.method)["cafl"] == "sum"


def test_a_note_says_what_cafl_is_and_for_which_start():
    (mean,) = fedig(Pair(), optax.sgd(0.1)).notes
    assert "mean over features (lambda_2=4" in mean
    assert "which trains" in mean
    (printed,) = fedig(Pair(), optax.sgd(0.1), cafl="sum").notes
    assert "sum over features" in printed
    assert "the sum diverges" in printed


def test_only_a_method_with_cafl_has_a_note_on_it():
    assert fedbn(Pair(), optax.sgd(0.1)).notes == ()
    assert fedig(Pair(), optax.sgd(0.1), lambda_2=0.0).notes == ()


@pytest.mark.slow  # that notes of a method come there is tested with those on privacy
def test_a_run_says_at_start_in_config_json_and_in_the_report_what_cafl_is(monkeypatch, tmp_path):
    runs.install(monkeypatch)
    said, config = [], runs.config(method="fedig", rounds=1)
    train.run(config, tmp_path, say=said.append)
    write_report(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (note,) = (text for text in said if "CAFL" in text)
    assert (note,) == fedig(Pair(), optax.sgd(0.1)).notes
    assert note in about["notes"]
    assert html.escape(note) in (tmp_path / "report.html").read_text()


def recipe(name):
    """The changes of a config that its docstring gives for a CPU."""
    text = (runs.ROOT / f"configs/{name}.py").read_text().partition("Small, on a CPU")[2]
    return dict(re.findall(r"--config\.([\w.]+)=(\S+)", text.partition('"""')[0]))


@pytest.mark.parametrize("name", ["pacs", "vlcs", "officehome"])
def test_the_small_recipe_is_spelled_right_and_starts_from_scratch(name):
    config = read(f"configs/{name}.py", recipe(name).items())
    assert (config.data.image_size, config.model) == (64, "ResNet10:width=16")
    assert config.baselines == ("fedavg",)
    assert option_values(config.method)["cafl"] == "mean"


@pytest.mark.slow
def test_the_small_recipe_of_the_pacs_config_learns_from_scratch(shared, tmp_path):
    """One class for everything has 22 % on the clients and at most 21 on sketches.

    There FedAvg goes from 9 to 30 % between rounds.
    """
    changes = {"data.path": str(shared / "data/pacs"), "data.cache": str(tmp_path / "cache")}
    config = read("configs/pacs.py", (recipe("pacs") | changes).items())
    for one, folder in commands.runs(config, tmp_path / "run"):
        accuracy = train.run(one, folder, say=lambda text: None)["accuracy"]
        assert accuracy["internal"]["mean"] > 32, one.method
        assert one.method == "fedavg" or max(accuracy["unseen"]["sketch"].values()) > 22
