"""FedFA: redrawn statistics and their gradient by PyTorch, variances over clients by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations as fed
from fedjax_bn import models
from fedjax_bn.contrib import fedfa
from fedjax_bn.contrib.fedfa import COLLECTION, redraw_map
from fedjax_bn.engine.privacy import gaussian
from fedjax_bn.sharing import all_but_batch_norm

KEY, SIZES = jax.random.key(1), (9, 4, 6)


def start():
    return fed.in_float64(fed.variables_of(fed.MapNet()))


def traced(method):
    """A round whose errors appear, and which is not compiled."""
    variables = fed.variables_of(fed.MapNet())
    state = jax.eval_shape(lambda: method.init(KEY, variables, 3))
    return jax.eval_shape(method.round, state, fed.batches_of(SIZES), KEY)


def torch_fusion(u):
    share = 1 / (1 + 1 / (u + 1e-6))
    return len(u) * share / share.sum()


def test_a_redrawn_map_and_its_gradient_are_those_of_pytorch(x64):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    x, ahead = random.normal(2, 3, (5, 4, 3, 2)), random.normal(size=(5, 4, 3, 2))
    u = {"mean": np.array([0.3, 2.0]), "std": np.array([0.1, 0.0])}
    valid = np.array([True, True, False, True, True])
    ahead[~valid] = 0  # what a padded sample becomes does not matter
    key = jax.random.key(4)
    noise = [np.asarray(jax.random.normal(k, (5, 2))) for k in jax.random.split(key)]

    def ours(x):
        new, means = redraw_map(key, x, jnp.asarray(valid), jax.tree.map(jnp.asarray, u))
        return (new * ahead).sum(), (new, means)

    gradient, (new, means) = jax.jit(jax.grad(ours, has_aux=True))(jnp.asarray(x))
    t = torch.tensor(x, requires_grad=True)
    mean, std = t.mean((1, 2)), (t.var((1, 2)) + 1e-6).sqrt()
    drawn = []
    for e, own, name in zip(noise, (mean, std), u, strict=True):
        wide = (1 + torch.tensor(torch_fusion(u[name]))) * (own[valid].var(0) + 1e-6)
        drawn.append((own + torch.tensor(e) * wide.sqrt())[:, None, None])
        np.testing.assert_allclose(means[name], own[valid].mean(0).detach(), rtol=1e-12)
    theirs = (t - mean[:, None, None]) / std[:, None, None] * drawn[1] + drawn[0]
    (theirs * torch.tensor(ahead)).sum().backward()
    np.testing.assert_allclose(new[valid], theirs.detach()[valid], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(gradient[valid], t.grad[valid], rtol=1e-9, atol=1e-10)


def test_averages_are_of_redrawn_batches_and_the_server_takes_their_variances(x64):
    """Maps of the first step by NumPy: a batch norm of the data, three positions of two channels.

    The second client sits out, so that it does not count.
    """
    batches = fed.batches_of((4, 3, 2)) | {"participates": jnp.asarray([True, False, True])}
    method = fed.once(fedfa, fed.MapNet(), fed.SGD, probability=1.0, momentum=0.75)
    state = fed.begun(method, KEY, start(), 3)
    norm = {**start()["params"]["norm"], **start()["batch_stats"]["norm"]}
    averages = []
    for k, size in ((0, 4), (2, 2)):
        x = np.asarray(batches["image"])[k, 0, :size].reshape(size, 3, 2)
        y = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5) * norm["scale"] + norm["bias"]
        own = y.mean(1).mean(0), np.sqrt(y.var(1, ddof=1) + 1e-6).mean(0)
        averages.append((0.25 * own[0], 0.75 + 0.25 * own[1]))
    state, _ = method.round(state, batches, KEY)
    for name, own in zip(("mean", "std"), zip(*averages, strict=True), strict=True):
        np.testing.assert_allclose(state.server.sent["norm"][name], np.var(own, 0), 1e-9, 1e-15)
        mean = np.average(own, axis=0, weights=[4, 2])
        np.testing.assert_allclose(state.shared[COLLECTION]["norm"][name], mean, rtol=1e-10)


@pytest.mark.parametrize(
    ("model", "places"),
    [
        (models.UNet(levels=2, width=2), ["bottleneck", "encoder1", "encoder2"]),
        (
            models.ResNet18(width=2),
            ["layer1_1", "layer2_1", "layer3_1", "layer4_1"],
        ),
        (models.SmallCNN(widths=(2, 4)), ["norm1", "norm2"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_by_default_the_ends_of_stages_are_redrawn(model, places):
    key, image = jax.random.key(0), jnp.zeros((1, 32, 32, 3))
    state = jax.eval_shape(
        lambda: fedfa(model, fed.SGD).init(key, model.init(key, image), 2).shared[COLLECTION]
    )
    assert sorted(state) == places


def test_modules_without_maps_and_privacy_are_refused():
    for names, said in (("out", r"out give none: .*fedfa\.names"), ("no", "fedfa: names='no'")):
        with pytest.raises(ValueError, match=said):
            traced(fedfa(fed.MapNet(), fed.SGD, names=names))
    safe = {"privacy": gaussian(1.0, 1.0), "share": all_but_batch_norm}
    with pytest.raises(ValueError, match="4 arrays"):
        traced(fedfa(fed.MapNet(), fed.SGD, **safe))
