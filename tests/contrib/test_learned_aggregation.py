"""FedAWA and FedLWS: learned weights and shrunk layers, beside PyTorch and NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations as fed
from fedjax_bn.contrib.fedawa import adaptive_weights
from fedjax_bn.contrib.fedlws import layer_shrinking

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


@pytest.mark.parametrize("steps", [1, 4])
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
