"""The dense layer that classifies, and masks on the features that it reads."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from federations import NAMED, DropoutNet, assert_equal, run_rounds
from fedjax_bn import adaptation, contrib, models
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.federation import global_variables
from fedjax_bn.models import SmallCNN, feature_masks
from fedjax_bn.models.classifier import FeaturesOf, features_method, sizes_of
from fedjax_bn.models.feature_masks import with_masks
from fedjax_bn.models.forward import forward
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.serving.predictor import predictor
from method_table import METHODS
from small_oracle import SmallNet

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


MASK_KEY = jax.random.key(3)


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
def masked_model(name):
    """A model, its variables and images."""
    model, shape = MODELS[name]
    images = jax.random.normal(MASK_KEY, (4, *shape))
    return model, nets.variables_of(model, images), images


def test_a_mask_of_another_size_or_of_nothing_is_refused():
    model, variables, images = masked_model("tiny")
    with pytest.raises(ValueError, match="'pool'"):
        feature_masks.with_masks(model, variables, ("pool",), images)
    wrong = {**variables, "mask": {"features": jnp.ones(1)}}
    with pytest.raises(ValueError, match="with_masks"):
        forward(model, wrong, images)


@pytest.mark.parametrize("name", ["with methods", "dropout", "flattened map"])
def test_a_mask_multiplies_what_the_classifier_sees_and_ones_or_none_change_nothing(name):
    model, variables, images = masked_model(name)
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
    model, variables, images = masked_model("tiny")
    sizes = {"features": 6, "conv1": 4, "norm2": 6}
    several = feature_masks.with_masks(model, variables, sizes, images)["mask"]
    assert_equal(feature_masks.with_masks(model, variables, sizes)["mask"], several)
    assert {name: mask.size for name, mask in several.items()} == sizes
    passed = jax.jit(lambda mask: forward(model, {**variables, "mask": mask}, images).outputs)
    for name in sizes:
        changed = several | {name: several[name].at[::2].set(0.3)}
        assert np.abs(passed(changed) - passed(several)).max() > 1e-4, name


def test_features_beside_a_mask_are_those_before_it():
    model, variables, images = masked_model("with methods")
    method = features_method(model, variables, images)
    features, _ = model.apply(variables, images, method=method)
    masked = {**variables, "mask": {"features": jnp.zeros(features.shape[1])}}
    predict = adaptation.running(FeaturesOf(model)).predict
    np.testing.assert_allclose(predict(masked, (), images)[0], features, rtol=1e-5)


def test_a_model_without_a_dense_classifier_is_refused_with_the_remedy():
    model, images = nn.Conv(3, (1, 1)), jnp.zeros((2, 4, 4, 6))
    variables = model.init(MASK_KEY, images)
    for known in (None, images):
        with pytest.raises(ValueError, match="with_classifier"):
            feature_masks.with_masks(model, variables, images=known)


def test_masks_that_are_there_stay():
    model, variables, images = masked_model("with methods")
    own = {**variables, "mask": {"features": jnp.full(16, 0.5)}}
    assert_equal(feature_masks.with_masks(model, own)["mask"], own["mask"])
    both = feature_masks.with_masks(model, own, ("features", "fc1"), images)["mask"]
    assert set(both) == {"features", "fc1"}
    assert_equal(both["features"], own["mask"]["features"])


@pytest.mark.parametrize("text", ["running", "tsmobn"])
def test_every_adaptation_applies_the_masks_and_can_leave_them_out(text):
    model, variables, images = masked_model("tiny")
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
