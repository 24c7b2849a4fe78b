"""CSAC and FedADG: leaves weighed by divergence, stages compared, features drawn to a generator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import OneNorm, assert_close, assert_equal, batches_of, once, run_rounds
from federations import variables_of as start_of
from fedjax_bn.aggregation import by_divergence
from fedjax_bn.divergence import distances
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.local_step import differentiate
from fedjax_bn.methods import csac, fedadg, fedavg
from fedjax_bn.methods.csac import RATIOS, brought, stage_gaps
from fedjax_bn.methods.discrepancy import discrepancy
from fedjax_bn.methods.fedadg import generated, judged, pulled
from fedjax_bn.methods.learning import learning
from fedjax_bn.state import Received

KEY, SGD, NET = jax.random.key(3), optax.sgd(0.1), OneNorm()
SIZES = (9, 4, 6)


def variables_of():
    return jax.tree.map(lambda x: np.asarray(x, float), start_of(NET))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@functools.cache
def plain_rounds(rounds):
    """FedAvg's state."""
    method = once(fedavg, NET, SGD)
    return run_rounds(method, variables_of(), batches_of(SIZES), rounds=rounds)[0]


def test_a_leaf_weighs_a_client_by_its_distance_from_the_mean_of_those_who_count(x64):
    leaf, weights = normal(4, 3, 2), np.array([0.4, 0.4, 0.0, 0.4])
    leaf[2] = np.nan
    far = [np.linalg.norm(leaf[k] - leaf[[0, 1, 3]].mean(0)) for k in (0, 1, 3)]
    expected = 1.2 * np.array([far[0], far[1], 0, far[2]]) / sum(far)
    given = {"a": jnp.asarray(leaf), "b": None, "c": jnp.ones((4, 2))}
    ours = jax.jit(distances)(given, weights)
    np.testing.assert_allclose(ours["a"], expected, rtol=1e-12)
    assert ours["b"] is None
    np.testing.assert_allclose(ours["c"], weights, rtol=1e-12)  # all alike there


def test_a_round_weighed_by_leaf_is_the_mean_by_hand_and_who_sits_out_does_not_count(x64):
    batches = batches_of(SIZES) | {"participates": jnp.asarray([True, False, True])}
    fused = fedavg(NET, SGD, weigh=by_divergence(), clients="vmap:2")
    ours, metrics = run_rounds(fused, variables_of(), batches)
    alone, _ = run_rounds(fedavg(NET, SGD, share=_nothing), variables_of(), batches)
    trained = jax.tree.map(lambda x: np.asarray(x)[[0, 2]], client_variables(alone))
    # Two clients are equally far from their mean.
    assert_close(ours.shared, jax.tree.map(lambda x: x.mean(0), trained), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(metrics["weights"], [0.5, 0, 0.5], rtol=1e-12)


def _nothing(variables):
    return jax.tree.map(lambda _: False, variables)


def test_discrepancy_is_its_formula_and_none_of_equal_samples(x64):
    x, y, valid = normal(5, 3), normal(5, 3, seed=1), np.array([True] * 4 + [False])
    both = np.concatenate([x[:4], y[:4]])
    far = np.square(both[:, None] - both[None]).sum(-1)
    k = sum(np.exp(-far / (ratio * far.mean())) for ratio in (0.5, 2.0))
    expected = k[:4, :4].mean() + k[4:, 4:].mean() - 2 * k[:4, 4:].mean()
    measure = jax.jit(functools.partial(discrepancy, ratios=(0.5, 2.0)))
    np.testing.assert_allclose(measure(x, y, valid), expected, rtol=1e-10)
    np.testing.assert_allclose(measure(x, x, valid), 0, atol=1e-14)


def test_stages_are_compared_by_attention(x64):
    mine, theirs, valid = normal(2, 4, 6), normal(2, 4, 6, seed=1), np.array([True] * 3 + [False])
    energy = np.einsum("ibd,jbd->ij", mine[:, :3], theirs[:, :3]) / 3 / np.sqrt(6)
    a = np.exp(energy) / np.exp(energy).sum(1, keepdims=True)
    measure = jax.jit(functools.partial(discrepancy, ratios=RATIOS))
    gaps = np.asarray([[measure(t, s, valid) for s in theirs] for t in mine])
    ours = jax.jit(stage_gaps)(mine, theirs, valid)
    np.testing.assert_allclose(ours, (a * gaps).sum(), rtol=1e-10)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (14, 7), (4, 9), (1, 1)])
def test_stages_are_brought_to_a_size_by_jaxs_bilinear_sampling_and_a_layer(height, width, x64):
    x, layer = normal(3, height, width, 5), {"kernel": normal(5, 32), "bias": normal(32)}
    sampled = np.asarray(jax.image.resize(x, (3, 7, 7, 5), "linear"))
    ours = brought({"a": layer}, {"a": jnp.asarray(x)})
    expected = (sampled @ layer["kernel"] + layer["bias"]).reshape(1, 3, -1)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


BY_SIZE = {"weigh": lambda sizes, risks: sizes.astype(float)}


def test_csac_calibrates_from_a_clients_second_round_on(x64):
    """Weighed by size its first round is FedAvg's."""
    method, batches = csac(NET, SGD, **BY_SIZE), batches_of(SIZES)
    first, _ = run_rounds(method, variables_of(), batches, key=KEY)
    own = jax.tree.map(jnp.copy, first.memory.method["model"])
    assert (own["params"]["c"]["kernel"][0] != own["params"]["c"]["kernel"][1]).any()
    once, twice = plain_rounds(1), plain_rounds(2)
    shared = {name: first.shared[name] for name in once.shared}
    assert_close(shared, once.shared, rtol=1e-10, atol=1e-12)
    second = method.round(first, batches, KEY)[0]
    gap = second.shared["params"]["c"]["kernel"] - twice.shared["params"]["c"]["kernel"]
    assert abs(gap).max() > 1e-5


@pytest.mark.slow
def test_csac_without_calibration_is_fedavg_with_its_weighing(x64):
    off = csac(NET, SGD, calibration=0.0, **BY_SIZE)
    ours, _ = run_rounds(off, variables_of(), batches_of(SIZES), rounds=2)
    assert_close(ours.shared, plain_rounds(2).shared, rtol=1e-10, atol=1e-12)


def test_fedadg_with_all_weight_on_cross_entropy_is_fedavg(x64):
    method = fedadg(NET, SGD, share_of_loss=1.0, hidden=4, projection=3)
    ours, _ = run_rounds(method, variables_of(), batches_of(SIZES), rounds=2)
    names = ("params", "batch_stats")
    shared = {name: ours.shared[name] for name in names}
    assert_close(shared, plain_rounds(2).shared, rtol=1e-10, atol=1e-12)
    found = client_variables(ours)
    assert (found["discriminator"]["out"][0] != found["discriminator"]["out"][1]).all()
    assert ours.shared["generator"]["out"].shape == (4, 8)


@pytest.mark.slow
def test_where_the_network_classifies_alone_nobody_else_moves(x64):
    method = fedadg(NET, SGD, alone=1.0, hidden=4, projection=3)
    start = method.init(KEY, variables_of(), 3)
    before = jax.tree.map(jnp.copy, (start.shared["generator"], start.personal))
    ours, _ = method.round(start, batches_of(SIZES), KEY)
    assert_close(ours.shared["generator"], before[0], rtol=1e-14)
    assert_equal(ours.personal, before[1])


def test_fedadgs_networks_are_their_formulas_and_a_sure_discriminator_does_not_pull(x64):
    method = fedadg(NET, SGD, hidden=4, projection=3)
    made = jax.jit(lambda v: method.init(KEY, v, 1))(variables_of())
    variables = global_variables(made)
    batch = {name: leaf[0, 0] for name, leaf in batches_of((4,)).items()}
    f, y = normal(4, 8), np.asarray(batch["label"])
    read = np.concatenate([f, np.eye(3)[y]], 1)
    own = jax.tree.map(np.asarray, variables["discriminator"])
    lengths = np.linalg.norm(own["projection"], axis=0)
    leaky = lambda x: np.where(x > 0, x, 0.01 * x)  # noqa: E731
    logits = leaky(read @ own["projection"] / lengths) @ own["out"] + own["bias"]
    ours = judged(own, jnp.asarray(f), batch["label"])
    np.testing.assert_allclose(ours, 1 / (1 + np.exp(-logits)), rtol=1e-10)

    g, key = jax.tree.map(np.asarray, variables["generator"]), jax.random.key(5)
    noise = np.asarray(jax.random.uniform(key, (4, 8), float))
    hidden = leaky(np.concatenate([noise, np.eye(3)[y]], 1) @ g["kernel"] + g["bias"])
    expected = np.maximum(hidden @ g["out"] + g["out_bias"], 0)
    np.testing.assert_allclose(generated(g, batch["label"], key), expected, rtol=1e-10)

    sure = variables | {"discriminator": own | {"bias": np.asarray(60.0)}}
    gradient = jax.jit(
        lambda w, a: differentiate(pulled(learning(NET)[0], a))(w, batch, Received((), ()), KEY)[0]
    )
    pull, alone = gradient(sure, 0.15), gradient(sure, 1.0)
    assert_close(pull, jax.tree.map(lambda x: 0.15 * x, alone), rtol=1e-9, atol=1e-14)


def test_a_share_of_no_step_is_refused():
    with pytest.raises(ValueError, match=r"alone=1\.5 must be at least 0 and at most 1"):
        fedadg(NET, SGD, alone=1.5)
