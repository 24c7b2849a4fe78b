"""The zero-shot adapter against Eq. 7 to 9 by hand, its start, its gradients, its record."""

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
from fedjax_bn.normalization import BatchNorm, adapter, calls, normalize_with
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
