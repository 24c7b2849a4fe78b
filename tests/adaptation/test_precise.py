"""Precise statistics against moments in NumPy, and where a client is tested or served with them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from federations import NormNet, assert_close, in_float64, variables_of
from fedjax_bn.adaptation import precise_statistics
from fedjax_bn.adaptation.precise import no_samples, pool
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import batch_statistics
from fedjax_bn.normalization.batch_instance import gated_statistics, with_gates
from fedjax_bn.run import train
from fedjax_bn.run.evaluate import Request
from fedjax_bn.run.evaluate import run as evaluate_finished
from fedjax_bn.run.files.finished_run import load_run
from fedjax_bn.run.serve import run as serve_finished
from fedjax_bn.serving import load
from fedjax_bn.sharing import FROZEN, at, split_frozen
from fedjax_bn.training.evaluation.evaluate import batch_accuracy
from small_images import dataset_of_images

MODEL, BATCH = NormNet(), 4


@pytest.fixture
def client(x64):
    """Variables, and samples of three positions each."""
    images = jnp.asarray(np.random.default_rng(0).normal(2, 3, (11, 3, 6)))
    return in_float64(variables_of(MODEL)), images


def of_batches(images):
    return [images[start : start + BATCH] for start in range(0, len(images), BATCH)]


def moments_of(variables, batches):
    """Mean and variance of the inputs of both batch norms, each batch normalized by itself."""
    params, inputs = jax.tree.map(np.asarray, variables["params"]), {"a": [], "b": []}
    for x in map(np.asarray, batches):
        for dense, norm in (("bn", "a"), ("norm", "b")):
            x = x @ params[dense]["kernel"] + params[dense]["bias"]
            inputs[norm].append(x.reshape(-1, 8))
            x = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
            x = np.maximum(x * params[norm]["scale"] + params[norm]["bias"], 0)
    stacked = {norm: np.concatenate(parts) for norm, parts in inputs.items()}
    return {norm: {"mean": x.mean(0), "var": x.var(0)} for norm, x in stacked.items()}


def test_moments_are_of_all_inputs_and_clients_side_by_side_need_not_have_as_many(client):
    variables, images = client
    found = precise_statistics(MODEL, variables, images, batch_size=BATCH)
    assert_close(found, moments_of(variables, of_batches(images)), rtol=1e-12, atol=1e-13)
    batches = jnp.stack([images[:8], images[3:]]).reshape(2, 2, BATCH, 3, 6)
    valid = jnp.ones((2, 2, BATCH), bool).at[1, 1, 1:].set(False)
    pooled = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), no_samples(variables))
    add = jax.jit(jax.vmap(partial(pool, MODEL, variables)))
    for step in range(2):
        pooled = add(pooled, batches[:, step], valid[:, step])
    expected = [moments_of(variables, of_batches(x)) for x in (images[:8], images[3:8])]
    expected = jax.tree.map(lambda *rows: np.stack(rows), *expected)
    assert_close(pooled.statistics, expected, rtol=1e-12, atol=1e-13)


def test_one_batch_of_all_samples_gives_batch_statistics_and_stays(client):
    variables, images = client
    estimated = variables | {"batch_stats": precise_statistics(MODEL, variables, images)}
    by_batch = jax.jit(partial(forward, MODEL, statistics=batch_statistics))(variables, images)
    found = jax.jit(MODEL.apply)(estimated, images)
    np.testing.assert_allclose(found, by_batch.outputs, rtol=1e-11)
    again = precise_statistics(MODEL, estimated, images)
    assert_close(again, estimated["batch_stats"], rtol=1e-12)


def test_gates_of_1_are_no_gates_and_frozen_statistics_stay(client):
    variables, images = client
    moving, frozen = split_frozen(with_gates(variables), at("bn", "a")(with_gates(variables)))
    frozen_too = moving | {FROZEN: frozen}
    found = precise_statistics(MODEL, frozen_too, images, statistics=gated_statistics)
    assert_close(found["a"], variables["batch_stats"]["a"], rtol=0, atol=0)
    params, x = jax.tree.map(np.asarray, variables["params"]), np.asarray(images)
    x = x @ params["bn"]["kernel"] + params["bn"]["bias"]
    mean, var = (np.asarray(variables["batch_stats"]["a"][name]) for name in ("mean", "var"))
    x = (x - mean) / np.sqrt(var + 1e-5) * params["a"]["scale"] + params["a"]["bias"]
    x = np.maximum(x, 0) @ params["norm"]["kernel"] + params["norm"]["bias"]
    expected = {"mean": x.mean((0, 1)), "var": x.var((0, 1))}
    assert_close(found["b"], expected, rtol=1e-11)


DATA = dataset_of_images(runs.NAMES)
KEYS = {"model": "MLP", "data__image_size": 8, "rounds": 1, "target": "", "adaptations": ()}


@pytest.mark.parametrize("method", ["fedavg", pytest.param("ditto", marks=pytest.mark.slow)])
def test_clients_are_tested_and_served_with_statistics_of_their_training_samples(
    tmp_path, monkeypatch, method
):
    runs.install(monkeypatch, DATA)
    monkeypatch.setattr(train, "batch_accuracy", batch_accuracy)
    folder = tmp_path / "run"
    summary = runs.run(folder, method=method, statistics="precise", **KEYS)
    tested = summary["accuracy"]["internal"]
    run = load_run(folder)
    model, prepare, *_ = run.method.learned
    apply = jax.jit(model.apply)
    for domain in DATA.domains[:2]:
        variables = run.variables(domain.name)
        train_images, images = (
            prepare(part.images, jnp.float32) for part in (domain.train, domain.test)
        )
        for scores, samples in ((tested, train_images), (summary["batch_statistics"], images)):
            estimated = precise_statistics(model, variables, samples)
            answers = apply(variables | {"batch_stats": estimated}, images).argmax(-1)
            expected = 100 * np.mean(np.asarray(answers) == domain.test.labels)
            assert scores[domain.name] == pytest.approx(expected)
    serve_finished(folder, tmp_path / "served", client="bee", say=lambda text: None)
    bee = DATA.domains[1].test
    answers = load(tmp_path / "served")(bee.images).argmax(-1)
    assert tested["bee"] == pytest.approx(100 * np.mean(answers == bee.labels))
    request = Request(internal=True)
    own = evaluate_finished(folder, request, lambda text: None)[0]["internal"]["own"]
    assert own == pytest.approx(tested)
