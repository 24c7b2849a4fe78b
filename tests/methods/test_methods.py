"""What every method must obey, and what each reduces to."""

import functools

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import (
    CLASSES,
    PlainNet,
    assert_close,
    assert_equal,
    batches_of,
    begun,
    client,
    client_variables,
    global_variables,
    in_float64,
    once,
    run_rounds,
    variables_of,
    with_value,
)
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods import (
    fedavg,
    fedavgm,
    feddc,
    fedprox,
    scaffold,
)
from fedjax_bn.models import MLP
from fedjax_bn.sharing import all_but_batch_norm, everything
from method_table import METHODS

SIZES = (9, 4, 6)
SGD = optax.sgd(0.1, momentum=0.5)
NET = MLP(CLASSES, hidden=(8,))
SHARING = {"all": everything, "bn_local": all_but_batch_norm}
# One rule a method, so that each is compiled once; the other server optimizers differ by a formula.
CASES = [
    ("fedavg", "all"),
    ("fedprox", "bn_local"),
    ("fedadam", "bn_local"),
    ("feddc", "all"),
    ("fednova", "bn_local"),
    ("moon", "all"),
    ("perfedavg", "bn_local"),
    ("scaffold", "bn_local"),
]
# SCAFFOLD has memory and a message, Per-FedAvg reads who is valid; the others are of these forms.
OFTEN = ("fedavg", "perfedavg", "scaffold")
EACH = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in OFTEN)) for case in CASES]
KEY = jax.random.key(1)


@functools.cache
def method_of(name: str, mode: str, clients: str = "map") -> FederatedMethod:
    return METHODS[name](NET, SGD, share=SHARING[mode], clients=clients)


@functools.cache
def variables() -> dict:
    return variables_of(NET)


def rounds_of(name: str, mode: str, batches: dict, present: list | None = None, clients="map"):
    """Two rounds, the second with some clients only; always the same compiled program."""
    method = method_of(name, mode, clients)
    count = len(batches["label"])
    state = begun(method, KEY, variables(), count)
    states = [jax.device_get(state)]
    for participates in (count * [True], present or count * [True]):
        some = batches | {"participates": np.asarray(participates)}
        state, metrics = method.round(state, some, KEY)
        states.append(jax.device_get(state))
    return states, metrics


def together(batches):
    """The batches where everybody takes part, in the form of all others."""
    return batches | {"participates": np.ones(len(batches["label"]), bool)}


@settings(max_examples=3, deadline=None)
@given(size=st.integers(2, 9), seed=st.integers(0, 99))
@pytest.mark.parametrize(("name", "mode"), EACH)
def test_identical_clients_aggregate_to_themselves(name, mode, size, seed):
    three = jax.tree.map(lambda x: np.repeat(x, 3, 0), batches_of((size,), seed=seed, steps=3))
    (_, first, later), _ = rounds_of(name, mode, three)
    for tree in (client_variables(later), later.memory):
        assert_close(client(tree, 1), client(tree, 0), rtol=1e-4, atol=1e-5)
    state = begun(method_of(name, mode), KEY, variables(), 3)
    one = {"participates": np.asarray([False, True, False])}
    alone, _ = method_of(name, mode).round(state, three | one, KEY)
    assert_close(global_variables(first), global_variables(alone), rtol=1e-4, atol=1e-5)
    assert_close(client(first.memory, 0), client(alone.memory, 1), rtol=1e-4, atol=1e-5)


@settings(max_examples=3, deadline=None)
@given(order=st.permutations(range(3)), seed=st.integers(0, 99))
@pytest.mark.parametrize(("name", "mode"), EACH)
def test_permuting_clients_permutes_results(name, mode, order, seed):
    permuted = functools.partial(client, k=np.array(order))
    batches = batches_of(SIZES, seed=seed)
    state, other = (rounds_of(name, mode, b)[0][-1] for b in (batches, permuted(batches)))
    assert_close(other.shared, state.shared, rtol=1e-3, atol=1e-4)
    ours, theirs = ((s.personal, s.memory, s.weights) for s in (other, state))
    assert_close(ours, permuted(theirs), rtol=1e-3, atol=1e-4)


@settings(max_examples=3, deadline=None)
@given(out=st.integers(0, 2), seed=st.integers(0, 99))
@pytest.mark.parametrize(("name", "mode"), EACH)
def test_a_client_that_sits_out_changes_nothing_but_its_weight(name, mode, out, seed):
    batches, present = batches_of(SIZES, seed=seed), [k != out for k in range(3)]
    (_, before, after), metrics = rounds_of(name, mode, batches, present)
    assert_equal(
        client((after.personal, after.memory), out), client((before.personal, before.memory), out)
    )
    expected = np.where(present, SIZES, 0) / np.dot(present, SIZES)
    np.testing.assert_allclose(metrics["weights"], expected, rtol=1e-6)
    poison = with_value(batches, out, np.nan) | {"participates": np.asarray(present)}
    poisoned, _ = method_of(name, mode).round(before, poison, KEY)
    assert_equal(poisoned, after)


# Clients are mapped alike whatever the server and the loss.


@pytest.mark.parametrize(("name", "mode"), EACH)
def test_an_update_that_is_not_finite_reaches_nothing(name, mode):
    batches = with_value(batches_of(SIZES), (2, 0, 0, 0), np.inf)
    (start, _, state), metrics = rounds_of(name, mode, batches)
    np.testing.assert_array_equal(metrics["finite"], [True, True, False])
    for leaf in jax.tree.leaves((state, global_variables(state))):
        assert np.isfinite(leaf).all()
    ours, old = ((s.personal, s.memory) for s in (state, start))
    assert_equal(client(ours, 2), client(old, 2))


@pytest.mark.parametrize("mode", SHARING)
@pytest.mark.parametrize(
    ("name", "memories", "servers"),
    [
        ("scaffold", 1, 1),
        ("feddc", 2, 1),
        ("fedadam", 0, 2),
        ("fedyogi", 0, 2),
        ("fedadagrad", 0, 2),
        ("fedavgm", 0, 1),
    ],
)
def test_corrections_drifts_and_moments_exist_for_shared_parameters_only(
    name, memories, servers, mode
):
    state = begun(method_of(name, mode), KEY, variables(), 3)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.shared["params"])]
    assert len(shapes) == {"all": 6, "bn_local": 4}[mode]
    assert [leaf.shape for leaf in jax.tree.leaves(state.server)] == servers * shapes
    assert [leaf.shape[1:] for leaf in jax.tree.leaves(state.memory)] == memories * shapes


# The others are FedAvg's clients, or a formula on the server.


@pytest.mark.parametrize("name", ["scaffold", "fednova", "feddc"])
def test_a_momentum_that_clients_keep_is_refused_where_a_fresh_one_is_assumed(name):
    make = METHODS[name]
    with pytest.raises(ValueError, match=f"{name}: keep_optimizer=True"):
        make(NET, SGD, keep_optimizer=True)
    make(NET, optax.sgd(0.1), keep_optimizer=True)
    make(NET, SGD)


EQUAL = (8, 8, 8)


def test_feddc_without_correction_is_fedprox():
    """Their rounds are one program."""
    both = feddc(NET, SGD, alpha=0.3, correction=False), fedprox(NET, SGD, mu=0.3)
    given = begun(both[0], KEY, variables(), 3), batches_of(SIZES), KEY
    assert len({method.round.lower(*given).as_text() for method in both}) == 1


@pytest.mark.parametrize("name", ["scaffold", pytest.param("feddc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("present", [[True, True, True], [True, False, True]])
def test_the_mean_of_the_clients_variates_is_the_servers(name, present):
    (_, _, state), _ = rounds_of(name, dict(CASES)[name], batches_of(SIZES), present)
    variates = state.memory.method if name == "scaffold" else state.memory.method.variate
    mean = jax.tree.map(lambda x: np.mean(np.asarray(x, np.float64), 0), variates)
    assert_close(state.server.sent, mean, rtol=1e-4, atol=1e-6)
    assert max(abs(leaf).max() for leaf in jax.tree.leaves(mean)) > 1e-3


def test_a_variate_after_one_step_is_the_clients_gradient(x64):
    start = in_float64(variables_of(PlainNet()))
    batches = batches_of((4, 3, 2))
    state, _ = run_rounds(scaffold(PlainNet(), optax.sgd(0.3)), start, batches)

    @jax.jit
    def gradient(params, x, y):
        def loss(params):
            logits = PlainNet().apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return jax.grad(loss)(params)

    for k, size in enumerate((4, 3, 2)):
        x, y = (np.asarray(batches[name])[k, 0, :size] for name in ("image", "label"))
        own = client(state.memory.method, k)
        assert_close(own, gradient(start["params"], x, y), rtol=1e-9)


def test_variates_with_momentum_keep_the_scale_of_a_gradient(x64):
    start = jax.tree.map(np.zeros_like, in_float64(variables_of(PlainNet())))
    batches = jax.tree.map(lambda x: np.concatenate(3 * [x], 1), batches_of((4, 4)))
    tiny = 1e-7  # so short a way that the loss is linear on it
    plain, heavy = (
        run_rounds(scaffold(PlainNet(), optimizer), start, batches)[0].server.sent
        for optimizer in (optax.sgd(tiny), optax.sgd(tiny, momentum=0.9))
    )
    assert_close(plain, heavy, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "scaffold",  # which divides by the number of steps
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fednova", "feddc", "moon", "perfedavg")
        ),
    ],
)
def test_clients_may_make_different_numbers_of_local_epochs(name):
    batches = batches_of((8, 4, 8), epochs=2)
    short = with_value(batches, (2, slice(2, None)), False, "valid")
    method = METHODS[name](NET, optax.sgd(0.1), share=all_but_batch_norm, local_epochs=2)
    state, metrics = run_rounds(method, variables(), short)
    np.testing.assert_allclose(metrics["weights"], [0.4, 0.2, 0.4], rtol=1e-6)
    # Its personal leaves are those of a client that makes one epoch.
    one = METHODS[name](NET, optax.sgd(0.1), share=all_but_batch_norm)
    alone, other = run_rounds(
        one, variables(), jax.tree.map(lambda x: np.asarray(x)[2:, :2], batches)
    )
    assert_close(client(state.personal, 2), client(alone.personal, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["risk"][2], other["risk"][0], rtol=1e-5)


SERVERS = {
    "fedadam": lambda v, d: 0.99 * v + 0.01 * d**2,
    "fedyogi": lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2),
    "fedadagrad": lambda v, d: v + d**2,
}


@pytest.mark.parametrize("name", SERVERS)
def test_adaptive_servers_follow_the_papers_algorithm(x64, name):
    start = in_float64(variables_of(PlainNet()))
    method = METHODS[name](PlainNet(), SGD, eta=0.02, tau=0.01)
    plain = once(fedavg, PlainNet(), SGD)
    x, m, v = start, 0.0, 0.01**2
    beta1 = 0.0 if name == "fedadagrad" else 0.9
    state = begun(method, KEY, start, 3)
    for _ in range(3):
        state, _ = method.round(state, batches_of(SIZES), KEY)
        mean = global_variables(run_rounds(plain, x, batches_of(SIZES))[0])
        kernel = np.asarray(x["params"]["dense"]["kernel"])
        delta = np.asarray(mean["params"]["dense"]["kernel"]) - kernel
        m, v = beta1 * m + (1 - beta1) * delta, SERVERS[name](v, delta)
        x = global_variables(state)
        expected = kernel + 0.02 * m / (np.sqrt(v) + 0.01)
        np.testing.assert_allclose(x["params"]["dense"]["kernel"], expected, rtol=1e-10)


def test_fedavgm_follows_the_papers_algorithm(x64):
    start = in_float64(variables_of(PlainNet()))
    method, plain = fedavgm(PlainNet(), SGD, eta=0.7, beta=0.8), once(fedavg, PlainNet(), SGD)
    x, v, state = start, 0.0, begun(method, KEY, start, 3)
    for _ in range(3):
        state, _ = method.round(state, batches_of(SIZES), KEY)
        mean = global_variables(run_rounds(plain, x, batches_of(SIZES))[0])
        kernel, theirs = (np.asarray(w["params"]["dense"]["kernel"]) for w in (x, mean))
        v = 0.8 * v + kernel - theirs
        x = global_variables(state)
        np.testing.assert_allclose(x["params"]["dense"]["kernel"], kernel - 0.7 * v, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("scaffold", "learning_rate", 0.0), ("fednova", "momentum", 1.0), ("fedadam", "beta2", 1.5)],
)
def test_numbers_outside_their_range_are_refused(name, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        METHODS[name](NET, SGD, **{option: value})
