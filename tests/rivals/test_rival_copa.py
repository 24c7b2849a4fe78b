"""COPA: all classifiers in the loss, how they travel, and what it reduces to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import (
    CLASSES,
    SGD,
    OneNorm,
    assert_close,
    batches_of,
    begun,
    client_variables,
    global_variables,
    in_float64,
    once,
    run_rounds,
)
from federations import variables_of as start_of
from fedjax_bn.methods import copa, fedavg

KEY, SIZES = jax.random.key(1), (9, 4, 6)
NET = OneNorm()


def variables_of():
    return in_float64(start_of(NET))


@pytest.mark.slow
def test_one_client_alone_is_fedavg(x64):
    ours, theirs = (
        run_rounds(method, variables_of(), batches_of((9,)), rounds=2)[0]
        for method in (once(copa, NET, SGD, gates=False), once(fedavg, NET, SGD))
    )
    assert_close(global_variables(ours), global_variables(theirs), rtol=1e-10, atol=1e-12)


def test_a_step_descends_along_all_classifiers_and_moves_its_own_by_its_loss_alone(x64):
    """By hand: three classifiers as arrays, the others' constant."""
    method, variables = once(copa, NET, SGD, gates=False), variables_of()
    batches = batches_of((3, 3, 3))
    state = begun(method, KEY, variables, 3)
    random = np.random.default_rng(0)
    heads = {
        "kernel": random.normal(size=(3, 8, CLASSES)),
        "bias": random.normal(size=(3, CLASSES)),
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
        found = client_variables(after)["params"]["c"]
        assert_close(jax.tree.map(lambda x, k=k: x[k], found), own, rtol=1e-9, atol=1e-12)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], total)
    assert_close(global_variables(after)["params"], expected, rtol=1e-9, atol=1e-12)


def test_the_server_keeps_every_clients_last_classifier(x64):
    method, batches = copa(NET, SGD), batches_of(SIZES)
    state = begun(method, KEY, variables_of(), 3)
    for present in (jnp.ones(3, bool), jnp.asarray([True, False, True])):
        state, _ = method.round(state, batches | {"participates": present}, KEY)
        own = client_variables(state)["params"]["c"]
        assert_close(state.server.sent, own, rtol=1e-12)
    assert (own["kernel"][0] != own["kernel"][1]).any()
    gate = client_variables(state)["params"]["a"]["gate"]
    assert ((gate >= 0) & (gate <= 1)).all()
