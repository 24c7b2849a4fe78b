"""FedNova's normalization, and the response of local optimizers on which it rests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.engine.optimizers import response
from fedjax_bn.methods import fedavg, fednova, singleset
from fedjax_bn.state import Received

SIZES = (9, 4, 6)
NET = fed.OneNorm()
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
    sgd, start = DECAYING[decay], jax.device_get(fed.in_float64(fed.variables_of(NET)))
    alone, _ = fed.run_rounds(fed.once(singleset, NET, sgd), start, fed.batches_of(SIZES))
    ours, _ = fed.run_rounds(fednova(NET, sgd), start, fed.batches_of(SIZES))
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
    start, batches = fed.in_float64(fed.variables_of(NET)), fed.batches_of(sizes, epochs=2)
    optimizer = fed.once(optax.sgd, 0.1, momentum=momentum or None)
    nova, mean = (
        fed.run_rounds(fed.once(method, NET, optimizer), start, batches, rounds=3)[0].shared[
            "params"
        ]
        for method in (fednova, fedavg)
    )
    gaps = jax.tree.map(lambda a, b: float(abs(a - b).max()), nova, mean)
    largest = max(jax.tree.leaves(gaps))
    assert largest < 1e-13 if equal else largest > 1e-3
