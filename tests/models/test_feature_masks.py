"""Masks: where they act in any model, how their size is found, who applies them."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import norm_nets as nets
from federations import DropoutNet, assert_equal
from fedjax_bn import adaptation
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.models import SmallCNN, feature_masks
from fedjax_bn.models.classifier import FeaturesOf, features_method, sizes_of
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import BatchNorm
from small_oracle import SmallNet

KEY = jax.random.key(3)


class Flat(nn.Module):
    """A convolution, a flattened map and the classifier: its features depend on the image size."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(BatchNorm()(nn.Conv(3, (3, 3), strides=2)(images)))
        return nn.Dense(5)(x.reshape(len(x), -1))


MODELS = {
    "with methods": (SmallNet(), (12,)),
    "dropout": (DropoutNet(), (6,)),
    "flattened map": (Flat(), (9, 9, 2)),
    "tiny": (SmallCNN(3, widths=(4, 6)), (6, 6, 3)),
}


@cache
def start(name):
    """A model, its variables and images."""
    model, shape = MODELS[name]
    images = jax.random.normal(KEY, (4, *shape))
    return model, nets.variables_of(model, images), images


def test_a_mask_of_another_size_or_of_nothing_is_refused():
    model, variables, images = start("tiny")
    with pytest.raises(ValueError, match="'pool'"):
        feature_masks.with_masks(model, variables, ("pool",), images)
    wrong = {**variables, "mask": {"features": jnp.ones(1)}}
    with pytest.raises(ValueError, match="with_masks"):
        forward(model, wrong, images)


@pytest.mark.parametrize("name", ["with methods", "dropout", "flattened map"])
def test_a_mask_multiplies_what_the_classifier_sees_and_ones_or_none_change_nothing(name):
    model, variables, images = start(name)
    ones = feature_masks.with_masks(model, variables)
    mask = jnp.linspace(0.2, 1.7, ones["mask"]["features"].size)

    @jax.jit
    def outputs(images):
        masked = {**variables, "mask": {"features": mask}}
        method = features_method(model, variables, images)
        features, plain = model.apply(variables, images, method=method)
        passed = [forward(model, v, images).outputs for v in (variables, ones)]
        ours = forward(model, masked, images, wanted=["features"])
        return features, plain, *passed, ours.features, ours.outputs

    features, plain, *same, read, ours = outputs(images)
    np.testing.assert_allclose(read, features * mask, rtol=1e-5, atol=1e-6)
    for one in same:
        np.testing.assert_allclose(one, plain, rtol=1e-6, atol=1e-6)
    if hasattr(model, "classify"):
        theirs = model.apply(variables, features * mask, method="classify")
    else:
        dense = variables["params"][sizes_of(model, variables, images).path[-1]]
        theirs = (features * mask) @ dense["kernel"] + dense["bias"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_several_masks_act_at_once():
    model, variables, images = start("tiny")
    sizes = {"features": 6, "conv1": 4, "norm2": 6}
    several = feature_masks.with_masks(model, variables, sizes, images)["mask"]
    assert_equal(feature_masks.with_masks(model, variables, sizes)["mask"], several)
    assert {name: mask.size for name, mask in several.items()} == sizes
    passed = jax.jit(lambda mask: forward(model, {**variables, "mask": mask}, images).outputs)
    for name in sizes:
        changed = several | {name: several[name].at[::2].set(0.3)}
        assert np.abs(passed(changed) - passed(several)).max() > 1e-4, name


def test_features_beside_a_mask_are_those_before_it():
    model, variables, images = start("with methods")
    method = features_method(model, variables, images)
    features, _ = model.apply(variables, images, method=method)
    masked = {**variables, "mask": {"features": jnp.zeros(features.shape[1])}}
    predict = adaptation.running(FeaturesOf(model)).predict
    np.testing.assert_allclose(predict(masked, (), images)[0], features, rtol=1e-5)


def test_a_model_without_a_dense_classifier_is_refused_with_the_remedy():
    model, images = nn.Conv(3, (1, 1)), jnp.zeros((2, 4, 4, 6))
    variables = model.init(KEY, images)
    for known in (None, images):
        with pytest.raises(ValueError, match="with_classifier"):
            feature_masks.with_masks(model, variables, images=known)


def test_masks_that_are_there_stay():
    model, variables, images = start("with methods")
    own = {**variables, "mask": {"features": jnp.full(16, 0.5)}}
    assert_equal(feature_masks.with_masks(model, own)["mask"], own["mask"])
    both = feature_masks.with_masks(model, own, ("features", "fc1"), images)["mask"]
    assert set(both) == {"features", "fc1"}
    assert_equal(both["features"], own["mask"]["features"])


@pytest.mark.parametrize("text", ["running", "tsmobn"])
def test_every_adaptation_applies_the_masks_and_can_leave_them_out(text):
    model, variables, images = start("tiny")
    mask, params = jnp.linspace(0, 1, 6), variables["params"]
    masked = {**variables, "mask": {"features": mask}}
    kernel = params["head"]["kernel"] * mask[:, None]
    scaled = params | {"head": params["head"] | {"kernel": kernel}}

    def logits(text, variables):
        chosen = choose_adaptation(text, model).adaptation
        return jax.jit(chosen.predict)(variables, chosen.init(variables), images)[0]

    np.testing.assert_allclose(
        logits(text, masked), logits(text, {**variables, "params": scaled}), rtol=1e-4, atol=1e-5
    )
    assert_equal(logits(f"{text}:mask=False", masked), logits(text, variables))
