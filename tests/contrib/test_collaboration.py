"""COPA, CSAC and FedADG: what clients get of the others' classifiers, leaves and features."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.contrib import copa, csac, fedadg
from fedjax_bn.contrib.csac import calibrated_objective, discrepancy, stage_gaps, stages_brought
from fedjax_bn.contrib.fedadg import generated_features, pulled_to_discriminator
from fedjax_bn.engine.weighing import by_divergence
from fedjax_bn.methods import fedavg
from fedjax_bn.methods.learning import learning
from fedjax_bn.models.forward import forward
from fedjax_bn.state import Received

KEY, NET = jax.random.key(3), fed.OneNorm()
SIZES = (9, 4, 6)
SMALL = {"hidden": 4, "projection": 3, "judging": 2}


def variables_of():
    return fed.in_float64(fed.variables_of(NET))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@functools.cache
def plain_rounds(rounds):
    """FedAvg's state."""
    method = fed.once(fedavg, NET, fed.SGD)
    return fed.run_rounds(method, variables_of(), fed.batches_of(SIZES), rounds=rounds)[0]


def test_a_leaf_weighs_a_client_by_its_distance_from_the_mean_of_those_who_count(x64):
    leaf, weights = normal(4, 3, 2), np.array([0.4, 0.4, 0.0, 0.4])
    leaf[2] = np.nan
    far = [np.linalg.norm(leaf[k] - leaf[[0, 1, 3]].mean(0)) for k in (0, 1, 3)]
    expected = 1.2 * np.array([far[0], far[1], 0, far[2]]) / sum(far)
    given = {"a": jnp.asarray(leaf), "b": None, "c": jnp.ones((4, 2))}
    ours, same = jax.jit(by_divergence().combine)(given, None, jnp.asarray(weights))
    combined = np.einsum("k,kij->ij", expected[[0, 1, 3]], leaf[[0, 1, 3]])
    np.testing.assert_allclose(ours["a"], combined, rtol=1e-12)
    assert ours["b"] is None
    np.testing.assert_allclose(ours["c"], [1.2, 1.2], rtol=1e-12)  # all alike there
    np.testing.assert_array_equal(same, weights)


def test_stages_are_compared_by_attention(x64):
    mine, theirs, valid = normal(2, 4, 6), normal(2, 4, 6, seed=1), np.array([True] * 3 + [False])
    energy = np.einsum("ibd,jbd->ij", mine[:, :3], theirs[:, :3]) / 3 / np.sqrt(6)
    a = np.exp(energy) / np.exp(energy).sum(1, keepdims=True)
    measure = jax.jit(discrepancy)
    gaps = np.asarray([[measure(t, s, valid) for s in theirs] for t in mine])
    ours = jax.jit(stage_gaps)(mine, theirs, valid)
    np.testing.assert_allclose(ours, (a * gaps).sum(), rtol=1e-10)


@pytest.mark.parametrize(("height", "width"), [(28, 14), (4, 9), (1, 1)])
def test_stages_are_brought_to_a_size_by_jaxs_bilinear_sampling_and_a_layer(height, width, x64):
    x, layer = normal(3, height, width, 5), {"kernel": normal(5, 32), "bias": normal(32)}
    sampled = np.asarray(jax.image.resize(x, (3, 7, 7, 5), "linear"))
    ours = stages_brought({"a": layer}, {"a": jnp.asarray(x)})
    expected = (sampled @ layer["kernel"] + layer["bias"]).reshape(1, 3, -1)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


class Mapped(nn.Module):
    """A map, then a classifier of its mean."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="c")(nn.Dense(5, name="a")(x).mean((1, 2)))


@pytest.mark.parametrize("stages", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_csacs_objective_is_cross_entropy_and_its_gaps_to_the_frozen_model(stages, x64):
    method, images = csac(Mapped(), fed.SGD, stages=stages, names="a"), normal(4, 3, 2, 1)
    starts = (Mapped().init(key, np.float32(images)) for key in jax.random.split(KEY))
    mine, own = map(fed.in_float64, starts)
    variables = fed.in_float64(fed.global_variables(fed.begun(method, KEY, mine, 1)))
    batch = {"image": images, "label": np.array([0, 2, 1, 0]), "valid": np.ones(4, bool)}
    memory = {"model": own, "trained": np.array(True)}
    objective = calibrated_objective(learning(Mapped())[0], 0.6)
    received = Received((), (), memory)
    value, (loss, _) = jax.jit(lambda w: objective(w, batch, received, KEY))(variables)

    def seen(model):
        x = normal(4, 3, 2, 1) @ np.asarray(model["params"]["a"]["kernel"])
        return x + np.asarray(model["params"]["a"]["bias"])

    def logits(model):
        dense = model["params"]["c"]
        return seen(model).mean((1, 2)) @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])

    def mmd(x, y):
        both = np.concatenate([x, y])
        far = np.square(both[:, None] - both[None]).sum(-1)
        k = sum(np.exp(-far / (2 * 3.0**k * far.mean())) for k in range(-3, 2))
        return k[:4, :4].mean() + k[4:, 4:].mean() - 2 * k[:4, 4:].mean()

    expected = mmd(logits(mine), logits(own))
    if stages:
        t, s = (
            stages_brought(
                {"a": variables["calibration"][who]["a"]}, {"a": jnp.asarray(seen(model))}
            )[0]
            for who, model in (("trained", mine), ("frozen", own))
        )
        expected += mmd(np.asarray(t), np.asarray(s))  # the attention of a single stage is 1
    np.testing.assert_allclose(value - loss, 0.6 * expected, rtol=1e-9)


@pytest.mark.slow
def test_fedadg_with_all_weight_on_cross_entropy_is_fedavg(x64):
    method = fedadg(NET, fed.SGD, share_of_loss=1.0, **SMALL)
    ours, _ = fed.run_rounds(method, variables_of(), fed.batches_of(SIZES), rounds=2)
    names = ("params", "batch_stats")
    shared = {name: ours.shared[name] for name in names}
    fed.assert_close(shared, plain_rounds(2).shared, rtol=1e-10, atol=1e-12)
    found = fed.client_variables(ours)
    assert (found["discriminator"]["out"][0] != found["discriminator"]["out"][1]).all()
    assert ours.shared["generator"]["out"].shape == (4, 8)


def test_fedadgs_networks_and_objective_are_their_formulas(x64):
    method = fedadg(NET, fed.SGD, **SMALL)
    made = jax.jit(lambda v: fed.begun(method, KEY, v, 1))(variables_of())
    variables = fed.global_variables(made)
    batch = {name: leaf[0, 0] for name, leaf in fed.batches_of((4,)).items()}
    y, plain = np.asarray(batch["label"]), {n: variables[n] for n in ("params", "batch_stats")}
    out = forward(NET, plain, batch["image"], train=True, wanted=["features"])
    f, own = np.asarray(out.features), jax.tree.map(np.asarray, variables["discriminator"])
    assert (own["projection"].shape, own["kernel"].shape) == ((8, 3), (3 + 3, 2))
    leaky = lambda x: np.where(x > 0, x, 0.01 * x)  # noqa: E731
    read = np.concatenate([f @ own["projection"], np.eye(3)[y]], 1)
    logits = leaky(read @ own["kernel"] + own["bias"]) @ own["out"] + own["out_bias"]
    gap = np.square(1 - 1 / (1 + np.exp(-logits))).mean()
    objective = pulled_to_discriminator(learning(NET)[0], 0.85)
    value, (loss, _) = jax.jit(lambda w: objective(w, batch, Received((), ()), KEY))(variables)
    entropy = optax.softmax_cross_entropy_with_integer_labels(out.outputs, y).mean()
    np.testing.assert_allclose((value, loss), (0.85 * entropy + 0.15 * gap, entropy), rtol=1e-10)

    g, key = jax.tree.map(np.asarray, variables["generator"]), jax.random.key(5)
    noise = np.asarray(jax.random.uniform(key, (4, 8), float))
    hidden = leaky(np.concatenate([noise, np.eye(3)[y]], 1) @ g["kernel"] + g["bias"])
    expected = np.maximum(hidden @ g["out"] + g["out_bias"], 0)
    np.testing.assert_allclose(generated_features(g, batch["label"], key), expected, rtol=1e-10)


@pytest.mark.slow
def test_a_step_descends_along_all_classifiers_and_moves_its_own_by_its_loss_alone(x64):
    """By hand: three classifiers as arrays, the others' constant."""
    method, variables = fed.once(copa, NET, fed.SGD, gates=False), variables_of()
    batches = fed.batches_of((3, 3, 3))
    state = fed.begun(method, KEY, variables, 3)
    random = np.random.default_rng(0)
    heads = {
        "kernel": random.normal(size=(3, 8, fed.CLASSES)),
        "bias": random.normal(size=(3, fed.CLASSES)),
    }
    state = state._replace(server=state.server._replace(sent=jax.tree.map(jnp.asarray, heads)))
    after, _ = method.round(state, batches, KEY)
    total = jax.tree.map(np.zeros_like, variables["params"])

    @jax.jit
    @jax.grad
    def gradient_of(params, x, y, others):
        def error(params):
            logits, _ = NET.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return error(params) + sum(error(params | {"c": other}) for other in others)

    for k in range(3):
        x, y = (np.asarray(batches[name])[k, 0, :3] for name in ("image", "label"))
        others = [jax.tree.map(lambda x, j=j: x[j], heads) for j in {0, 1, 2} - {k}]
        gradient = gradient_of(variables["params"], x, y, others)
        total = jax.tree.map(lambda t, g: t + g / 3, total, gradient)
        own = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"]["c"], gradient["c"])
        found = fed.client_variables(after)["params"]["c"]
        fed.assert_close(jax.tree.map(lambda x, k=k: x[k], found), own, rtol=1e-9, atol=1e-12)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], total)
    fed.assert_close(fed.global_variables(after)["params"], expected, rtol=1e-9, atol=1e-12)


def test_the_server_keeps_every_clients_last_classifier(x64):
    method, batches = copa(NET, fed.SGD), fed.batches_of(SIZES)
    state = fed.begun(method, KEY, variables_of(), 3)
    for present in (jnp.ones(3, bool), jnp.asarray([True, False, True])):
        state, _ = method.round(state, batches | {"participates": present}, KEY)
        own = fed.client_variables(state)["params"]["c"]
        fed.assert_close(state.server.sent, own, rtol=1e-12)
    assert (own["kernel"][0] != own["kernel"][1]).any()
    gate = fed.client_variables(state)["params"]["a"]["gate"]
    assert ((gate >= 0) & (gate <= 1)).all()
