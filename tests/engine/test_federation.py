"""The round as a pure function: masks, sizes, participation, non-finite updates, strategies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import (
    CLASSES,
    FEATURES,
    SGD,
    DropoutNet,
    OneNorm,
    PlainNet,
    assert_close,
    assert_equal,
    batches_of,
    begun,
    client,
    in_float64,
    once,
    run_rounds,
    variables_of,
    with_value,
)
from fedjax_bn.aggregation import by_size, uniform
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedavg, fedavgm, fedbn, fedprox, singleset

SIZES = (9, 4, 6)


def test_one_step_of_fedavg_is_a_step_on_the_pooled_gradient(x64):
    batches = batches_of((4, 3, 2), batch=4)
    variables = in_float64(variables_of(PlainNet()))
    state, metrics = run_rounds(once(fedavg, PlainNet(), SGD), variables, batches)
    # Softmax regression in NumPy: the gradient of the mean cross entropy over all valid samples.
    valid = np.asarray(batches["valid"]).ravel()
    x = np.asarray(batches["image"]).reshape(-1, FEATURES)[valid]
    y = np.eye(CLASSES)[np.asarray(batches["label"]).ravel()[valid]]
    dense = jax.tree.map(np.asarray, variables["params"]["dense"])
    z = x @ dense["kernel"] + dense["bias"]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    expected = {
        "bias": dense["bias"] - 0.1 * (p - y).mean(0),
        "kernel": dense["kernel"] - 0.1 * x.T @ (p - y) / len(x),
    }
    assert_close(global_variables(state)["params"]["dense"], expected, rtol=1e-10)
    np.testing.assert_allclose(metrics["weights"], np.array([4, 3, 2]) / 9, rtol=1e-12)
    pooled = -(np.log(p) * y).sum(1).mean()
    np.testing.assert_allclose(metrics["loss"] @ metrics["weights"], pooled, rtol=1e-10)


def test_padding_changes_nothing(x64):
    method = fedbn(OneNorm(), optax.sgd(0.1, momentum=0.9))
    variables = in_float64(variables_of(OneNorm()))
    padded, metrics = run_rounds(method, variables, batches_of((10,), steps=5))
    short = batches_of((10,), steps=5)  # the last batch has two samples
    model, optimizer = OneNorm(), optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(variables["params"])

    @jax.jit
    def step(variables, state, x, y):
        def loss(params):
            out, moved = model.apply(variables | {"params": params}, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), moved

        (_, moved), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(grads, state)
        return {"params": optax.apply_updates(variables["params"], updates), **moved}, state

    for s, n in enumerate((4, 4, 2)):
        x, y = (np.asarray(short[name])[0, s, :n] for name in ("image", "label"))
        variables, state = step(variables, state, x, y)
    assert_close(client(client_variables(padded), 0), variables, rtol=1e-10, atol=1e-12)
    assert np.count_nonzero(metrics["step_loss"]) == 3


def test_a_client_that_sits_out_keeps_what_is_its_own_and_has_no_weight(x64):
    # In float32 Adam would make steps of the rounding errors of biases in front of a batch norm.
    method = once(fedbn, OneNorm(), optax.adam(0.01), keep_optimizer=True)
    variables = in_float64(variables_of(OneNorm()))
    batches, key = batches_of(SIZES), jax.random.key(1)
    before, _ = run_rounds(method, variables, batches)
    kept = jax.tree.map(np.array, (before.personal, before.memory))
    poisoned = with_value(batches, 1, np.nan)
    participates = {"participates": jnp.array([True, False, True])}
    after, metrics = method.round(before, poisoned | participates, key)
    assert_equal(client((after.personal, after.memory), 1), client(kept, 1))
    np.testing.assert_allclose(metrics["weights"], [0.6, 0, 0.4], rtol=1e-6)
    assert np.isnan(metrics["loss"][1])
    assert metrics["finite"].all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(global_variables(after)))


def test_no_client_takes_part_and_nothing_changes():
    method = once(fedbn, OneNorm(), SGD)
    batches = batches_of(SIZES) | {"participates": jnp.zeros(3, bool)}
    state = begun(method, jax.random.key(0), variables_of(OneNorm()), 3)
    before = jax.tree.map(np.array, state)
    after, metrics = method.round(state, batches, jax.random.key(0))
    assert_equal(after._replace(round=before.round), before)
    assert int(after.round) == 1
    assert_equal(metrics["weights"], jnp.zeros(3))


def test_a_step_of_the_server_that_is_not_finite_is_reported_and_not_taken():
    method = fedavgm(PlainNet(), optax.sgd(100.0), eta=3e38)
    variables, batches = variables_of(PlainNet()), batches_of(SIZES)
    before = jax.tree.map(jnp.copy, begun(method, jax.random.key(0), variables, len(SIZES)))
    state, metrics = run_rounds(method, variables, batches)
    assert not metrics["server_finite"]
    assert metrics["finite"].all()
    assert_equal((state.shared, state.server), (before.shared, before.server))
    assert bool(run_rounds(once(fedavg, PlainNet(), SGD), variables, batches)[1]["server_finite"])


def test_the_state_is_donated_and_the_callers_variables_are_not():
    method = once(fedbn, OneNorm(), SGD)
    variables = variables_of(OneNorm())
    batches, key = batches_of(SIZES), jax.random.key(0)
    state = method.init(key, variables, 3)
    mine, received = client_variables(state), global_variables(state)
    new, _ = method.round(state, batches, key)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for tree in (variables, mine, received, new, batches):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def test_a_round_compiles_once():
    """Neither the state of `init` nor that of a round is of another form than the other."""
    method = once(fedbn, OneNorm(), SGD)
    run_rounds(method, variables_of(OneNorm()), batches_of(SIZES))
    first = method.round._cache_size()
    run_rounds(method, variables_of(OneNorm()), batches_of(SIZES), rounds=4)
    assert method.round._cache_size() == first > 0


def test_a_round_is_reproducible_and_keys_differ_between_rounds_and_clients():
    same = jax.tree.map(lambda x: np.repeat(x, 2, 0), batches_of((8,)))
    method = fedavg(DropoutNet(), optax.sgd(0.0))
    state = begun(method, jax.random.key(0), variables_of(DropoutNet()), 2)
    losses = []
    for _ in range(2):
        state, metrics = method.round(state, same, jax.random.key(5))
        losses += metrics["loss"].tolist()
    assert len(set(losses)) == 4  # the weights never move: only dropout differs
    _, metrics = run_rounds(method, variables_of(DropoutNet()), same, 2, jax.random.key(5))
    assert metrics["loss"].tolist() == losses[2:]


def test_fedprox_step_has_the_closed_form(x64):
    variables = in_float64(variables_of(PlainNet()))
    one = batches_of((4,))
    batches = jax.tree.map(lambda x: np.concatenate([x, x], 1), one)  # two equal steps
    start = variables["params"]["dense"]["bias"]

    def bias(method, batches):
        state, _ = run_rounds(method, variables, batches)
        return np.asarray(state.shared["params"]["dense"]["bias"])

    avg, prox = once(fedavg, PlainNet(), SGD), once(fedprox, PlainNet(), SGD, mu=0.5)
    first, second = bias(avg, one), bias(avg, batches)
    # The first step starts at the received model; the second adds -lr * mu * (w - w_received).
    np.testing.assert_allclose(bias(prox, one), first, rtol=1e-12)
    np.testing.assert_allclose(
        bias(prox, batches), second - 0.1 * 0.5 * (first - start), rtol=1e-10
    )


def test_fedbn_averages_all_but_what_stands_under_a_batch_norms_name(x64):
    """Algorithm 1 by hand: clients trained alone, then NumPy's weighted mean of dense layers."""
    variables, batches = in_float64(variables_of(OneNorm())), batches_of(SIZES)
    state, _ = run_rounds(once(fedbn, OneNorm(), SGD), variables, batches)
    alone = [
        run_rounds(once(fedavg, OneNorm(), SGD), variables, client(batches, [k]))[0]
        for k in range(3)
    ]
    seen = set()
    for path, leaf in jax.tree.leaves_with_path(client_variables(state)):
        _, layer, name = (entry.key for entry in path)
        trained = []
        for variables in map(global_variables, alone):
            (found,) = (own for at, own in jax.tree.leaves_with_path(variables) if at == path)
            trained.append(np.asarray(found))
        if layer != "a":  # the batch norm; bn is a dense layer
            trained = [np.average(trained, axis=0, weights=SIZES)] * 3
            seen.add(layer)
        np.testing.assert_allclose(leaf, np.stack(trained), rtol=1e-9, atol=1e-12, err_msg=name)
    assert seen == {"bn", "c"}


def test_singleset_trains_every_client_as_if_alone(x64):
    variables, batches = in_float64(variables_of(OneNorm())), batches_of(SIZES)
    state, _ = run_rounds(once(singleset, OneNorm(), SGD), variables, batches, rounds=3)
    for k in range(3):
        one = client(batches, [k])
        alone, _ = run_rounds(once(fedavg, OneNorm(), SGD), variables, one, rounds=3)
        own = client(client_variables(state), k)
        assert_close(own, global_variables(alone), rtol=1e-9, atol=1e-12)


def test_an_unseen_client_gets_the_weighted_mean_of_personal_leaves():
    method = once(fedbn, OneNorm(), SGD)
    state, metrics = run_rounds(method, variables_of(OneNorm()), batches_of(SIZES))
    models, weights = jax.device_get(client_variables(state)), metrics["weights"]
    mean = jax.tree.map(lambda x: np.average(x, axis=0, weights=weights), models)
    assert_close(global_variables(state), mean, rtol=1e-5, atol=1e-6)


def test_the_optimizer_starts_afresh_unless_it_is_kept():
    variables, batches = variables_of(PlainNet()), batches_of((8,))
    twice = jax.tree.map(lambda x: np.concatenate([x, x], 1), batches)
    adam = optax.adam(0.01)
    kept, _ = run_rounds(once(fedavg, PlainNet(), adam, keep_optimizer=True), variables, batches, 2)
    fresh, _ = run_rounds(once(fedavg, PlainNet(), adam), variables, batches, rounds=2)
    straight, _ = run_rounds(once(fedavg, PlainNet(), adam), variables, twice)
    assert_close(kept.shared, straight.shared)
    fresh, straight = jax.device_get((fresh.shared, straight.shared))
    difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), fresh, straight)
    assert max(jax.tree.leaves(difference)) > 1e-4


def test_risk_is_the_loss_of_the_last_local_epoch():
    batches = batches_of(SIZES, epochs=2)
    _, metrics = run_rounds(
        once(fedavg, PlainNet(), SGD, local_epochs=2), variables_of(PlainNet()), batches
    )
    steps = np.asarray(batches["valid"]).sum(2)[:, 3:]
    expected = (np.asarray(metrics["step_loss"])[:, 3:] * steps).sum(1) / steps.sum(1)
    np.testing.assert_allclose(metrics["risk"], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["weights"], np.array(SIZES) / sum(SIZES), rtol=1e-6)


def test_bytes_are_standardized_on_the_device():
    images = np.random.default_rng(0).integers(0, 256, (1, 3, 4, FEATURES), dtype=np.uint8)
    batches = batches_of((12,))
    method = once(fedavg, OneNorm(), SGD)
    raw, _ = run_rounds(method, variables_of(OneNorm()), batches | {"image": jnp.asarray(images)})
    scaled = jnp.asarray((images / 255 - 0.5) / 0.5, jnp.float32)
    ours, _ = run_rounds(method, variables_of(OneNorm()), batches | {"image": scaled})
    assert_close(raw, ours, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": None}, r"lack \['label'\]"),
        ({"lable": jnp.zeros(3)}, r"unknown \['lable'\]"),
        ({"valid": jnp.ones((3, 2, 4), bool)}, r"batches\['valid'\]"),
        ({"valid": jnp.ones((3, 3, 4))}, r"batches\['valid'\]"),
        ({"label": jnp.zeros((2, 3, 4), jnp.int32)}, r"batches\['label'\]"),
        ({"participates": jnp.ones(2, bool)}, r"batches\['participates'\]"),
        ({"validation": jnp.zeros((2, 2))}, r"batches\['validation'\]"),
        ({"client": jnp.arange(3)}, "population"),
        ({name: leaf[:, :1] for name, leaf in batches_of(SIZES).items()}, "1 steps"),
    ],
)
def test_batches_that_do_not_fit_are_named(change, message):
    batches = {k: v for k, v in (batches_of(SIZES) | change).items() if v is not None}
    method = once(fedavg, PlainNet(), SGD, local_epochs=3)
    state = begun(method, jax.random.key(0), variables_of(PlainNet()), 3)
    with pytest.raises(ValueError, match=message):
        method.round(state, batches, jax.random.key(0))


def test_a_federation_needs_as_many_clients_as_run_at_once_and_a_local_epoch():
    with pytest.raises(ValueError, match="vmap:at_once=3"):
        begun(fedavg(PlainNet(), SGD, clients="vmap:4"), jax.random.key(0), {"params": {}}, 3)
    with pytest.raises(ValueError, match="local_epochs"):
        fedavg(PlainNet(), SGD, local_epochs=0)


@pytest.mark.parametrize(
    ("weigh", "changes", "weights"),
    [
        (by_size, {}, [9 / 13, 4 / 13, 0]),
        (by_size, {"size": jnp.array([1, 3, 2], jnp.int32)}, [1 / 4, 3 / 4, 0]),
        (uniform, {}, [1 / 2, 1 / 2, 0]),
        (lambda sizes, risks: jnp.ones(3) / 3, {}, [1 / 2, 1 / 2, 0]),
    ],
)
def test_who_counts_is_weighed_by_the_rule(weigh, changes, weights):
    batches = batches_of(SIZES) | {"participates": jnp.array([True, True, False])} | changes
    method = once(fedavg, PlainNet(), SGD, weigh=weigh)
    _, metrics = run_rounds(method, variables_of(PlainNet()), batches)
    np.testing.assert_allclose(metrics["weights"], weights, rtol=1e-6)
