"""Normalization of unseen clients: FedIG's adapter of alpha and TSMoBN's tracked statistics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.data.domain import Split
from fedjax_bn.engine.images import standardize
from fedjax_bn.models import ResNet, ResNet18
from fedjax_bn.normalization import BatchNorm, adapter, calls, normalize_with, tsmobn
from fedjax_bn.normalization.layer import RECORDED
from fedjax_bn.training.plots import alphas_of

MODEL = nets.HandMade()
KEY = jax.random.key(5)


def test_layers_are_in_the_order_of_the_forward_pass():
    model, images = ResNet((1,), num_classes=3, width=4), jnp.ones((2, 16, 16, 3))
    variables = nets.variables_of(model, images)
    variables = adapter.with_adapter(KEY, model, variables, images)
    split = Split(np.zeros((3, 16, 16, 3), np.uint8), np.zeros(3, np.int32))
    names = list(alphas_of(model, standardize((0.5,) * 3, (0.5,) * 3), variables, split))
    assert names == ["norm1", "layer1_0/norm1", "layer1_0/norm2"]
    assert names == list(calls.spatial_layers(model, variables, images)) != sorted(names)
    assert calls.in_forward_order(["unknown", *names], model, variables, images)[-1] == "unknown"


def test_resnet18_gets_the_papers_220_thousand_parameters():
    model = ResNet18(num_classes=7)
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    variables = jax.eval_shape(model.init, KEY, images)
    made = jax.eval_shape(lambda v: adapter.with_adapter(KEY, model, v, images), variables)
    leaves = jax.tree.leaves(made["adapter"])
    assert len(made["adapter"]) == 20
    assert sum(leaf.size for leaf in leaves) == 218_540  # Table 4: 11.53 M - 11.31 M


def test_alpha_is_equations_7_and_9_by_hand(x64):
    layer = BatchNorm()
    x = nets.images_of(6, shape=(5, 4, 32))
    variables = nets.variables_of(layer, x)
    parameters = adapter.init(KEY, {"": 32}, jnp.float64)
    random = np.random.default_rng(0)
    parameters[""]["out"]["kernel"] = jnp.asarray(random.normal(size=(2, 2)))
    with normalize_with(adapter.adapted_statistics(parameters)):
        ours = jax.jit(layer.apply)(variables, x)
    images, running = np.asarray(x), jax.tree.map(np.asarray, variables["batch_stats"])
    mean_i, std_i = images.mean((1, 2)), np.sqrt(images.var((1, 2)) + 1e-5)
    mean_g, std_g = running["mean"], np.sqrt(running["var"] + 1e-5)
    p = jax.tree.map(np.asarray, parameters[""])
    hidden = np.concatenate([mean_i - mean_g, std_i - std_g], 1) @ p["hidden"]["kernel"]
    hidden = np.maximum(hidden + p["hidden"]["bias"], 0)
    out = hidden @ p["out"]["kernel"] + p["out"]["bias"]
    alpha = np.clip(out[:, 1:], 0, 1)
    assert alpha.std() > 0
    mean = (alpha * mean_i + (1 - alpha) * mean_g)[:, None, None]
    std = (alpha * std_i + (1 - alpha) * std_g)[:, None, None]
    expected = (images - mean) / std * variables["params"]["scale"] + variables["params"]["bias"]
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


def test_alpha_in_training_is_reparameterized():
    """Over many samples alpha has mean epsilon and deviation delta, each sample its own z."""
    layer, parameters = BatchNorm(), adapter.init(KEY, {"": 3})
    parameters[""]["out"]["bias"] = jnp.asarray([0.05, 0.5])
    x = nets.images_of(4000, shape=(2, 2, 3)).astype(jnp.float32)
    variables = nets.variables_of(layer, x)
    with normalize_with(adapter.adapted_statistics(parameters, KEY)):
        _, seen = jax.jit(partial(layer.apply, mutable=[RECORDED]))(variables, x)
    alpha = np.asarray(seen[RECORDED]["alpha"])
    np.testing.assert_allclose([alpha.mean(), alpha.std()], [0.5, 0.05], rtol=0.05)


def test_a_fresh_adapter_starts_inside_the_clamp(x64):
    images = nets.images_of(20)
    variables = nets.variables_of(MODEL, images)
    variables = adapter.with_adapter(KEY, MODEL, variables, images)
    alphas = jax.jit(adaptation.record_alphas(MODEL))(variables, images)
    assert set(alphas) == {"block/inner", "middle"}
    for alpha in alphas.values():
        np.testing.assert_allclose(alpha, np.full(20, 0.1), rtol=1e-5)

    def loss(parameters):
        with normalize_with(adapter.adapted_statistics(parameters, KEY)):
            return jnp.square(MODEL.apply(variables, images)).sum()

    gradients = jax.jit(jax.grad(loss))(variables["adapter"])
    for layer in gradients.values():
        assert np.abs(layer["out"]["bias"]).min() > 0
        assert np.abs(layer["out"]["kernel"]).max() > 0


def test_without_adapter_parameters_the_error_says_how_to_get_them(x64):
    images = nets.images_of(5)
    variables = nets.variables_of(MODEL, images)
    with pytest.raises(ValueError, match="fediga"):
        adaptation.zero_shot_adapter(MODEL).predict(variables, (), images)


def algorithm(batches, momentum, about="tracked"):
    """Algorithm 1 on flat batches [n, C], literally; the pair after each batch."""
    pairs, mean, var = [], None, None
    for x in batches:
        if mean is None:
            mean, var = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
        else:
            mean = momentum * mean + (1 - momentum) * x.mean(0)
            centre = mean if about == "tracked" else x.mean(0)
            var = momentum * var + (1 - momentum) * ((x - centre) ** 2).mean(0)
        pairs.append((mean, var))
    return pairs


@jax.jit
def tracked(momentum, variables, carry, images, valid):
    """One program for all momenta."""
    return adaptation.tsmobn(MODEL, momentum).predict(variables, carry, images, valid)


def stream(momentum, variables, batches, valid=None):
    """All logits, batch after batch."""
    carry, logits = adaptation.tsmobn(MODEL).init(variables), []
    for i, images in enumerate(batches):
        given = carry, images, None if valid is None else valid[i]
        out, carry = tracked(momentum, variables, *given)
        logits.append(out)
    return logits, carry


@pytest.mark.parametrize(
    ("about", "momentum"), [("tracked", 0.0), ("tracked", 0.3), ("batch", 0.9)]
)
@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 2, 3)])
def test_update_is_algorithm_1(x64, shape, momentum, about):
    random, tracked = np.random.default_rng(0), None
    batches = [random.normal(3, 2, shape) * [1, 10, 0.1] for _ in range(4)]
    expected = algorithm([x.reshape(-1, 3) for x in batches], momentum, about)
    for x, pair in zip(batches, expected, strict=True):
        tracked = tsmobn.update(tracked, jnp.asarray(x), momentum, about=about)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), tracked, pair)


def test_the_model_is_normalized_with_the_tracked_pair(x64):
    images = nets.images_of(12).reshape(3, 4, 6, 6, 3)
    variables = nets.variables_of(MODEL, images[0])
    logits, carry = stream(0.8, variables, images)
    inputs = []
    for batch in images:
        kernel = variables["params"]["block"]["conv"]
        inputs.append(np.asarray(batch @ kernel["kernel"] + kernel["bias"]).reshape(-1, 8))
    mean, var = algorithm(inputs, 0.8)[-1]
    tracked = carry.statistics["block"]["inner"]
    np.testing.assert_allclose(tracked["mean"], mean, rtol=1e-11)
    np.testing.assert_allclose(tracked["var"], var, rtol=1e-11)
    # What is tracked after the last batch is what normalized the last batch.
    plain = MODEL.apply({**variables, "batch_stats": carry.statistics}, images[-1])
    np.testing.assert_allclose(logits[-1], plain, rtol=1e-11)


def test_batches_without_valid_samples_are_as_if_never_seen(x64):
    images = nets.images_of(8).reshape(2, 4, 6, 6, 3)
    variables = nets.variables_of(MODEL, images[0])
    expected, _ = stream(0.6, variables, images)
    nothing = jnp.full_like(images[0], 1e3)
    batches = [nothing, images[0], nothing, images[1]]
    valid = [jnp.full(4, i % 2 == 1) for i in range(4)]
    logits, _ = stream(0.6, variables, batches, valid)
    for ours, theirs in ((logits[1], expected[0]), (logits[3], expected[1])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert all(np.isfinite(out).all() for out in logits)
