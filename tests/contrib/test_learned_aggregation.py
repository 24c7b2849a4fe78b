"""Weights that the server learns, and the rules that adjust them by validation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
import runs
from federations import once
from fedjax_bn.aggregation import generalization_adjustment
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.contrib.fedawa import adaptive_weights
from fedjax_bn.contrib.fedlws import layer_shrinking
from fedjax_bn.methods import fedavg
from fedjax_bn.methods.selection import validation_loss
from fedjax_bn.run.experiment import build as module
from fedjax_bn.state import Received

LAYERS = {"a": {"kernel": (3, 2), "bias": (2,)}, "b": {"kernel": (2, 2)}, "c": None}
SIZES = np.array([9, 4, 6, 5])
PRESENT = ([1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1])


def drawn(seed, *lead, scale=1.0):
    """Leaves [*lead, ...], of which one is personal, and statistics."""
    random = np.random.default_rng(seed)
    shapes = {"params": LAYERS, "batch_stats": {"n": {"var": (2,)}}}
    draw = lambda shape: jnp.asarray(scale * random.normal(size=(*lead, *shape)))  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def spoiled(uploads, present):
    """Of a client that does not count the leaves mean nothing."""
    rows = lambda leaf: np.reshape(present, (-1, *[1] * (leaf.ndim - 1)))  # noqa: E731
    return jax.tree.map(lambda leaf: jnp.where(rows(leaf), leaf, jnp.nan), uploads)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_fedawas_weights_are_those_of_pytorchs_adam(x64, steps):
    torch = pytest.importorskip("torch")
    rule = adaptive_weights(rate=0.05, steps=steps)

    def flat(tree):
        leaves = jax.tree.leaves(tree["params"])
        return torch.tensor(np.concatenate([np.ravel(leaf) for leaf in leaves]))

    ours, theirs, reweigh = rule.init(4), {}, jax.jit(rule.reweigh)
    for number, present in enumerate(PRESENT):
        x, uploads, present = drawn(number), drawn(9 + number, 4, scale=2.0), np.array(present)
        shares = SIZES * present / (SIZES @ present)
        weights, ours = reweigh(ours, spoiled(uploads, present), x, jnp.asarray(shares))
        who = np.flatnonzero(present)
        a = torch.tensor([theirs.get(k, shares[k]) for k in who], dtype=float, requires_grad=True)
        y = torch.stack([flat(fed.client(uploads, k)) for k in who])
        t, adam = y - flat(x), torch.optim.Adam([a], lr=0.05, betas=(0.5, 0.999))
        for _ in range(steps):
            p = a.softmax(0)
            far = (t - p @ t).norm(dim=1)
            cosine = torch.nn.functional.cosine_similarity(y, flat(x)[None], dim=1)
            adam.zero_grad()
            (p * (far + 1 - cosine)).sum().backward()
            adam.step()
        theirs |= dict(zip(who.tolist(), a.tolist(), strict=True))
        np.testing.assert_allclose(weights[who], p.detach(), rtol=1e-9)
        np.testing.assert_array_equal(weights[present == 0], 0)
        np.testing.assert_allclose(ours["score"][who], a.detach(), rtol=1e-9)


def test_fedlws_shrinks_each_layer_by_the_papers_factor(x64):
    weights, present = np.array([0.5, 0.2, 0.0, 0.3]), np.array([1, 1, 0, 1])
    x, uploads = drawn(1), drawn(2, 4, scale=0.3)
    options = {"beta": 0.1, "least": 0.01, "most": 0.05}
    combine = jax.jit(layer_shrinking(**options).combine)
    ours, same = combine(spoiled(uploads, present), x, jnp.asarray(weights))
    np.testing.assert_array_equal(same, weights)
    flat = lambda layer, *lead: np.concatenate(  # noqa: E731
        [np.reshape(leaf, (*lead, -1)) for leaf in jax.tree.leaves(layer)], -1
    )
    for name, limit in {"a": 0.05, "b": 1.0}.items():  # which limits tau of the first alone
        rows, start = flat(uploads["params"][name], 4), flat(x["params"][name])
        mean, kept, size = weights @ rows, rows[present > 0], np.linalg.norm(start)
        tau = min(0.1 * np.linalg.norm(kept - kept.mean(0), axis=1).mean(), limit)
        assert 0.01 < tau <= 0.05
        expected = mean * size / (size + tau * np.linalg.norm(mean - start))
        np.testing.assert_allclose(flat(ours["params"][name]), expected, rtol=1e-10)
    var = weights @ np.asarray(uploads["batch_stats"]["n"]["var"])
    np.testing.assert_allclose(ours["batch_stats"]["n"]["var"], var, rtol=1e-12)
    zero = jax.tree.map(jnp.zeros_like, x)
    ours, _ = combine(spoiled(uploads, present), zero, jnp.asarray(weights))
    mean = weights @ flat(uploads["params"]["b"], 4)
    np.testing.assert_allclose(flat(ours["params"]["b"]), mean, rtol=1e-12)


CLIENT_SIZES, KEY = (9, 4, 6), jax.random.key(1)
SGD = optax.sgd(0.1)


def first_bias(variables, received):
    """A metric that needs no data."""
    del received
    return variables["params"]["dense"]["bias"][0]


def test_weights_stay_a_distribution_and_who_is_absent_keeps_its_own():
    random = np.random.default_rng(0)
    rule = generalization_adjustment(first_bias, step=0.9, rounds=10**6)
    state, weigh = rule.init(5), jax.jit(rule.weigh)
    for _ in range(50):
        present = random.random(5) < 0.7
        sent = random.normal(size=(2, 5)).astype(np.float32)
        messages = {"received": sent[0], "trained": sent[1]}
        weights, after = weigh(state, present.astype(np.int32), np.zeros(5), messages)
        new, before = np.asarray(after["weight"]), state["weight"]
        np.testing.assert_array_equal(new[~present], before[~present])
        np.testing.assert_array_equal(weights, np.where(present, new, 0))
        assert (new >= 0).all()
        np.testing.assert_allclose(new.sum(), 1, rtol=1e-5)
        state = after
    assert state["weight"].max() > 0.3


def test_weights_of_a_federation_are_those_of_the_authors_loop(x64):
    """A client's gap is taken of the model aggregated in the round before."""
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    rule = generalization_adjustment(first_bias, step=0.2, rounds=4)
    method, plain = fedavg(fed.PlainNet(), SGD, weigh=rule), once(fedavg, fed.PlainNet(), SGD)
    state, a, trained = fed.begun(method, KEY, variables, 3), np.full(3, 1 / 3), None
    for r in range(3):
        server = first_bias(fed.global_variables(state), None)
        if trained is not None:  # after round r - 1, in the paper's count
            gaps = np.asarray(server - trained)
            a = a + (0.2 - (r - 2) * 0.2 / 4) * gaps / np.abs(gaps).max() / 3
            a = np.clip(a, 0, 1) / np.clip(a, 0, 1).sum()
        start, batches = fed.global_variables(state), fed.batches_of(CLIENT_SIZES)
        alone = [fed.run_rounds(plain, start, fed.client(batches, [k]))[0] for k in range(3)]
        trained = np.array([first_bias(fed.global_variables(one), None) for one in alone])
        state, metrics = method.round(state, fed.batches_of(CLIENT_SIZES), KEY)
        np.testing.assert_allclose(metrics["weights"], a, rtol=1e-9)
        np.testing.assert_allclose(first_bias(fed.global_variables(state), None), a @ trained)
    assert np.ptp(a) > 0.05


def test_the_loss_on_validation_samples_is_their_mean_cross_entropy(x64):
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    one = jax.tree.map(lambda x: x[0], fed.batches_of((10,)))
    loss = validation_loss(fed.PlainNet(), lambda images, dtype: images.astype(dtype))
    ours = loss(variables, Received((), (), validation=one))
    dense, valid = variables["params"]["dense"], np.asarray(one["valid"]).ravel()
    x = np.asarray(one["image"]).reshape(-1, 6)[valid]
    z = x @ dense["kernel"] + dense["bias"]
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    label = np.asarray(one["label"]).ravel()[valid]
    np.testing.assert_allclose(ours, -logs[np.arange(10), label].mean(), rtol=1e-12)


def test_a_configuration_spells_it_for_any_method_and_needs_validation_samples(monkeypatch):
    runs.install(monkeypatch)
    text = "generalization_adjustment:metric=accuracy:step=0.1"
    module.prepare(runs.config(method="fedbn", weigh=text))  # traces a round
    runs.install(monkeypatch, runs.dataset(validation=False))
    with pytest.raises(ConfigError, match=r"config\.weigh='generalization_.* needs validation"):
        module.prepare(runs.config(method="fedbn", weigh=text))
