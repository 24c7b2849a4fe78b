"""FedSAM, FedASAM, FedGAMMA, and HarmoFL, which trains so on harmonized images: by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn import adaptation
from fedjax_bn.aggregation import by_size
from fedjax_bn.contrib import fedsam, harmofl
from fedjax_bn.contrib.harmofl import harmonize

KEY, SIZES = jax.random.key(1), (9, 4, 6)


def test_of_the_spectrum_the_amplitude_of_the_mean_alone_is_exchanged(x64):
    """Of images above 0, as the authors' code does with a window of half side 0."""
    x = np.random.default_rng(0).uniform(0.1, 1, (4, 6, 5, 3))
    m = np.array([0.3, 0.5, 0.9])
    spectrum = np.fft.fft2(x, axes=(1, 2))
    amplitude = np.abs(spectrum)
    amplitude[:, 0, 0] = 30 * m
    expected = np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum)), axes=(1, 2))
    ours = harmonize(jnp.asarray(x), jnp.asarray(m))
    np.testing.assert_allclose(ours, expected.real, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.mean((1, 2)), np.tile(m, (4, 1)), rtol=1e-12)
    with pytest.raises(ValueError, match="harmofl:channels"):
        harmonize(jnp.asarray(x), jnp.zeros(1))


def test_the_means_are_those_of_first_batches_and_then_all_train_on_them(x64):
    """The second round by hand: FedSAM whose perturbation is the harmonizing."""
    variables = fed.in_float64(fed.variables_of(fed.MapNet()))
    batches = fed.batches_of(SIZES)
    method = harmofl(fed.MapNet(), fed.SGD, channels=1, prepare=fed.as_maps)
    state, _ = method.round(fed.begun(method, KEY, variables, 3), batches, KEY)
    m = np.asarray(state.shared["amplitude"]["mean"])
    first = [np.asarray(batches["image"][k, 0, : min(size, 4)]) for k, size in enumerate(SIZES)]
    np.testing.assert_allclose(m, [np.mean([x.mean() for x in first])], rtol=1e-12)

    moved = lambda key, x, valid: x - x.mean((1, 2), keepdims=True) + m  # noqa: E731
    plain = fedsam(
        fed.MapNet(), fed.SGD, prepare=fed.as_maps, perturb=moved, weigh=lambda s, r: jnp.ones(3)
    )
    start = plain.init(KEY, {name: state.shared[name] for name in ("params", "batch_stats")}, 3)
    expected, _ = plain.round(start._replace(round=jnp.copy(state.round)), batches, KEY)
    state, _ = method.round(state, batches, KEY)
    np.testing.assert_allclose(state.shared["amplitude"]["mean"], m, rtol=1e-14)
    ours = {name: state.shared[name] for name in expected.shared}
    fed.assert_close(ours, expected.shared, rtol=1e-9, atol=1e-12)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3, 2, 1)))
    served = fed.global_variables(state)
    logits, _ = jax.jit(adaptation.running(fed.MapNet()).predict)(served, (), x)
    plain = {name: served[name] for name in ("params", "batch_stats")}
    by_hand = jax.jit(fed.MapNet().apply)(plain, moved(None, x, None))
    np.testing.assert_allclose(logits, by_hand, rtol=1e-10)


@pytest.mark.parametrize("rounds", [[(1, 1)], [(0, 1), (0, 1), (1, 0)], [(0, 0), (1, 1)]])
def test_the_shared_mean_is_of_all_clients_that_ever_took_part_whoever_came_first(rounds):
    """Constant images of 10 and 20: 15 when both have been there, whatever the order and sizes."""
    batches = fed.batches_of((8, 4))
    level = jnp.asarray([10.0, 20.0]).reshape(2, *(1,) * (batches["image"].ndim - 1))
    batches["image"] = jnp.broadcast_to(level, batches["image"].shape)
    method = fed.once(
        harmofl, fed.MapNet(), fed.SGD, channels=1, prepare=fed.as_maps, weigh=by_size
    )
    state = fed.begun(method, KEY, fed.variables_of(fed.MapNet()), 2)
    seen = np.zeros(2, bool)
    for present in rounds:
        state, _ = method.round(state, batches | {"participates": jnp.asarray(present, bool)}, KEY)
        seen |= np.asarray(present, bool)
        expected = np.asarray([10.0, 20.0])[seen].mean() if seen.any() else 0
        mean = state.shared["amplitude"]["mean"]
        np.testing.assert_allclose(mean, [expected], rtol=1e-6)


def softmax_gradient(w, x, y):
    """The gradient of the mean cross entropy of softmax regression, and its value."""
    z = x @ w["kernel"] + w["bias"]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    residual = (p - np.eye(fed.CLASSES)[y]) / len(x)
    return {"kernel": x.T @ residual, "bias": residual.sum(0)}, -np.log(p[np.arange(len(x)), y])


def step_by_hand(w, x, y, rho, eta, rate=0.1):
    """The formula, leaf by leaf: T is |w| + eta for the kernel and 1 for the bias."""
    g, loss = softmax_gradient(w, x, y)
    t = {"kernel": np.abs(w["kernel"]) + eta if eta else 1.0, "bias": 1.0}
    norm = np.sqrt(sum(np.square(t[n] * g[n]).sum() for n in w))
    worst = {n: w[n] + rho * t[n] ** 2 * g[n] / norm for n in w}
    return {n: w[n] - rate * softmax_gradient(worst, x, y)[0][n] for n in w}, loss.mean()


@pytest.mark.parametrize(("rho", "eta"), [(0.5, 0.0), (0.7, 0.2)])
def test_a_step_goes_along_the_gradient_at_the_worst_point(x64, rho, eta):
    batches, variables = fed.batches_of((4, 3)), fed.in_float64(fed.variables_of(fed.PlainNet()))
    method = fedsam(fed.PlainNet(), optax.sgd(0.1), rho=rho, eta=eta)
    state, metrics = fed.run_rounds(method, variables, batches)
    expected = {"kernel": np.zeros((fed.FEATURES, fed.CLASSES)), "bias": np.zeros(fed.CLASSES)}
    for k, size in enumerate((4, 3)):
        x, y = (np.asarray(batches[name][k, 0, :size]) for name in ("image", "label"))
        ours, loss = step_by_hand(variables["params"]["dense"], x, y, rho, eta)
        expected = {name: expected[name] + size / 7 * ours[name] for name in ours}
        np.testing.assert_allclose(metrics["loss"][k], loss, rtol=1e-10)
    fed.assert_close(fed.global_variables(state)["params"]["dense"], expected, rtol=1e-10)
