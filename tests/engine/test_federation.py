"""The round as a pure function: masks, sizes, participation, non-finite updates, strategies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.aggregation import by_size, uniform
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.federation import client_variables, global_variables
from fedjax_bn.methods import fedavg, fedavgm, fedbn, fedprox, singleset

SIZES = (9, 4, 6)
PLAIN = fed.once(fedavg, fed.PlainNet(), fed.SGD)


def test_one_step_of_fedavg_is_a_step_on_the_pooled_gradient(x64):
    batches = fed.batches_of((4, 3, 2), batch=4)
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    state, metrics = fed.run_rounds(PLAIN, variables, batches)
    # Softmax regression in NumPy: the gradient of the mean cross entropy over all valid samples.
    valid = np.asarray(batches["valid"]).ravel()
    x = np.asarray(batches["image"]).reshape(-1, fed.FEATURES)[valid]
    y = np.eye(fed.CLASSES)[np.asarray(batches["label"]).ravel()[valid]]
    dense = jax.tree.map(np.asarray, variables["params"]["dense"])
    z = x @ dense["kernel"] + dense["bias"]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    expected = {
        "bias": dense["bias"] - 0.1 * (p - y).mean(0),
        "kernel": dense["kernel"] - 0.1 * x.T @ (p - y) / len(x),
    }
    fed.assert_close(global_variables(state)["params"]["dense"], expected, rtol=1e-10)
    np.testing.assert_allclose(metrics["weights"], np.array([4, 3, 2]) / 9, rtol=1e-12)
    pooled = -(np.log(p) * y).sum(1).mean()
    np.testing.assert_allclose(metrics["loss"] @ metrics["weights"], pooled, rtol=1e-10)


def test_no_client_takes_part_and_nothing_changes():
    method = fed.once(fedbn, fed.OneNorm(), fed.SGD)
    batches = fed.batches_of(SIZES) | {"participates": jnp.zeros(3, bool)}
    state = fed.begun(method, jax.random.key(0), fed.variables_of(fed.OneNorm()), 3)
    before = jax.tree.map(np.array, state)
    after, metrics = method.round(state, batches, jax.random.key(0))
    fed.assert_equal(after._replace(round=before.round), before)
    assert int(after.round) == 1
    fed.assert_equal(metrics["weights"], jnp.zeros(3))


@pytest.mark.parametrize("clients", ["map", "vmap"])
def test_steps_of_padding_move_neither_momentum_nor_statistics(x64, clients):
    """Client 1 has one batch of three; a program for GPU has the numbers of one for CPU."""
    momentum = optax.sgd(0.1, momentum=0.9)
    method = fedbn(fed.OneNorm(), momentum, keep_optimizer=True, clients=clients)
    variables, batches = fed.in_float64(fed.variables_of(fed.OneNorm())), fed.batches_of(SIZES)
    without_padding = jax.tree.map(lambda leaf: leaf[1:2, :1], batches)
    expected, _ = fed.run_rounds(method, variables, batches)
    alone, _ = fed.run_rounds(method, variables, without_padding)
    with traced_for("cuda"):
        state, _ = fed.run_rounds(method, variables, batches)
    fed.assert_close(state, expected, rtol=1e-12, atol=1e-14)
    row = jax.tree.map(lambda leaf: leaf[1:2], (state.personal, state.memory))
    fed.assert_close(row, (alone.personal, alone.memory), rtol=1e-12, atol=1e-14)


def test_a_step_of_the_server_that_is_not_finite_is_reported_and_not_taken():
    method = fedavgm(fed.PlainNet(), optax.sgd(100.0), eta=3e38)
    variables, batches = fed.variables_of(fed.PlainNet()), fed.batches_of(SIZES)
    before = jax.tree.map(jnp.copy, fed.begun(method, jax.random.key(0), variables, len(SIZES)))
    state, metrics = fed.run_rounds(method, variables, batches)
    assert not metrics["server_finite"]
    assert metrics["finite"].all()
    fed.assert_equal((state.shared, state.server), (before.shared, before.server))
    assert fed.run_rounds(PLAIN, variables, batches)[1]["server_finite"]


def test_the_state_is_donated_and_the_callers_variables_are_not():
    method = fed.once(fedbn, fed.OneNorm(), fed.SGD)
    variables = fed.variables_of(fed.OneNorm())
    batches, key = fed.batches_of(SIZES), jax.random.key(0)
    state = method.init(key, variables, 3)
    mine, received = client_variables(state), global_variables(state)
    new, _ = method.round(state, batches, key)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for tree in (variables, mine, received, new, batches):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def test_a_round_compiles_once():
    """Neither the state of `init` nor that of a round is of another form than the other."""
    method = fed.once(fedbn, fed.OneNorm(), fed.SGD)
    fed.run_rounds(method, fed.variables_of(fed.OneNorm()), fed.batches_of(SIZES))
    first = method.round._cache_size()
    fed.run_rounds(method, fed.variables_of(fed.OneNorm()), fed.batches_of(SIZES), rounds=4)
    assert method.round._cache_size() == first > 0


def test_a_round_is_reproducible_and_keys_differ_between_rounds_and_clients():
    same = jax.tree.map(lambda x: np.repeat(x, 2, 0), fed.batches_of((8,)))
    method = fedavg(fed.DropoutNet(), optax.sgd(0.0))
    state = fed.begun(method, jax.random.key(0), fed.variables_of(fed.DropoutNet()), 2)
    losses = []
    for _ in range(2):
        state, metrics = method.round(state, same, jax.random.key(5))
        losses += metrics["loss"].tolist()
    assert len(set(losses)) == 4  # the weights never move: only dropout differs
    start = fed.variables_of(fed.DropoutNet())
    _, metrics = fed.run_rounds(method, start, same, 2, jax.random.key(5))
    assert metrics["loss"].tolist() == losses[2:]


def test_fedprox_step_has_the_closed_form(x64):
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    one = fed.batches_of((4,))
    batches = jax.tree.map(lambda x: np.concatenate([x, x], 1), one)  # two equal steps
    start = variables["params"]["dense"]["bias"]

    def bias(method, batches):
        state, _ = fed.run_rounds(method, variables, batches)
        return np.asarray(state.shared["params"]["dense"]["bias"])

    prox = fed.once(fedprox, fed.PlainNet(), fed.SGD, mu=0.5)
    first, second = bias(PLAIN, one), bias(PLAIN, batches)
    # The first step starts at the received model; the second adds -lr * mu * (w - w_received).
    np.testing.assert_allclose(bias(prox, one), first, rtol=1e-12)
    np.testing.assert_allclose(
        bias(prox, batches), second - 0.1 * 0.5 * (first - start), rtol=1e-10
    )


@pytest.mark.parametrize(("make", "averaged"), [(fedbn, ("bn", "c")), (singleset, ())])
def test_fedbn_averages_all_but_what_stands_under_a_batch_norms_name(x64, make, averaged):
    """Algorithm 1 by hand: clients trained alone, then NumPy's weighted mean of dense layers."""
    variables, batches = fed.in_float64(fed.variables_of(fed.OneNorm())), fed.batches_of(SIZES)
    state, _ = fed.run_rounds(fed.once(make, fed.OneNorm(), fed.SGD), variables, batches)
    plain = fed.once(fedavg, fed.OneNorm(), fed.SGD)
    alone = [fed.run_rounds(plain, variables, fed.client(batches, [k]))[0] for k in range(3)]
    for path, leaf in jax.tree.leaves_with_path(client_variables(state)):
        _, layer, name = (entry.key for entry in path)
        trained = []
        for variables in map(global_variables, alone):
            (found,) = (own for at, own in jax.tree.leaves_with_path(variables) if at == path)
            trained.append(np.asarray(found))
        if layer in averaged:  # a is the batch norm, bn a dense layer
            trained = [np.average(trained, axis=0, weights=SIZES)] * 3
        np.testing.assert_allclose(leaf, np.stack(trained), rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_optimizer_starts_afresh_unless_it_is_kept():
    variables, batches = fed.variables_of(fed.PlainNet()), fed.batches_of((8,))
    twice = jax.tree.map(lambda x: np.concatenate([x, x], 1), batches)
    adam = optax.adam(0.01)
    keeping = fed.once(fedavg, fed.PlainNet(), adam, keep_optimizer=True)
    method = fed.once(fedavg, fed.PlainNet(), adam)
    kept, _ = fed.run_rounds(keeping, variables, batches, 2)
    fresh, _ = fed.run_rounds(method, variables, batches, 2)
    straight, _ = fed.run_rounds(method, variables, twice)
    fed.assert_close(kept.shared, straight.shared)
    fresh, straight = jax.device_get((fresh.shared, straight.shared))
    difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), fresh, straight)
    assert max(jax.tree.leaves(difference)) > 1e-4


def test_risk_is_the_loss_of_the_last_local_epoch():
    batches = fed.batches_of(SIZES, epochs=2)
    method = fed.once(fedavg, fed.PlainNet(), fed.SGD, local_epochs=2)
    _, metrics = fed.run_rounds(method, fed.variables_of(fed.PlainNet()), batches)
    steps = np.asarray(batches["valid"]).sum(2)[:, 3:]
    expected = (np.asarray(metrics["step_loss"])[:, 3:] * steps).sum(1) / steps.sum(1)
    np.testing.assert_allclose(metrics["risk"], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["weights"], np.array(SIZES) / sum(SIZES), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": None}, r"lack \['label'\]"),
        ({"lable": jnp.zeros(3)}, r"unknown \['lable'\]"),
        ({"valid": jnp.ones((3, 3, 4))}, r"batches\['valid'\]"),
        ({"label": jnp.zeros((2, 3, 4), jnp.int32)}, r"batches\['label'\]"),
        ({"participates": jnp.ones(2, bool)}, r"batches\['participates'\]"),
        ({"client": jnp.arange(3)}, "population"),
        ({name: leaf[:, :1] for name, leaf in fed.batches_of(SIZES).items()}, "1 steps"),
    ],
)
def test_batches_that_do_not_fit_are_named(change, message):
    batches = {k: v for k, v in (fed.batches_of(SIZES) | change).items() if v is not None}
    method = fed.once(fedavg, fed.PlainNet(), fed.SGD, local_epochs=3)
    state = fed.begun(method, jax.random.key(0), fed.variables_of(fed.PlainNet()), 3)
    with pytest.raises(ValueError, match=message):
        method.round(state, batches, jax.random.key(0))


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
    batches = fed.batches_of(SIZES) | {"participates": jnp.array([True, True, False])} | changes
    method = fed.once(fedavg, fed.PlainNet(), fed.SGD, weigh=weigh)
    _, metrics = fed.run_rounds(method, fed.variables_of(fed.PlainNet()), batches)
    np.testing.assert_allclose(metrics["weights"], weights, rtol=1e-6)
