"""What methods keep, reduce to and refuse; contrib/test_common.py has what all must hold."""

import functools

import jax
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods import fedavg, fedavgm, feddc, fedprox, scaffold
from fedjax_bn.models import MLP
from fedjax_bn.sharing import all_but_batch_norm, everything
from method_table import METHODS

SIZES = (9, 4, 6)
SGD = optax.sgd(0.1, momentum=0.5)
NET = MLP(fed.CLASSES, hidden=(8,))
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
KEY = jax.random.key(1)


@functools.cache
def method_of(name: str, mode: str, clients: str = "map") -> FederatedMethod:
    return METHODS[name](NET, SGD, share=SHARING[mode], clients=clients)


@functools.cache
def variables() -> dict:
    return fed.variables_of(NET)


def rounds_of(name: str, mode: str, batches: dict, present: list | None = None, clients="map"):
    """Two rounds, the second with some clients only; always the same compiled program."""
    method = method_of(name, mode, clients)
    count = len(batches["label"])
    state = fed.begun(method, KEY, variables(), count)
    states = [jax.device_get(state)]
    for participates in (count * [True], present or count * [True]):
        some = batches | {"participates": np.asarray(participates)}
        state, metrics = method.round(state, some, KEY)
        states.append(jax.device_get(state))
    return states, metrics


@pytest.mark.parametrize("name", ["scaffold", "fednova", "feddc"])
def test_a_momentum_that_clients_keep_is_refused_where_a_fresh_one_is_assumed(name):
    make = METHODS[name]
    with pytest.raises(ValueError, match=f"{name}: keep_optimizer=True"):
        make(NET, SGD, keep_optimizer=True)
    make(NET, optax.sgd(0.1), keep_optimizer=True)
    make(NET, SGD)


def test_feddc_without_correction_is_fedprox():
    """Their rounds are one program."""
    both = feddc(NET, SGD, alpha=0.3, correction=False), fedprox(NET, SGD, mu=0.3)
    given = fed.begun(both[0], KEY, variables(), 3), fed.batches_of(SIZES), KEY
    assert len({method.round.lower(*given).as_text() for method in both}) == 1


@pytest.mark.parametrize("name", ["scaffold", pytest.param("feddc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("present", [[True, True, True], [True, False, True]])
def test_the_mean_of_the_clients_variates_is_the_servers(name, present):
    (_, _, state), _ = rounds_of(name, dict(CASES)[name], fed.batches_of(SIZES), present)
    variates = state.memory.method if name == "scaffold" else state.memory.method.variate
    mean = jax.tree.map(lambda x: np.mean(np.asarray(x, np.float64), 0), variates)
    fed.assert_close(state.server.sent, mean, rtol=1e-4, atol=1e-6)
    assert max(abs(leaf).max() for leaf in jax.tree.leaves(mean)) > 1e-3


def test_a_variate_after_one_step_is_the_clients_gradient(x64):
    start = fed.in_float64(fed.variables_of(fed.PlainNet()))
    batches = fed.batches_of((4, 3, 2))
    state, _ = fed.run_rounds(scaffold(fed.PlainNet(), optax.sgd(0.3)), start, batches)

    @jax.jit
    def gradient(params, x, y):
        def loss(params):
            logits = fed.PlainNet().apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        return jax.grad(loss)(params)

    for k, size in enumerate((4, 3, 2)):
        x, y = (np.asarray(batches[name])[k, 0, :size] for name in ("image", "label"))
        own = fed.client(state.memory.method, k)
        fed.assert_close(own, gradient(start["params"], x, y), rtol=1e-9)


def test_variates_with_momentum_keep_the_scale_of_a_gradient(x64):
    start = jax.tree.map(np.zeros_like, fed.in_float64(fed.variables_of(fed.PlainNet())))
    batches = jax.tree.map(lambda x: np.concatenate(3 * [x], 1), fed.batches_of((4, 4)))
    tiny = 1e-7  # so short a way that the loss is linear on it
    plain, heavy = (
        fed.run_rounds(scaffold(fed.PlainNet(), optimizer), start, batches)[0].server.sent
        for optimizer in (optax.sgd(tiny), optax.sgd(tiny, momentum=0.9))
    )
    fed.assert_close(plain, heavy, rtol=1e-5, atol=1e-9)


SERVERS = {
    "fedadam": lambda v, d: 0.99 * v + 0.01 * d**2,
    "fedyogi": lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2),
    "fedadagrad": lambda v, d: v + d**2,
}


@pytest.mark.parametrize("name", SERVERS)
def test_adaptive_servers_follow_the_papers_algorithm(x64, name):
    start = fed.in_float64(fed.variables_of(fed.PlainNet()))
    method = METHODS[name](fed.PlainNet(), SGD, eta=0.02, tau=0.01)
    plain = fed.once(fedavg, fed.PlainNet(), SGD)
    x, m, v = start, 0.0, 0.01**2
    beta1 = 0.0 if name == "fedadagrad" else 0.9
    state = fed.begun(method, KEY, start, 3)
    for _ in range(3):
        state, _ = method.round(state, fed.batches_of(SIZES), KEY)
        mean = fed.global_variables(fed.run_rounds(plain, x, fed.batches_of(SIZES))[0])
        kernel = np.asarray(x["params"]["dense"]["kernel"])
        delta = np.asarray(mean["params"]["dense"]["kernel"]) - kernel
        m, v = beta1 * m + (1 - beta1) * delta, SERVERS[name](v, delta)
        x = fed.global_variables(state)
        expected = kernel + 0.02 * m / (np.sqrt(v) + 0.01)
        np.testing.assert_allclose(x["params"]["dense"]["kernel"], expected, rtol=1e-10)


def test_fedavgm_follows_the_papers_algorithm(x64):
    start = fed.in_float64(fed.variables_of(fed.PlainNet()))
    method, plain = (
        fedavgm(fed.PlainNet(), SGD, eta=0.7, beta=0.8),
        fed.once(fedavg, fed.PlainNet(), SGD),
    )
    x, v, state = start, 0.0, fed.begun(method, KEY, start, 3)
    for _ in range(3):
        state, _ = method.round(state, fed.batches_of(SIZES), KEY)
        mean = fed.global_variables(fed.run_rounds(plain, x, fed.batches_of(SIZES))[0])
        kernel, theirs = (np.asarray(w["params"]["dense"]["kernel"]) for w in (x, mean))
        v = 0.8 * v + kernel - theirs
        x = fed.global_variables(state)
        np.testing.assert_allclose(x["params"]["dense"]["kernel"], kernel - 0.7 * v, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("scaffold", "learning_rate", 0.0), ("fednova", "momentum", 1.0), ("fedadam", "beta2", 1.5)],
)
def test_numbers_outside_their_range_are_refused(name, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        METHODS[name](NET, SGD, **{option: value})
