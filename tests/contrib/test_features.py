"""RSC, MixStyle and FedFA: what they do to features and their statistics, by NumPy and PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
import norm_nets as nets
from fedjax_bn import models
from fedjax_bn.contrib import fedfa
from fedjax_bn.contrib.fedfa import COLLECTION, redraw_map
from fedjax_bn.contrib.mixstyle import chosen_maps, with_styles
from fedjax_bn.contrib.rsc import self_challenging_objective
from fedjax_bn.methods.learning import learning
from fedjax_bn.models import MLP, ResNet10
from fedjax_bn.models.forward import forward
from fedjax_bn.state import Received

KEY, SIZES = jax.random.key(3), (9, 4, 6)
NET = MLP(fed.CLASSES, hidden=(9,))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def mask_by_hand(f, y, valid, logits_of, gradient, muted, share):
    """Sample by sample, as DomainBed's text says it."""
    keep = np.ones_like(f)
    for i in range(len(f)):
        keep[i, np.argsort(-gradient[i])[: int(muted * f.shape[1])]] = 0
    row = np.arange(len(f))
    falls = softmax(logits_of(f))[row, y] - softmax(logits_of(f * keep))[row, y]
    real = np.flatnonzero(valid)
    chosen = real[np.argsort(-falls[real])][: int(share * len(real))]
    mask = np.ones_like(f)
    mask[chosen] = keep[chosen]
    return mask


def test_rscs_objective_is_that_of_masked_features_and_the_mask_has_no_gradient(x64):
    """The network after its batch norm, and its gradient, with the mask held as a constant."""
    variables = fed.in_float64(fed.variables_of(NET))
    batch = {name: leaf[0, 0] for name, leaf in fed.batches_of((7,), batch=9).items()}
    batch["image"] = jnp.nan_to_num(batch["image"])
    objective = self_challenging_objective(learning(NET)[0], 1 / 3, 1 / 2)

    def ours(params):
        return objective({**variables, "params": params}, batch, Received((), ()), KEY)[0]

    def features(params):
        w = {**variables, "params": params}
        options = {"train": True, "valid": batch["valid"], "wanted": ["features"]}
        return forward(NET, w, batch["image"], **options).features

    head, y = variables["params"]["head"], np.asarray(batch["label"])
    logits_of = lambda f: np.asarray(f @ head["kernel"] + head["bias"])  # noqa: E731
    f = np.asarray(jax.jit(features)(variables["params"]))
    weights = np.asarray(head["kernel"])[:, y].T
    mask = mask_by_hand(f, y, batch["valid"], logits_of, weights, 1 / 3, 1 / 2)

    def by_hand(params):
        logits = features(params) * mask @ params["head"]["kernel"] + params["head"]["bias"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses[:7].mean()

    assert (mask == 0).any()
    found, expected = (jax.jit(jax.value_and_grad(f))(variables["params"]) for f in (ours, by_hand))
    fed.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_styles_are_exactly_the_mixed_ones_and_ones_own_style_is_the_identity(x64):
    x = nets.images_of(6)
    other, weight = x[jnp.asarray([3, 2, 5, 0, 1, 4])], jnp.linspace(0, 1, 6)[:, None, None, None]
    moments = lambda x: (np.mean(x, (1, 2)), np.sqrt(np.var(x, (1, 2), ddof=1)))  # noqa: E731
    x, other, mix = np.asarray(x), np.asarray(other), jax.jit(with_styles)
    mixed = np.asarray(mix(x, other, weight))
    share = np.linspace(0, 1, 6)[:, None]
    for ours, own, theirs in zip(*map(moments, (mixed, x, other)), strict=True):
        np.testing.assert_allclose(ours, share * own + (1 - share) * theirs, rtol=1e-5)
    np.testing.assert_allclose(mix(x, other, np.ones_like(weight)), x, rtol=1e-10)
    np.testing.assert_allclose(mix(x, x, weight), x, rtol=1e-10)


def test_no_gradient_passes_through_styles(x64):
    """The derivative by x is the ratio of the deviations alone."""
    x, other = nets.images_of(2), nets.images_of(2, seed=1)
    weight = jnp.full((2, 1, 1, 1), 0.3)
    slope = jax.jit(jax.grad(lambda x: with_styles(x, other, weight).sum()))(x)
    std, theirs = (np.sqrt(np.var(a, (1, 2), keepdims=True, ddof=1) + 1e-6) for a in (x, other))
    expected = np.broadcast_to((0.3 * std + 0.7 * theirs) / std, x.shape)
    np.testing.assert_allclose(slope, expected, rtol=1e-9)


def test_places_are_the_ends_of_stages_named_ones_or_the_first_norms_of_maps():
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    net = ResNet10(num_classes=3, width=1)
    variables = jax.eval_shape(net.init, KEY, images)
    assert chosen_maps(net, variables, images) == ("layer1_0", "layer2_0", "layer3_0")
    assert chosen_maps(net, variables, images, "layer1, layer2") == ("layer1_0", "layer2_0")
    assert chosen_maps(net, variables, images, "norm1, layer3") == ("norm1", "layer3_0")
    small = nets.images_of(2)
    own = nets.variables_of(nets.HandMade(), small)
    assert chosen_maps(nets.HandMade(), own, small) == ("block/inner", "middle")
    with pytest.raises(ValueError, match="names='layer9'"):
        chosen_maps(nets.HandMade(), own, small, "layer9")
    with pytest.raises(ValueError, match="mixstyle"):
        chosen_maps(fed.NormNet(), fed.variables_of(fed.NormNet()), jnp.zeros((2, 6)))


def start():
    return fed.in_float64(fed.variables_of(fed.MapNet()))


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
        (models.ResNet18(width=2), ["layer1_1", "layer2_1", "layer3_1", "layer4_1"]),
        (
            models.DenseNet((1, 1, 1, 1), growth=8, width=16),
            ["transition1/conv", "transition2/conv", "transition3/conv"],
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
