"""SNR, L2D and FedDG: what they do to maps, styles and spectra, and what each reduces to."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.contrib import feddg, l2d
from fedjax_bn.contrib.feddg import low_amplitudes, with_amplitudes
from fedjax_bn.contrib.l2d import (
    class_discrepancy,
    diversified_objective,
    leaked_information,
    stylize,
    supervised_contrast,
)
from fedjax_bn.contrib.snr import head_losses, restore_style
from fedjax_bn.methods.learning import learning
from fedjax_bn.state import Received

KEY = jax.random.key(3)
restore_style, head_losses = jax.jit(restore_style), jax.jit(head_losses)
RANDOM = np.random.default_rng


class Flat(nn.Module):
    """A classifier of pixels."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(fed.CLASSES, name="out")(x.reshape(len(x), -1))


def variables_of():
    return fed.in_float64(fed.variables_of(Flat()))


def normal(*shape, seed=0):
    return RANDOM(seed).normal(size=shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def test_a_restitution_layer_is_its_formula_and_an_open_gate_gives_all_back(x64):
    x, shapes = normal(4, 3, 2, 5), {"scale": (5,), "bias": (5,), "down": (5, 2), "down_bias": (2,)}
    shapes |= {"up": (2, 5), "up_bias": (5,)}
    own = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    mean, var = (f(x, (1, 2), keepdims=True) for f in (np.mean, np.var))
    n = (x - mean) / np.sqrt(var + 1e-5) * own["scale"] + own["bias"]
    r = x - n
    hidden = np.maximum(r.mean((1, 2)) @ own["down"] + own["down_bias"], 0)
    gate = sigmoid(hidden @ own["up"] + own["up_bias"])[:, None, None]
    restored, means = restore_style(own, jnp.asarray(x))
    np.testing.assert_allclose(restored, n + gate * r, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(means, (n, n + gate * r, n + (1 - gate) * r), strict=True):
        np.testing.assert_allclose(ours, theirs.mean((1, 2)), rtol=1e-10, atol=1e-12)
    opened, _ = restore_style(own | {"up_bias": np.full(5, 50.0)}, jnp.asarray(x))
    np.testing.assert_allclose(opened, x, rtol=1e-12)


def test_snrs_heads_tell_their_formula_and_equal_entropies_two_log_two_a_place(x64):
    valid, y = np.array([True, True, True, False]), np.array([0, 2, 1, 0], np.int32)
    seen = {name: normal(3, 4, 5, seed=i) for i, name in enumerate("ab")}
    heads = {
        n: {"kernel": normal(5, fed.CLASSES, seed=7), "bias": normal(fed.CLASSES)} for n in seen
    }
    expected = 0
    for name, means in seen.items():
        p = [softmax(x @ heads[name]["kernel"] + heads[name]["bias"]) for x in means]
        n, kept, left = (-(q * np.log(q)).sum(1)[valid].mean() for q in p)
        expected += np.log1p(np.exp(kept - n)) + np.log1p(np.exp(n - left))
    expected -= np.log(p[1][np.arange(4), y])[valid].mean()
    ours = head_losses(seen, heads, jnp.asarray(y), jnp.asarray(valid))
    np.testing.assert_allclose(ours, expected, rtol=1e-10)
    zeros = jax.tree.map(np.zeros_like, heads)
    ours = head_losses(seen, zeros, jnp.asarray(y), jnp.asarray(valid))
    np.testing.assert_allclose(ours, 2 * 2 * np.log(2) + np.log(fed.CLASSES), rtol=1e-12)


def test_amplitudes_of_a_window_are_exchanged_and_phases_stay(x64):
    """Of images above 0, where the sign of the mean is that of an amplitude."""
    x, other = RANDOM(0).uniform(0.1, 1, (2, 3, 7, 6, 2))
    share = RANDOM(1).uniform(size=(3, 1, 1, 1))
    spectrum, theirs = (np.fft.fft2(images, axes=(1, 2)) for images in (x, other))
    window = np.zeros((7, 6, 1))
    window[np.ix_([-1, 0, 1], [-1, 0, 1])] = 1
    size = np.abs(spectrum)
    size += window * (1 - share) * (np.abs(theirs) - size)
    expected = np.fft.ifft2(size * np.exp(1j * np.angle(spectrum)), axes=(1, 2))
    assert abs(expected.imag).max() < 1e-13
    mixed = jax.jit(
        lambda x, other, share, half: with_amplitudes(x, low_amplitudes(other, half), share, half),
        static_argnums=3,
    )
    np.testing.assert_allclose(mixed(x, other, share, 1), expected.real, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mixed(x, x, 0 * share, 1), x, rtol=0, atol=1e-13)
    means = mixed(-x, other, 0 * share, 0)
    moved = -x + x.mean((1, 2), keepdims=True) + other.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(means, moved, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="feddg:half"):
        low_amplitudes(jnp.asarray(x), 3)


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_feddg_learns_episodes_in_the_means_of_another_client_who_has_shown_some(x64, order):
    """The first round is FedAvg's of twice the loss; the second by hand, of two clients."""
    one_step, options = fed.batches_of((4, 3)), {"prepare": fed.as_maps}
    padded = lambda leaf: np.concatenate([leaf, np.zeros_like(leaf)], 1)  # noqa: E731
    batches = jax.tree.map(padded, one_step)
    options |= {"spectra": 1, "channels": 1, "inner_rate": 0.5, "clip": 0.05}
    method = feddg(Flat(), fed.SGD, order=order, **options)
    state, _ = fed.run_rounds(method, variables_of(), batches, key=KEY)
    x = [np.asarray(batches["image"][k, 0, :n]) for k, n in enumerate((4, 3))]
    shown = [6 * x[1][0].mean() / 6, 6 * x[0][0].mean() / 6]  # each other's first image
    bank = state.server.sent["amplitudes"].reshape(2)
    np.testing.assert_allclose(bank / 6, shown[::-1], rtol=1e-12)
    after, _ = method.round(jax.tree.map(jnp.copy, state), batches, KEY)
    expected = jax.tree.map(np.zeros_like, variables_of()["params"])
    for k, n in enumerate((4, 3)):
        y = batches["label"][k, 0, :n]

        def loss(params, images, y=y):
            logits = Flat().apply({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        def episode(params, start, k=k, loss=loss):
            g = jax.grad(loss)(params if order == 2 else start, x[k])
            inner = jax.tree.map(lambda w, g: w - 0.5 * jnp.clip(g, -0.05, 0.05), params, g)
            return loss(params, x[k]) + loss(inner, x[k] - x[k].mean(1, keepdims=True) + shown[k])

        g = jax.jit(jax.grad(episode))(*[state.shared["params"]] * 2)
        expected = jax.tree.map(lambda e, w, g, n=n: e + n / 7 * (w - 0.1 * g),
                                expected, state.shared["params"], g)  # fmt: skip
    fed.assert_close(after.shared["params"], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(after.server.sent["amplitudes"], state.server.sent["amplitudes"])

    # A client whose first batch is empty shows its images when it has some.
    late = jax.tree.map(lambda leaf: np.stack([leaf[0], leaf[1, ::-1]]), batches)
    begun, _ = fed.run_rounds(method, variables_of(), late, key=KEY)
    np.testing.assert_array_equal(begun.server.sent["known"], [[1], [0]])
    begun, _ = method.round(begun, batches, KEY)
    np.testing.assert_allclose(begun.server.sent["amplitudes"].reshape(2), bank, rtol=1e-12)
    assert "all others the amplitudes of 1x1 frequencies of 1 images" in method.notes[0]
    with pytest.raises(ValueError, match="feddg:spectra"):
        feddg(Flat(), fed.SGD)


def test_supervised_contrast_is_its_formula(x64):
    z, y = normal(6, 4), np.array([0, 1, 0, 2, 1, 0])
    valid = np.array([True] * 5 + [False])
    u, own = z / np.linalg.norm(z, axis=1, keepdims=True), []
    for i in range(5):
        others = [a for a in range(5) if a != i]
        total = np.log(sum(np.exp(u[i] @ u[a] / 0.07) for a in others))
        positive = [u[i] @ u[a] / 0.07 - total for a in others if y[a] == y[i]]
        own += [-np.mean(positive)] if positive else []  # class 2 has one sample
    ours = jax.jit(supervised_contrast)(jnp.asarray(z), jnp.asarray(y), jnp.asarray(valid))
    np.testing.assert_allclose(ours, np.mean(own), rtol=1e-10)


def test_what_moves_the_stylist_is_its_formula(x64):
    z, other = normal(5, 3), normal(5, 3, seed=1)
    y, valid = np.array([0, 1, 0, 1, 2], np.int32), np.array([True] * 4 + [False])
    gaps = []
    for rows in ([0, 2], [1, 3]):  # each class has a width of its own
        both = np.concatenate([z[rows], other[rows]])
        far = np.square(both[:, None] - both[None]).sum(-1)
        width = far.sum() / (len(both) * (len(both) - 1))
        k = sum(np.exp(-far / (ratio * width)) for ratio in (0.25, 0.5, 1, 2, 4))
        gaps.append(k[:2, :2].mean() + k[2:, 2:].mean() - 2 * k[:2, 2:].mean())
    measure = jax.jit(class_discrepancy, static_argnums=4)
    np.testing.assert_allclose(measure(z, other, y, valid, 4), np.mean(gaps), rtol=1e-10)
    np.testing.assert_allclose(measure(z, z, y, valid, 4), 0, atol=1e-13)

    mean, logs = normal(5, 3, seed=2), abs(normal(5, 3, seed=3))
    density = -0.5 * np.square(mean[:4, None] - other[None, :4]) / np.exp(logs)[:4, None]
    density = density.sum(-1)  # of z'_j under i, up to what both terms have
    expected = (np.diag(density) - density.mean(1)).mean()
    ours = jax.jit(leaked_information)(mean, logs, other, valid)
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_l2ds_surprise_is_a_mean_over_samples_and_features_and_part_of_the_models_loss(x64):
    method = l2d(Flat(), fed.SGD, channels=1, contrast=0.0, prepare=fed.as_maps)
    start = jax.jit(lambda v: method.init(KEY, v, 1))(variables_of())
    variables = fed.global_variables(start)
    batch = {name: leaf[0, 0] for name, leaf in fed.batches_of((3,)).items()}
    batch["image"] = jnp.where(batch["valid"][:, None], batch["image"], 0)
    learned, received = learning(Flat(), prepare=fed.as_maps)[0], Received((), ())
    objective = jax.jit(diversified_objective(learned, 0.6, 0.0, 2.0))
    value, (loss, _) = objective(variables, batch, received, KEY)

    z = np.asarray(batch["image"])  # what the classifier reads
    x = fed.as_maps(batch["image"], float)
    other = np.asarray(jax.jit(stylize)(variables["stylist"], x, 0.6, jax.random.fold_in(KEY, 18)))
    layers = variables["likelihood"]
    mean, logs = (z @ layers[n]["kernel"] + layers[n]["bias"] for n in ("mean", "logs"))
    mean, logs = np.where(mean > 0, mean, 0.01 * mean), np.maximum(logs, 0)
    gaps = np.square(other.reshape(4, -1) - mean) / np.exp(logs) + logs
    np.testing.assert_allclose(value - loss, 2 * gaps[:3].mean(), rtol=1e-9)
