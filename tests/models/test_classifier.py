"""Which dense layer classifies: found by what the outputs are made of, or named by the user."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from federations import NAMED, run_rounds
from fedjax_bn import contrib, models
from fedjax_bn.federation import global_variables
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.models.feature_masks import with_masks
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.serving.predictor import predictor
from method_table import METHODS

KEY = jax.random.key(0)
CLASSES = 4
READING = ("copa", "csd", "fedsr", "csac", "fedadg", "fedcd", "moon", "rsc")


class Gated(nn.Module):
    """As many features as classes, and a gate of one output before the classifier."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(CLASSES, name="trunk")(x))
        x = x * nn.sigmoid(nn.Dense(1, name="gate")(x))
        return nn.Dense(CLASSES, name="head")(x)


class Scaled(nn.Module):
    """The layer that is called last scales what the classifier gives."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(5, name="trunk")(x))
        logits = nn.Dense(CLASSES, name="head")(x)
        return logits * nn.sigmoid(nn.Dense(CLASSES, name="scale")(x))


class Excited(nn.Module):
    """A convolution whose channels two dense layers scale, on images of an odd size."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(CLASSES, (3, 3), name="conv")(x)
        scale = nn.Dense(2, name="down")(x.mean((1, 2)))
        x = x * nn.sigmoid(nn.Dense(CLASSES, name="up")(scale))[:, None, None]
        return nn.Dense(CLASSES, name="head")(x.reshape(len(x), -1)) / 2


class Deep(nn.Module):
    """Methods of its own, of which the second has two dense layers."""

    def setup(self):
        self.trunk, self.hidden, self.head = nn.Dense(5), nn.Dense(3), nn.Dense(CLASSES)

    def features(self, x):
        return nn.tanh(self.trunk(x))

    def classify(self, features):
        return self.head(nn.tanh(self.hidden(features)))

    def __call__(self, x):
        return self.classify(self.features(x))


NETS = {
    "gated": (Gated(), (6,), "head", CLASSES),
    "in bfloat16": (in_dtype(Gated(), jnp.bfloat16), (6,), "head", CLASSES),
    "excited": (Excited(), (7, 7, 3), "head", 7 * 7 * CLASSES),
    "named": (models.with_classifier(Scaled(), "head"), (6,), "head", 5),
}


@cache
def start(name):
    model, shape, *_ = NETS[name]
    return nets.variables_of(model, jnp.zeros((2, *shape)))


@pytest.mark.parametrize("name", NETS)
def test_the_classifier_is_what_the_outputs_are_made_of_with_images_and_without(name):
    model, shape, head, features = NETS[name]
    for images in (None, jnp.zeros((2, *shape))):
        sizes = sizes_of(model, start(name), images)
        assert (sizes.path, sizes.features, sizes.classes) == ((head,), features, CLASSES)
    assert with_masks(model, start(name))["mask"]["features"].shape == (features,)


RANDOM = np.random.default_rng(0)
BATCHES = {
    "image": RANDOM.normal(size=(2, 2, 3, 6)).astype(np.float32),
    "label": RANDOM.integers(0, CLASSES, (2, 2, 3)),
    "valid": np.ones((2, 2, 3), bool),
}


@pytest.mark.parametrize("name", READING)
def test_a_method_that_reads_features_takes_as_many_as_classes(name):
    """Nothing is compiled here."""
    own = {"copa": {"gates": False}, "csac": {"names": "trunk"}} | NAMED
    method = METHODS[name](Gated(), optax.sgd(0.1), **own.get(name, {}))
    state = jax.eval_shape(lambda: method.init(KEY, start("gated"), 2))
    after, _ = jax.eval_shape(method.round, state, BATCHES, KEY)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_classifier_that_two_layers_could_be_is_refused_until_it_is_named():
    class Naming(Scaled):
        classifier_path = "head"

    variables = start("named")
    for images in (None, jnp.zeros((2, 6))):
        with pytest.raises(ValueError, match=r"'head' and 'scale'.*with_classifier"):
            sizes_of(Scaled(), variables, images)
    with pytest.raises(ValueError, match="'top'"):
        sizes_of(models.with_classifier(Scaled(), "top"), variables)
    assert sizes_of(Naming(), variables).path == ("head",)


def test_copa_refuses_a_classifier_of_several_layers():
    variables = Deep().init(KEY, jnp.zeros((2, 6)))
    assert sizes_of(Deep(), variables)[:2] == (5, CLASSES)
    method = contrib.copa(Deep(), optax.sgd(0.1), gates=False)
    with pytest.raises(ValueError, match="copa"):
        method.init(KEY, variables, 2)


@pytest.mark.parametrize("name", ["copa", "csd"])
def test_a_method_that_reads_the_classifiers_weights_refuses_logits_that_are_computed(name):
    own = {"copa": {"gates": False}}.get(name, {})
    model = models.with_classifier(Scaled(), "head")
    method = METHODS[name](model, optax.sgd(0.1), **own)
    state = jax.eval_shape(lambda: method.init(KEY, start("named"), 2))
    with pytest.raises(ValueError, match=f"{name} needs logits f W . b, but Scaled changes"):
        jax.eval_shape(method.round, state, BATCHES, KEY)


def test_a_named_classifier_trains_and_predicts():
    method = contrib.fedsr(models.with_classifier(Scaled(), "head"), optax.sgd(0.1))
    state, metrics = run_rounds(method, start("named"), BATCHES)
    assert np.isfinite(metrics["loss"]).all()
    probabilities = predictor(method, global_variables(state))(BATCHES["image"][0, 0])
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)
