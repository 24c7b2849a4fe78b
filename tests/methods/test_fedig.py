"""FedIG and FedIG-A: the objective by hand, what its gradients reach, and what the server sends."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from federations import (
    assert_close,
    assert_equal,
    begun,
    client,
    client_variables,
    global_variables,
)
from fedjax_bn.aggregation import ServerState
from fedjax_bn.methods import fedbn
from fedjax_bn.methods.fedig import adapter_step, client_agnostic_objective, fedig
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.models import MLP
from fedjax_bn.models.classifier import features_method
from fedjax_bn.normalization import BatchNorm, batch_instance, normalize_with
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.normalization.mixig import (
    choose_mixing,
    constant,
    mixed_statistics,
    mixstyle_statistics,
    uniform,
)
from fedjax_bn.state import Received

MODEL = nets.HandMade()
KEY = jax.random.key(7)


class Tiny(nn.Module):
    """One batch norm, the mean of its map, a classifier; small enough for NumPy."""

    @nn.compact
    def __call__(self, images):
        return nn.Dense(nets.CLASSES, name="out")(nn.relu(BatchNorm(name="n")(images)).mean((1, 2)))


def batch_of(count=6, seed=0):
    images = nets.images_of(count, seed)
    labels = jnp.asarray(np.random.default_rng(seed).integers(0, nets.CLASSES, count), jnp.int32)
    return {"image": images, "label": labels, "valid": jnp.arange(count) < count - 1}


def batches_of(clients=3, steps=4, size=6):
    flat = [[batch_of(size, 10 * k + s) for s in range(steps)] for k in range(clients)]
    rows = [jax.tree.map(lambda *leaves: np.stack(leaves), *row) for row in flat]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def start(model=MODEL):
    """Distinct common start and distinct global statistics."""
    images = nets.images_of(2)
    variables = nets.variables_of(model, images)
    return variables, nets.variables_of(model, images, seed=1)["batch_stats"]


def run(method, variables, batches, rounds=2):
    state = begun(method, KEY, variables, batches["label"].shape[0])
    for _ in range(rounds):
        state, metrics = method.round(state, batches, KEY)
    return state, metrics


def tiny_numpy(variables, global_, batch, u):
    """L_CE, L_CACL, L_CAFL of `Tiny` for one u, by the equations."""
    p = jax.tree.map(np.asarray, variables["params"])
    x = np.asarray(batch["image"])[:-1]  # the last sample is padding
    labels = np.asarray(batch["label"])[:-1]

    def features(mean, std):
        normal = (x - mean) / std * p["n"]["scale"] + p["n"]["bias"]
        return np.maximum(normal, 0).mean((1, 2))

    def error(f):
        logits = f @ p["out"]["kernel"] + p["out"]["bias"]
        return -np.mean(
            [row[y] - np.log(np.exp(row).sum()) for row, y in zip(logits, labels, strict=True)]
        )

    own = features(x.mean((0, 1, 2)), np.sqrt(x.var((0, 1, 2)) + 1e-5))
    mean = u * x.mean((1, 2), keepdims=True) + (1 - u) * np.asarray(global_["n"]["mean"])
    std = u * np.sqrt(x.var((1, 2), keepdims=True) + 1e-5)
    mixed = features(mean, std + (1 - u) * np.sqrt(np.asarray(global_["n"]["var"]) + 1e-5))
    return error(own), error(mixed), np.mean(((own - mixed) ** 2).sum(1))


@pytest.mark.parametrize("u", [0.5, 1.0])
def test_the_objective_is_equations_2_to_6(x64, u):
    variables, global_ = start(Tiny())
    batch = batch_of()
    objective = client_agnostic_objective(
        learning(Tiny())[0], 0.1, 4.0, lambda key: mixed_statistics(key, constant(u))
    )
    received = Received({}, {}, server=global_)
    value, (loss, _) = jax.jit(objective)(variables, batch, received, KEY)
    error, agnostic, distance = tiny_numpy(variables, global_, batch, u)
    np.testing.assert_allclose(loss, error, rtol=1e-10)
    np.testing.assert_allclose(value, error + 0.1 * agnostic + 4.0 * distance, rtol=1e-10)


LEARNED, _ = learning(Tiny())


@cache
def gradient_of(lambda_1, lambda_2, **options):
    """Gradients with respect to the parameters, and what moved, in float64."""
    with jax.enable_x64(True):
        variables, global_ = start(Tiny())
        variables = batch_instance.with_gates(variables)
        objective = client_agnostic_objective(LEARNED, lambda_1, lambda_2, **options)
        received = Received({}, {}, server=global_)

        def value(params):
            return objective({**variables, "params": params}, batch_of(), received, KEY)

        gradients, (_, moved) = jax.jit(jax.grad(value, has_aux=True))(variables["params"])
        return jax.device_get((gradients, moved))


def test_the_gradient_of_cacl_reaches_only_the_classifier(x64):
    (with_it, _), (without, _) = gradient_of(0.1, 0.0), gradient_of(0.0, 0.0)
    assert np.abs(with_it["out"]["kernel"] - without["out"]["kernel"]).max() > 1e-4
    assert_close(with_it["n"], without["n"], 1e-12, 1e-14)


def test_the_gradient_of_cafl_reaches_all_but_the_classifier(x64):
    (with_it, _), (without, _) = gradient_of(0.0, 4.0), gradient_of(0.0, 0.0)
    assert_close(with_it["out"], without["out"], 1e-12, 1e-14)
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), with_it["n"], without["n"])
    assert max(jax.tree.leaves(changes)) > 1e-6


def test_the_mixed_pass_moves_no_running_statistics(x64):
    _, moved = gradient_of(0.0, 4.0)
    variables, _ = start(Tiny())
    _, (_, local) = jax.jit(supervised(LEARNED))(variables, batch_of(), Received({}, {}), KEY)
    assert_close(moved, local, 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"statistics": batch_instance.gated_statistics},
        pytest.param({"mixing": mixstyle_statistics}, marks=pytest.mark.slow),
    ],
)
def test_variants_train_and_differ(options):
    plain, _ = gradient_of(0.0, 4.0)
    other, _ = gradient_of(0.0, 4.0, **options)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(other))
    leaf = "gate" if "statistics" in options else "scale"
    assert np.abs(plain["n"][leaf] - other["n"][leaf]).max() > 1e-6


OPTIONS = {
    "fedbn": {},
    "without losses": {"lambda_1": 0, "lambda_2": 0},
    "fedig": {},
    "fedig-a": {"adapter": True, "clients": "map"},
    "fedig-a, vmap": {"adapter": True, "clients": "vmap"},
}


@cache
def trained(name):
    """Two rounds in float64: (state, metrics)."""
    model = Tiny()  # federations compile for long
    make = fedbn if name == "fedbn" else fedig
    with jax.enable_x64(True):
        variables = with_adapter(KEY, model, start(model)[0], nets.images_of(2))
        method = make(model, optax.sgd(0.1), **OPTIONS[name])
        return run(method, variables, batches_of(clients=2, steps=2))


def test_with_both_lambdas_0_it_is_fedbn_with_the_same_keys(x64):
    (ours, metrics), (theirs, expected) = trained("without losses"), trained("fedbn")
    assert_close(client_variables(ours), client_variables(theirs), 1e-12)
    assert_close(metrics["loss"], expected["loss"], 1e-12)
    changes = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()),
        *jax.device_get((theirs.shared, trained("fedig")[0].shared)),
    )
    assert max(jax.tree.leaves(changes)) > 1e-3


def test_the_server_sends_the_mean_statistics_of_the_last_round(x64):
    variables, _ = start(Tiny())
    method = fedig(Tiny(), optax.sgd(0.1))
    state = begun(method, KEY, variables, 3)
    assert_equal(state.server.sent, variables["batch_stats"])
    batches = batches_of(steps=1) | {
        "size": np.asarray([5, 1, 2], np.int32),
        "participates": np.arange(3) < 2,
    }
    state, _ = method.round(state, batches, KEY)
    assert_close(state.server.sent, global_variables(state)["batch_stats"], 1e-12)
    own = client_variables(state)["batch_stats"]
    mean = jax.tree.map(lambda leaf: (5 * leaf[0] + leaf[1]) / 6, jax.device_get(own))
    assert_close(state.server.sent, mean, 1e-12)
    assert_equal(client(own, 2), variables["batch_stats"])


def test_clients_train_with_what_the_server_sends(x64):
    """Other global statistics give other parameters, the first step's loss stays."""
    variables, global_ = start(Tiny())
    method, batches = fedig(Tiny(), optax.sgd(0.1), mixing="constant:u=0.5"), batches_of(steps=1)
    plain, metrics = method.round(begun(method, KEY, variables, 3), batches, KEY)
    state = begun(method, KEY, variables, 3)
    other, same = method.round(state._replace(server=ServerState(sent=global_)), batches, KEY)
    assert_equal(metrics["loss"], same["loss"])
    scales = [np.asarray(state.personal["params"]["n"]["scale"]) for state in (plain, other)]
    assert np.abs(scales[0] - scales[1]).max() > 1e-6


def test_the_adapter_trains_beside_a_main_network_that_does_not_notice(x64):
    (main, metrics), (both, same) = trained("fedig"), trained("fedig-a")
    ours, theirs = client_variables(both), client_variables(main)
    moved, still = ours.pop("adapter"), theirs.pop("adapter")
    assert_close(ours, theirs, 1e-11)
    assert_close(metrics["loss"], same["loss"], 1e-11)
    moved, still = jax.device_get((moved, still))
    changes = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), moved, still)
    assert min(layer["out"]["bias"] for layer in changes.values()) > 0


def test_the_adapter_is_shared_and_averaged():
    state, _ = trained("fedig-a")
    assert jax.tree.leaves(state.personal["adapter"]) == []
    assert state.shared["adapter"]["n"]["hidden"]["kernel"].shape == (6, 1)


def test_an_adapters_step_moves_only_the_adapter(x64):
    variables, global_ = start(Tiny())
    variables = with_adapter(KEY, Tiny(), variables, nets.images_of(2))
    step = adapter_step(LEARNED, optax.sgd(0.1))
    received = Received({}, {}, server=global_)
    state = step.init(variables)
    after, _, _ = jax.jit(step.update)(variables, state, batch_of(), received, KEY)
    assert_equal(
        {k: v for k, v in after.items() if k != "adapter"},
        {k: v for k, v in variables.items() if k != "adapter"},
    )
    with pytest.raises(AssertionError):
        assert_close(after["adapter"], variables["adapter"])


def test_an_adapter_is_made_at_init_where_there_is_none():
    variables, _ = start()
    method = fedig(MODEL, optax.sgd(0.1), adapter=True)
    state = jax.eval_shape(lambda: begun(method, KEY, variables, 2))
    assert set(state.shared["adapter"]) == {"block/inner", "middle"}  # "last" has no spatial axes


@pytest.mark.slow
def test_client_strategies_agree(x64):
    (one, _), (other, _) = trained("fedig-a"), trained("fedig-a, vmap")
    assert_close(client_variables(one), client_variables(other), 1e-9, 1e-12)


def test_gates_are_made_at_init_and_belong_to_the_clients():
    variables, _ = start()
    state = fedig(MODEL, optax.sgd(0.1), gates=True).init(KEY, variables, 2)
    np.testing.assert_array_equal(state.personal["params"]["middle"]["gate"], np.ones((2, 16)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniforn", "'uniforn' is unknown; did you mean 'uniform'\\? valid are constant, mixstyle"),
        ("uniform:u=1", "must be key=value with a key of high, low"),
        ("constant:u=half", "u='half' is of type str, but it must be float"),
    ],
)
def test_a_wrong_mixing_is_one_clear_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        fedig(MODEL, optax.sgd(0.1), mixing=text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("uniform:low=-0.1:high=1.1", partial(mixed_statistics, draw=uniform(-0.1, 1.1))),
        ("constant:u=1", partial(mixed_statistics, draw=constant(1.0))),
        pytest.param(
            "mixstyle:probability=1",
            partial(mixstyle_statistics, probability=1.0),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_text_of_a_mixing_spells_its_rule(text, rule):
    layer, x = BatchNorm(), nets.images_of(3)
    variables = nets.variables_of(layer, x)
    results = []
    for mixing in (choose_mixing(text), rule):
        with normalize_with(mixing(KEY)):
            results.append(jax.jit(layer.apply)(variables, x))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["lambda_1", "lambda_2"])
def test_a_negative_lambda_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name}=-1"):
        fedig(MODEL, optax.sgd(0.1), **{name: -1})


def test_features_of_a_hand_made_model_are_what_its_last_dense_layer_reads(x64):
    variables, _ = start()
    images = nets.images_of(3)
    method = features_method(MODEL, variables, images)
    features, logits = jax.jit(lambda w: MODEL.apply(w, images, method=method))(variables)
    expected = jax.jit(MODEL.apply)(variables, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-13)
    out = variables["params"]["out"]
    np.testing.assert_allclose(features @ out["kernel"] + out["bias"], logits, rtol=1e-12)


def test_features_of_our_models_are_their_own():
    model, images = MLP(hidden=(8,)), jnp.zeros((2, 5))
    variables = model.init(KEY, images)
    features, logits = model.apply(
        variables, images, method=features_method(model, variables, images)
    )
    assert_equal(features, model.apply(variables, images, method="features"))
    assert_equal(logits, model.apply(variables, images))
