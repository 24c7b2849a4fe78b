"""Adaptations: each against its own formula, all under one set of claims."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from federations import OneNorm, in_float64
from federations import variables_of as small_variables
from fedjax_bn import adaptation, sharing
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.normalization import BatchNorm, adapter, batch_instance, normalize_with

MODEL = nets.HandMade()
LAYER = BatchNorm()
MAKERS = {
    "running": adaptation.running,
    "batch": adaptation.batch,
    "initial": adaptation.initial,
    "tsmobn": adaptation.tsmobn,
    "zero_shot_adapter": adaptation.zero_shot_adapter,
    "fixed_alpha": adaptation.fixed_alpha,
    "random_alpha": adaptation.random_alpha,
    "learned_alpha": adaptation.learned_alpha,
    "iabn": adaptation.iabn,
    "mixnorm": adaptation.mixnorm,
    "ensemble": adaptation.ensemble,
}


def one_layer(shape=(4, 5, 3)):
    x = nets.images_of(6, shape=shape)
    return nets.variables_of(LAYER, x), x


def served(count=4):
    """Variables that every adaptation can use, and images."""
    return dict(_served(jax.config.jax_enable_x64)), nets.images_of(count)


@cache
def _served(x64):
    images = nets.images_of(4)
    each = [nets.variables_of(MODEL, images, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each)
    variables = batch_instance.with_gates(each[0])
    variables = adapter.with_adapter(jax.random.key(0), MODEL, variables, images)
    return adaptation.with_clients(variables, batch_instance.with_gates(stacked))


# One that carries moments along a stream, and one that reads each sample's own.
OFTEN = ("tsmobn", "zero_shot_adapter")
OF_BATCHES = ("batch", "tsmobn", "random_alpha", "mixnorm")
EACH = [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in MAKERS]
apply = jax.jit(MODEL.apply)


@cache
def program(name):
    """The adaptation, which all tests share, so that it compiles once."""
    return MAKERS[name](MODEL)


def predict(adapt, variables, images, valid=None):
    """As one program: alone every operation would be compiled for each shape."""
    return jax.jit(adapt.predict)(variables, adapt.init(variables), images, valid)[0]


def normal(x, mean, var, variables):
    x = (np.asarray(x) - mean) / np.sqrt(var + 1e-5)
    return x * variables["params"]["scale"] + variables["params"]["bias"]


def own_moments(x):
    return (moment(np.asarray(x), (1, 2), keepdims=True) for moment in (np.mean, np.var))


@pytest.mark.parametrize("name", EACH)
def test_every_adaptation_streams_under_jit_and_scan(x64, name):
    adapt, (variables, images) = program(name), served(count=8)
    batches, valid = np.asarray(images).reshape(2, 4, 6, 6, 3), np.arange(8).reshape(2, 4) < 7

    @jax.jit
    def scanned(variables):
        step = lambda carry, batch: adapt.predict(variables, carry, *batch)[::-1]  # noqa: E731
        return jax.lax.scan(step, adapt.init(variables), (batches, valid))[1]

    one, carry = jax.jit(adapt.predict), adapt.init(variables)
    for i, logits in enumerate(scanned(variables)):
        loop, carry = one(variables, carry, batches[i], valid[i])
        assert logits.shape == (4, nets.CLASSES)
        np.testing.assert_allclose(logits, loop, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", EACH)
def test_no_valid_prediction_depends_on_padding(x64, name):
    adapt, (variables, images) = program(name), served()
    valid, poison = np.arange(4) < 3, np.array(images)
    poison[3] = 77.0
    clean, poisoned = (predict(adapt, variables, x, valid)[:3] for x in (images, poison))
    np.testing.assert_allclose(poisoned, clean, rtol=1e-10)


@pytest.mark.parametrize("name", [one for one in EACH if one.values[0] not in OF_BATCHES])
def test_zero_shot_adaptations_predict_a_sample_alone_as_in_its_batch(x64, name):
    adapt, (variables, images) = program(name), served()
    whole = np.asarray(predict(adapt, variables, images, np.ones(4, bool)))
    alone = np.asarray(predict(adapt, variables, np.asarray(images)[1:2]))
    np.testing.assert_allclose(alone[0], whole[1], rtol=1e-9)


def test_initial_without_affine_is_batch_norm_before_training(x64):
    model, images = OneNorm(), np.random.default_rng(0).normal(size=(4, 6))
    trained = in_float64(small_variables(model))
    kept, norms = sharing.split(trained, sharing.all_but_batch_norm(trained))
    norms["params"]["a"] = {"scale": np.ones(8), "bias": np.zeros(8)}
    norms["batch_stats"]["a"] = {"mean": np.zeros(8), "var": np.ones(8)}
    ours = predict(choose_adaptation("initial:affine=False", model).adaptation, trained, images)
    expected = jax.jit(model.apply)(sharing.join(kept, norms), images)
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_fixed_alpha_mixes_means_and_deviations(x64, alpha):
    variables, x = one_layer()
    ours = predict(adaptation.fixed_alpha(LAYER, alpha), variables, x)
    (mean, var), running = own_moments(x), variables["batch_stats"]
    mean = alpha * mean + (1 - alpha) * running["mean"]
    std = alpha * np.sqrt(var + 1e-5) + (1 - alpha) * np.sqrt(running["var"] + 1e-5)
    np.testing.assert_allclose(ours, normal(x, mean, std**2 - 1e-5, variables), rtol=1e-9)


def iabn_numpy(x, variables, strength):
    """NOTE's layer, sample by sample and channel by channel."""
    x, n = np.asarray(x), x[0, ..., 0].size
    running = jax.tree.map(np.asarray, variables["batch_stats"])
    out = np.empty_like(x)
    for i, c in np.ndindex(len(x), x.shape[-1]):
        mean, var = running["mean"][c], running["var"][c]
        s_mean, s_var = np.sqrt((var + 1e-5) / n), (var + 1e-5) * np.sqrt(2 / (n - 1))
        values = x[i, ..., c]
        shrink = lambda d, t: d - t if d > t else d + t if d < -t else 0.0  # noqa: E731
        mean_adj = mean + shrink(values.mean() - mean, strength * s_mean)
        var_adj = max(var + shrink(values.var(ddof=1) - var, strength * s_var), 0)
        out[i, ..., c] = (values - mean_adj) / np.sqrt(var_adj + 1e-5)
    return out * variables["params"]["scale"] + variables["params"]["bias"]


@pytest.mark.parametrize("strength", [0.0, 4.0])
def test_iabn_is_the_published_rule(x64, strength):
    variables, x = one_layer()
    ours = predict(adaptation.iabn(LAYER, strength), variables, x)
    np.testing.assert_allclose(ours, iabn_numpy(x, variables, strength), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("training", [False, True])
def test_gates_sum_batch_and_instance_normalization(x64, training):
    """A gate a channel: instance norm alone, both, and batch norm alone."""
    gate = np.array([0.0, 0.4, 1.0])
    variables, x = one_layer()
    variables = batch_instance.with_gates(variables)
    variables["params"]["gate"] = jnp.asarray(gate)
    mutable = ["batch_stats"] if training else []
    passed = jax.jit(lambda variables: LAYER.apply(variables, x, mutable=mutable))
    with normalize_with(batch_instance.gated_statistics):
        ours, moved = passed(variables)
    running, flat = variables["batch_stats"], np.asarray(x).reshape(-1, 3)
    pair = (flat.mean(0), flat.var(0)) if training else (running["mean"], running["var"])
    plain = [(np.asarray(x) - m) / np.sqrt(v + 1e-5) for m, v in (pair, own_moments(x))]
    expected = gate * plain[0] + (1 - gate) * plain[1]
    expected = expected * variables["params"]["scale"] + variables["params"]["bias"]
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)
    if training:
        _, local = jax.jit(lambda w: LAYER.apply(w, x, mutable=mutable))(variables)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), moved, local)


def test_gates_start_as_batch_norm_in_every_layer_and_stay_in_their_range():
    images = nets.images_of(4)
    plain = nets.variables_of(MODEL, images)
    variables = batch_instance.with_gates(plain)
    for layer in (variables["params"]["block"]["inner"], variables["params"]["last"]):
        np.testing.assert_array_equal(layer["gate"], 1)
    ours = predict(adaptation.learned_alpha(MODEL), variables, images)
    np.testing.assert_allclose(ours, apply(plain, images), rtol=1e-4, atol=1e-5)

    optimizer = batch_instance.keep_gates(optax.sgd(1.0))
    params, update = variables["params"], jax.jit(optimizer.update)
    for step in (5.0, 0.25, -3.0):
        gradients = jax.tree.map(partial(jnp.full_like, fill_value=step), params)
        updates, _ = update(gradients, optimizer.init(params), params)
        moved = jax.tree.map(lambda w, u: np.asarray(w) + np.asarray(u), params, updates)
        expected = np.clip(1 - step, 0, 1)
        np.testing.assert_allclose(moved["middle"]["gate"], expected, rtol=1e-6)
        np.testing.assert_allclose(moved["out"]["bias"], params["out"]["bias"] - step, rtol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_mixnorm_mixes_the_moments_of_all_views(x64, weight):
    variables, x = one_layer()
    view = lambda key, images: images * jax.random.uniform(key, dtype=images.dtype)  # noqa: E731
    keys = jax.random.split(jax.random.key(2), 3)[1:]
    views = np.stack([x, *(np.asarray(view(key, x)) for key in keys)])
    flat = views.transpose(1, 0, 2, 3, 4).reshape(6, -1, 3)
    running = variables["batch_stats"]
    mean = weight * flat.mean(1) + (1 - weight) * running["mean"]
    var = weight * flat.var(1) + (1 - weight) * running["var"]
    adapt = adaptation.mixnorm(LAYER, weight, views=3, view=view, seed=2)
    expected = normal(x, mean[:, None, None], var[:, None, None], variables)
    np.testing.assert_allclose(predict(adapt, variables, x), expected, rtol=1e-10)


def test_the_ensemble_is_the_mean_of_its_members_probabilities(x64):
    variables, images = served()
    received = {name: variables[name] for name in ("params", "batch_stats")}
    members = []
    for seed in range(3):
        own = batch_instance.with_gates(nets.variables_of(MODEL, nets.images_of(4), seed))
        _, norms = sharing.split(own, sharing.all_but_batch_norm(own))
        members.append(jax.nn.softmax(apply(sharing.join(norms, received), images)))
    ours = predict(adaptation.ensemble(MODEL), variables, images)
    np.testing.assert_allclose(jnp.exp(ours), np.mean(members, 0), rtol=1e-10)


@pytest.mark.parametrize(("text", "name"), [("tsmobn", "tsmobn"), ("batch:affine=False", "affine")])
def test_a_model_without_batch_norm_is_refused_by_the_name_of_what_needs_it(text, name):
    with pytest.raises(ValueError, match=f"^{name}.* needs batch norms"):
        choose_adaptation(text, None).adaptation.init({"params": {}})
