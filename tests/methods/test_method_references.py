"""MOON, FedDC, FedDyn, PerFedAvg against plain loops over clients, rounds and batches in float64.

The loops share nothing with the library: their network is six lines of jax.numpy, and they follow
the equations in the order in which the papers print them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import federations as fed
from fedjax_bn.contrib import feddyn
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.local_step import differentiate
from fedjax_bn.methods import feddc, moon, perfedavg
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.models import MLP
from fedjax_bn.sharing import all_but_batch_norm, everything
from fedjax_bn.state import Received

SIZES, RATE = (9, 4, 6), 0.1
ALL, SOME = [3 * [True]] * 3, [3 * [True], [True, False, True], [False, True, True]]
NET = MLP(fed.CLASSES, hidden=(8,))
SHARING = {"all": everything, "bn_local": all_but_batch_norm}


SHAPES = {
    "params/dense1/kernel": (fed.FEATURES, 8),
    "params/dense1/bias": (8,),
    "params/norm1/scale": (8,),
    "params/norm1/bias": (8,),
    "params/head/kernel": (8, fed.CLASSES),
    "params/head/bias": (fed.CLASSES,),
    "batch_stats/norm1/mean": (8,),
    "batch_stats/norm1/var": (8,),
}


def start() -> dict:
    """Flat variables of `NET`."""
    random = np.random.default_rng(5)
    return {name: random.uniform(0.1, 1, shape) for name, shape in SHAPES.items()}


def nested(flat: dict) -> dict:
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def apply(w: dict, x: jax.Array, train: bool) -> tuple[jax.Array, jax.Array, dict]:
    """Features, logits and moved statistics."""
    h = x @ w["params/dense1/kernel"] + w["params/dense1/bias"]
    mean, var, n = h.mean(0), h.var(0), len(x)
    old = {name: w[f"batch_stats/norm1/{name}"] for name in ("mean", "var")}
    moved = {
        "batch_stats/norm1/mean": 0.9 * old["mean"] + 0.1 * mean,
        "batch_stats/norm1/var": 0.9 * old["var"] + 0.1 * var * n / max(n - 1, 1),
    }
    if not train:
        mean, var, moved = old["mean"], old["var"], {}
    h = (h - mean) / jnp.sqrt(var + 1e-5) * w["params/norm1/scale"] + w["params/norm1/bias"]
    z = jnp.maximum(h, 0)
    return z, z @ w["params/head/kernel"] + w["params/head/bias"], moved


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y].mean()


def gradient(w: dict, loss) -> dict:
    """Gradient of `loss(w)` -> (value, moved) over parameters; also the moved statistics."""
    params = {name: leaf for name, leaf in w.items() if name.startswith("params")}
    grads, moved = jax.grad(lambda p: loss({**w, **p}), has_aux=True)(params)
    return grads, moved


def descend(w: dict, grads: dict, moved: dict, rate: float = RATE) -> dict:
    return {**w, **moved, **{name: w[name] - rate * g for name, g in grads.items()}}


def plain(x, y):
    def loss(w):
        _, logits, moved = apply(w, x, train=True)
        return cross_entropy(logits, y), moved

    return loss


def data_of(batches: dict) -> list[list[tuple]]:
    """Each client's batches without padding."""
    image, label, valid = (np.asarray(batches[n]) for n in ("image", "label", "valid"))
    return [
        [
            (image[k, s][valid[k, s]], label[k, s][valid[k, s]])
            for s in range(valid.shape[1])
            if valid[k, s].any()
        ]
        for k in range(len(valid))
    ]


def federation(
    train, combine, shared: set, batches: dict, present: list
) -> tuple[dict, list[dict], np.ndarray]:
    """`train(k, w, data) -> w` for each participant, then `combine(models, weights)`, each round.

    Who sits out keeps its model and has weight 0.
    """
    server, models = start(), [start()] * len(SIZES)
    data = data_of(batches)
    for participates in present:
        received = [{n: (server if n in shared else own)[n] for n in own} for own in models]
        models = [train(k, w, data[k]) if participates[k] else w for k, w in enumerate(received)]
        weights = np.where(participates, SIZES, 0) / np.dot(participates, SIZES)
        server = combine(models, weights)
    own = [{n: (server if n in shared else own)[n] for n in own} for own in models]
    return server, own, weights


def mean(models: list[dict], weights: np.ndarray) -> dict:
    return {n: sum(p * m[n] for p, m in zip(weights, models, strict=True)) for n in models[0]}


def moon_reference(shared: set, batches: dict, present: list, mu: float, temperature: float):
    previous = {k: start() for k in range(len(SIZES))}

    def similarity(a, b):
        norms = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
        return (a * b).sum(1) / jnp.maximum(norms, 1e-8)

    @jax.jit
    def step(w, received, previous, x, y):
        known = [apply(model, x, train=False)[0] for model in (received, previous)]

        def loss(w):
            z, logits, moved = apply(w, x, train=True)
            a, b = (jnp.exp(similarity(z, other) / temperature) for other in known)
            return cross_entropy(logits, y) + mu * -jnp.log(a / (a + b)).mean(), moved

        return descend(w, *gradient(w, loss))

    def train(k, received, data):
        w = received
        for x, y in data:
            w = jax.device_get(step(w, received, previous[k], x, y))
        previous[k] = w
        return w

    return federation(train, mean, shared, batches, present)


def feddc_reference(shared: set, batches: dict, present: list, alpha: float):
    names = [n for n in start() if n.startswith("params") and n in shared]
    zero = {n: np.zeros(SHAPES[n]) for n in names}
    h, c_k, c = [dict(zero) for _ in SIZES], [dict(zero) for _ in SIZES], dict(zero)

    @jax.jit
    def step(w, received, h, c_k, c, x, y):
        grads, moved = gradient(w, plain(x, y))
        for n in names:
            grads[n] += alpha * (w[n] + h[n] - received[n]) - c_k[n] + c[n]
        return descend(w, grads, moved)

    def train(k, received, data):
        w = received
        for x, y in data:
            w = jax.device_get(step(w, received, h[k], c_k[k], c, x, y))
        for n in names:
            h[k][n] = h[k][n] + w[n] - received[n]
            c_k[k][n] = c_k[k][n] - c[n] + (received[n] - w[n]) / (len(data) * RATE)
        return w

    def combine(models, weights):
        for n in names:
            c[n] = sum(own[n] for own in c_k) / len(c_k)
        averaged, drift = mean(models, weights), mean(h, weights)
        return averaged | {n: averaged[n] + drift[n] for n in names}

    return federation(train, combine, shared, batches, present)


def feddyn_reference(shared: set, batches: dict, present: list, alpha: float):
    """Algorithm 1: g_k is a client's gradient at its minimum, h the server's state."""
    names = [n for n in start() if n.startswith("params") and n in shared]
    *g, h = ({n: np.zeros(SHAPES[n]) for n in names} for _ in range(len(SIZES) + 1))

    @jax.jit
    def step(w, received, g, x, y):
        grads, moved = gradient(w, plain(x, y))
        for n in names:
            grads[n] += alpha * (w[n] - received[n]) - g[n]
        return descend(w, grads, moved)

    def train(k, received, data):
        w = received
        for x, y in data:
            w = jax.device_get(step(w, received, g[k], x, y))
        for n in names:
            g[k][n] = g[k][n] - alpha * (w[n] - received[n])
            h[n] = h[n] - alpha * (w[n] - received[n]) / len(SIZES)
        return w

    def combine(models, weights):
        averaged = mean(models, (weights > 0) / (weights > 0).sum())
        return averaged | {n: averaged[n] - h[n] / alpha for n in names}

    return federation(train, combine, shared, batches, present)


def perfedavg_reference(
    shared: set, batches: dict, present: list, inner_rate: float, second_order: bool
):
    @jax.jit
    def step(w, x, y):
        n = -(-len(y) // 2)
        other = slice(n if len(y) > 1 else 0, None)
        second = plain(x[other], y[other])

        def adapted(w):
            return descend(w, *gradient(w, plain(x[:n], y[:n])), inner_rate)

        if second_order:
            return descend(w, *gradient(w, lambda w: second(adapted(w))))
        return descend(w, *gradient(adapted(w), second))

    def train(k, w, data):
        for x, y in data:
            w = jax.device_get(step(w, x, y))
        return w

    return federation(train, mean, shared, batches, present)


CASES = {
    "moon": (moon, moon_reference, {"mu": 1.0, "temperature": 0.5}),
    "feddc": (feddc, feddc_reference, {"alpha": 0.1}),
    "feddyn": (feddyn, feddyn_reference, {"alpha": 0.3}),
    "perfedavg": (perfedavg, perfedavg_reference, {"inner_rate": 0.2, "second_order": False}),
    "perfedavg 2": (perfedavg, perfedavg_reference, {"inner_rate": 0.2, "second_order": True}),
}


@pytest.mark.parametrize(
    ("case", "mode", "epochs", "present", "clients"),
    [
        pytest.param("moon", "all", 1, ALL, "map", marks=pytest.mark.slow),
        pytest.param("moon", "bn_local", 2, SOME, "vmap:2", marks=pytest.mark.slow),
        pytest.param("feddc", "all", 2, SOME, "map", marks=pytest.mark.slow),
        pytest.param("feddc", "bn_local", 1, SOME, "vmap:2", marks=pytest.mark.slow),
        ("feddyn", "all", 2, SOME, "map"),
        pytest.param("perfedavg", "all", 2, ALL, "map", marks=pytest.mark.slow),
        pytest.param("perfedavg", "bn_local", 1, SOME, "map", marks=pytest.mark.slow),
        ("perfedavg 2", "all", 1, ALL, "map"),
    ],
)
def test_three_rounds_equal_a_plain_loop(x64, case, mode, epochs, present, clients):
    method, reference, arguments = CASES[case]
    batches, variables = fed.batches_of(SIZES, epochs=epochs), nested(start())
    mask = flatten_dict(SHARING[mode](variables), sep="/")
    shared = {name for name, leaf in mask.items() if leaf}
    server, models, weights = reference(shared, batches, present, **arguments)
    options = {"share": SHARING[mode], "clients": clients, "local_epochs": epochs}
    ours = method(NET, optax.sgd(RATE), **options, **arguments)
    state = fed.begun(ours, jax.random.key(1), variables, len(SIZES))
    for participates in present:
        some = batches | {"participates": jnp.asarray(participates)}
        state, _ = ours.round(state, some, jax.random.key(1))
    # An unseen client gets the participants' mean of the personal leaves.
    expected = {**mean(models, weights), **{n: server[n] for n in shared}}
    fed.assert_close(fed.global_variables(state), nested(expected), rtol=1e-9, atol=1e-12)
    for k, own in enumerate(models):
        fed.assert_close(
            fed.client(fed.client_variables(state), k), nested(own), rtol=1e-9, atol=1e-12
        )


KEY = jax.random.key(0)


def objective_of(model):
    return supervised(learning(model)[0])


def personalized(model, *arrays, **options):
    """As one program, not one an operation."""
    return jax.jit(partial(personalize, model, **options))(*arrays)


def first_batch(size):
    """The batch of a federation of one client."""
    return {name: np.asarray(value)[0, 0] for name, value in fed.batches_of((size,)).items()}


def test_personalization_is_one_step_of_gradient_descent_on_the_labelled_samples(x64):
    start, batch = fed.in_float64(fed.variables_of(fed.NormNet())), first_batch(3)
    ours = personalized(fed.NormNet(), start, *batch.values(), inner_rate=0.2)
    gradient = differentiate(objective_of(fed.NormNet()))

    def by_hand(start, batch):
        gradients, (_, moved) = gradient(start, blank_padding(batch), Received((), ()), KEY)
        params = jax.tree.map(lambda w, g: w - 0.2 * g, start["params"], gradients["params"])
        return {"params": params, **moved}

    fed.assert_close(ours, jax.jit(by_hand)(start, batch), rtol=1e-12)
    short = {name: value[:3] for name, value in batch.items()}
    theirs = personalized(fed.NormNet(), start, short["image"], short["label"], inner_rate=0.2)
    fed.assert_close(ours, theirs, rtol=1e-10)
