"""RSC and MixStyle: what they do to features, by NumPy, and what they reduce to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
from federations import (
    CLASSES,
    SGD,
    MapNet,
    NormNet,
    assert_close,
    assert_equal,
    batches_of,
    in_float64,
    once,
    run_rounds,
    variables_of,
)
from fedjax_bn.contrib import mixstyle, rsc
from fedjax_bn.contrib.mixstyle import chosen_maps, mixing_styles, with_styles
from fedjax_bn.contrib.rsc import muted_mask, self_challenging_objective
from fedjax_bn.methods import fedavg
from fedjax_bn.methods.learning import learning
from fedjax_bn.models import MLP, ResNet10
from fedjax_bn.models.forward import forward
from fedjax_bn.state import Received

KEY, SIZES = jax.random.key(3), (9, 4, 6)
NET = MLP(CLASSES, hidden=(9,))


def head_of_random_numbers(features=9, seed=0):
    random = np.random.default_rng(seed)
    kernel, f = random.normal(size=(features, 4)), random.normal(size=(8, features))
    return kernel, f, random.integers(0, 4, 8)


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


@pytest.mark.parametrize("padded", [0, 5])
def test_muted_are_the_features_of_the_largest_weights_of_the_label(x64, padded):
    kernel, f, y = head_of_random_numbers(seed=padded)
    valid = np.arange(8) < 8 - padded
    given = map(jnp.asarray, (f, f @ kernel, y, valid))
    mute = jax.jit(lambda *given: muted_mask(lambda f: f @ kernel, *given, 1 / 3, 1 / 2))
    mask = mute(*given)
    expected = mask_by_hand(f, y, valid, lambda f: f @ kernel, kernel[:, y].T, 1 / 3, 1 / 2)
    np.testing.assert_array_equal(mask, expected)
    assert (mask == 0).any(1).sum() == (8 - padded) // 2
    assert set((mask == 0).sum(1).tolist()) == {0, 3}


def test_the_objective_is_that_of_masked_features_and_the_mask_has_no_gradient(x64):
    """The network after its batch norm, and its gradient, with the mask held as a constant."""
    variables = in_float64(variables_of(NET))
    batch = {name: leaf[0, 0] for name, leaf in batches_of((4,)).items()}
    objective = self_challenging_objective(learning(NET)[0], 1 / 3, 1 / 2)

    def ours(params):
        return objective({**variables, "params": params}, batch, Received((), ()), KEY)[0]

    def features(params):
        w = {**variables, "params": params}
        return forward(NET, w, batch["image"], train=True, wanted=["features"]).features

    head, y = variables["params"]["head"], np.asarray(batch["label"])
    logits_of = lambda f: np.asarray(f @ head["kernel"] + head["bias"])  # noqa: E731
    f = np.asarray(jax.jit(features)(variables["params"]))
    weights = np.asarray(head["kernel"])[:, y].T
    mask = mask_by_hand(f, y, batch["valid"], logits_of, weights, 1 / 3, 1 / 2)

    def by_hand(params):
        logits = features(params) * mask @ params["head"]["kernel"] + params["head"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    assert (mask == 0).any()
    found, expected = (jax.jit(jax.value_and_grad(f))(variables["params"]) for f in (ours, by_hand))
    assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "shares", [{"features": 0.0}, pytest.param({"batch": 0.0}, marks=pytest.mark.slow)]
)
def test_rsc_that_mutes_nothing_is_fedavg(x64, shares):
    variables = in_float64(variables_of(NET))
    ours, plain = (
        run_rounds(method, variables, batches_of(SIZES), rounds=2)[0]
        for method in (rsc(NET, SGD, **shares), once(fedavg, NET, SGD))
    )
    assert_close(ours, plain, rtol=1e-10, atol=1e-12)


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


def test_padding_gives_no_sample_its_style():
    x = nets.images_of(5).at[3:].set(1e3)
    valid = jnp.arange(5) < 3
    mixed = jax.jit(mixing_styles(1.0, 0.1))(KEY, x, valid)
    assert abs(mixed[:3]).max() < 50
    assert (abs(mixed - x)[:3].max((1, 2, 3)) > 1e-3).any()


@pytest.mark.slow
def test_mixstyle_of_probability_0_is_fedavg_to_the_bit():
    batches = batches_of(SIZES)
    ours, plain = (
        run_rounds(method, variables_of(MapNet()), batches, rounds=2)[0]
        for method in (
            mixstyle(MapNet(), SGD, names="norm", probability=0.0),
            once(fedavg, MapNet(), SGD),
        )
    )
    assert_equal(ours, plain)


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
    with pytest.raises(ValueError, match="has none"):
        chosen_maps(NormNet(), variables_of(NormNet()), jnp.zeros((2, 6)))
    point = jax.eval_shape(lambda: net.init(KEY, jnp.zeros((2, 1, 1, 3))))  # has no deviation
    with pytest.raises(ValueError, match="has none"):
        chosen_maps(net, point, jnp.zeros((2, 1, 1, 3)))
