"""What methods keep, reduce to and refuse; contrib/test_common.py has what all must hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.contrib import feddyn
from fedjax_bn.engine.optimizers import response
from fedjax_bn.methods import fedavg, fednova, scaffold, singleset
from fedjax_bn.models import MLP
from fedjax_bn.sharing import all_but_batch_norm
from fedjax_bn.state import Received
from method_table import METHODS

SIZES = (9, 4, 6)
SGD = optax.sgd(0.1, momentum=0.5)
NET = MLP(fed.CLASSES, hidden=(8,))
KEY = jax.random.key(1)


@pytest.mark.parametrize("name", ["scaffold", "fednova", "feddc"])
def test_a_momentum_that_clients_keep_is_refused_where_a_fresh_one_is_assumed(name):
    make = METHODS[name]
    with pytest.raises(ValueError, match=f"{name}.*keep_optimizer=True"):
        make(NET, SGD, keep_optimizer=True)
    make(NET, optax.sgd(0.1), keep_optimizer=True)
    make(NET, SGD)


@pytest.mark.parametrize("name", ["scaffold", pytest.param("feddc", marks=pytest.mark.slow)])
def test_the_mean_of_the_clients_variates_is_the_servers(name):
    """Also if a client sits out in the second round."""
    method = METHODS[name](NET, SGD, share=all_but_batch_norm)
    state = fed.begun(method, KEY, fed.variables_of(NET), 3)
    for present in ([True, True, True], [True, False, True]):
        batches = fed.batches_of(SIZES) | {"participates": np.asarray(present)}
        state, _ = method.round(state, batches, KEY)
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


def adaptive(second_moment, beta1=0.9):
    """Options, the first v, and the moments with the way that they make."""

    def move(m, v, d):
        m, v = beta1 * m + (1 - beta1) * d, second_moment(v, d)
        return m, v, 0.02 * m / (np.sqrt(v) + 0.01)

    return {"eta": 0.02, "tau": 0.01}, 0.01**2, move


def heavy_ball(m, v, d):
    v = 0.8 * v - d
    return m, v, -0.7 * v


SERVERS = {
    "fedadam": adaptive(lambda v, d: 0.99 * v + 0.01 * d**2),
    "fedyogi": adaptive(lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2)),
    "fedadagrad": adaptive(lambda v, d: v + d**2, beta1=0.0),
    "fedavgm": ({"eta": 0.7, "beta": 0.8}, 0.0, heavy_ball),
}


@pytest.mark.parametrize("name", SERVERS)
def test_optimizers_of_the_server_follow_the_papers_algorithms(x64, name):
    options, v, move = SERVERS[name]
    method = METHODS[name](fed.PlainNet(), SGD, **options)
    plain = fed.once(fedavg, fed.PlainNet(), SGD)
    x, m = fed.in_float64(fed.variables_of(fed.PlainNet())), 0.0
    state = fed.begun(method, KEY, x, 3)
    for _ in range(3):
        state, _ = method.round(state, fed.batches_of(SIZES), KEY)
        mean = fed.global_variables(fed.run_rounds(plain, x, fed.batches_of(SIZES))[0])
        kernel, trained = (np.asarray(w["params"]["dense"]["kernel"]) for w in (x, mean))
        m, v, way = move(m, v, trained - kernel)
        x = fed.global_variables(state)
        np.testing.assert_allclose(x["params"]["dense"]["kernel"], kernel + way, rtol=1e-10)


def test_feddyn_without_a_penalty_is_fedavg(x64):
    start, batches = fed.in_float64(fed.variables_of(fed.PlainNet())), fed.batches_of((4, 4))
    ours, plain = feddyn(fed.PlainNet(), SGD, alpha=0.0), fed.once(fedavg, fed.PlainNet(), SGD)
    fed.assert_equal(*(fed.run_rounds(m, start, batches)[0].shared for m in (ours, plain)))


ONE_NORM = fed.OneNorm()
DECAYING = {
    decay: optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.1, momentum=0.9))
    for decay in (0.0, 0.1)
}


def work(momentum, steps):
    """a_k by Wang et al. 2020, Section 4.1, summand by summand."""
    return sum((1 - momentum**j) / (1 - momentum) for j in range(1, steps + 1))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.1), [0.1, 0.2, 0.3]),
        (optax.sgd(0.1, momentum=0.9), [0.1 * work(0.9, n) for n in (1, 2, 3)]),
        # Nesterov's n-th update is g + rho * trace_n.
        (optax.sgd(1.0, momentum=0.5, nesterov=True), [1.5, 3.25, 5.125]),
        (
            optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1, momentum=0.9)),
            [0.1 * work(0.9, n) for n in (1, 2, 3)],
        ),
        (optax.sgd(lambda count: 0.1 / (1 + count)), [0.1, 0.15, 0.1 + 0.05 + 0.1 / 3]),
        (optax.adam(0.01), [0.01, 0.02, 0.03]),
    ],
)
def test_response_is_the_way_under_a_constant_gradient(x64, optimizer, expected):
    received = Received({"params": jnp.zeros(2)}, {"params": None})
    ways = [response(optimizer, jnp.int32(n), 3, jnp.float64, received) for n in range(4)]
    np.testing.assert_allclose(ways, [0, *expected], rtol=1e-6)


@pytest.mark.parametrize("decay", DECAYING)
def test_server_normalizes_the_ways_of_clients(x64, decay):
    """Clients that train alone make the same ways; the rest is the paper's Eq. 6 in NumPy."""
    sgd, start = DECAYING[decay], jax.device_get(fed.in_float64(fed.variables_of(ONE_NORM)))
    alone, _ = fed.run_rounds(fed.once(singleset, ONE_NORM, sgd), start, fed.batches_of(SIZES))
    ours, _ = fed.run_rounds(fednova(ONE_NORM, sgd), start, fed.batches_of(SIZES))
    p, a = np.array(SIZES) / sum(SIZES), np.array([work(0.9, n) for n in (3, 1, 2)])
    models = [fed.client(fed.client_variables(alone), k) for k in range(3)]

    def normalized(x, *y):
        directions = [(x - y_k) / a_k for y_k, a_k in zip(y, a, strict=True)]
        return x - (p @ a) * sum(p_k * d for p_k, d in zip(p, directions, strict=True))

    params, statistics = (
        jax.tree.map(combine, start[name], *(model[name] for model in models))
        for name, combine in (
            ("params", normalized),
            ("batch_stats", lambda x, *y: sum(p_k * y_k for p_k, y_k in zip(p, y, strict=True))),
        )
    )
    expected = {"params": params, "batch_stats": statistics}
    fed.assert_close(fed.global_variables(ours), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("sizes", "equal"), [((8, 8, 8), True), ((8, 5, 7), True), ((8, 4, 6), False)]
)
def test_it_is_fedavg_if_and_only_if_all_clients_make_equally_many_steps(
    x64, sizes, equal, momentum
):
    """Of batches of four, 5 to 8 samples are two steps. Three rounds of two epochs."""
    start, batches = fed.in_float64(fed.variables_of(ONE_NORM)), fed.batches_of(sizes, epochs=2)
    optimizer = fed.once(optax.sgd, 0.1, momentum=momentum or None)
    nova, mean = (
        fed.run_rounds(fed.once(method, ONE_NORM, optimizer), start, batches, rounds=3)[0].shared[
            "params"
        ]
        for method in (fednova, fedavg)
    )
    gaps = jax.tree.map(lambda a, b: float(abs(a - b).max()), nova, mean)
    largest = max(jax.tree.leaves(gaps))
    assert largest < 1e-13 if equal else largest > 1e-3
