"""RSC and MixStyle: what they do to features, by NumPy, and what they reduce to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
import norm_nets as nets
from fedjax_bn.contrib.mixstyle import chosen_maps, with_styles
from fedjax_bn.contrib.rsc import self_challenging_objective
from fedjax_bn.methods.learning import learning
from fedjax_bn.models import MLP, ResNet10
from fedjax_bn.models.forward import forward
from fedjax_bn.state import Received

KEY = jax.random.key(3)
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
