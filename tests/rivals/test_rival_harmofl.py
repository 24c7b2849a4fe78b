"""HarmoFL: what harmonizing is to a spectrum, whose means stay, and what is left without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import (
    SGD,
    MapNet,
    as_maps,
    assert_close,
    batches_of,
    begun,
    global_variables,
    in_float64,
    once,
    variables_of,
)
from fedjax_bn import adaptation
from fedjax_bn.aggregation import by_size
from fedjax_bn.methods import fedsam, harmofl
from fedjax_bn.rivals.harmofl import _harmonize

KEY, SIZES = jax.random.key(1), (9, 4, 6)


def test_of_the_spectrum_the_amplitude_of_the_mean_alone_is_exchanged(x64):
    """Of images above 0, as the authors' code does with a window of half side 0."""
    x = np.random.default_rng(0).uniform(0.1, 1, (4, 6, 5, 3))
    m = np.array([0.3, 0.5, 0.9])
    spectrum = np.fft.fft2(x, axes=(1, 2))
    amplitude = np.abs(spectrum)
    amplitude[:, 0, 0] = 30 * m
    expected = np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum)), axes=(1, 2))
    ours = _harmonize(jnp.asarray(x), jnp.asarray(m))
    np.testing.assert_allclose(ours, expected.real, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.mean((1, 2)), np.tile(m, (4, 1)), rtol=1e-12)
    with pytest.raises(ValueError, match=r"harmofl\.channels"):
        _harmonize(jnp.asarray(x), jnp.zeros(1))


def test_the_means_are_those_of_first_batches_and_then_all_train_on_them(x64):
    """The second round by hand: FedSAM whose perturbation is the harmonizing."""
    variables = in_float64(variables_of(MapNet()))
    batches = batches_of(SIZES)
    method = harmofl(MapNet(), SGD, channels=1, prepare=as_maps)
    state, _ = method.round(begun(method, KEY, variables, 3), batches, KEY)
    m = np.asarray(state.shared["amplitude"]["mean"])
    first = [np.asarray(batches["image"][k, 0, : min(size, 4)]) for k, size in enumerate(SIZES)]
    np.testing.assert_allclose(m, [np.mean([x.mean() for x in first])], rtol=1e-12)

    moved = lambda key, x, valid: x - x.mean((1, 2), keepdims=True) + m  # noqa: E731
    plain = fedsam(MapNet(), SGD, prepare=as_maps, perturb=moved, weigh=lambda s, r: jnp.ones(3))
    start = plain.init(KEY, {name: state.shared[name] for name in ("params", "batch_stats")}, 3)
    expected, _ = plain.round(start._replace(round=jnp.copy(state.round)), batches, KEY)
    state, _ = method.round(state, batches, KEY)
    np.testing.assert_allclose(state.shared["amplitude"]["mean"], m, rtol=1e-14)
    ours = {name: state.shared[name] for name in expected.shared}
    assert_close(ours, expected.shared, rtol=1e-9, atol=1e-12)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3, 2, 1)))
    served = global_variables(state)
    logits, _ = jax.jit(adaptation.running(MapNet()).predict)(served, (), x)
    plain = {name: served[name] for name in ("params", "batch_stats")}
    by_hand = jax.jit(MapNet().apply)(plain, moved(None, x, None))
    np.testing.assert_allclose(logits, by_hand, rtol=1e-10)


@pytest.mark.parametrize("rounds", [[(1, 1)], [(0, 1), (0, 1), (1, 0)], [(0, 0), (1, 1)]])
def test_the_shared_mean_is_of_all_clients_that_ever_took_part_whoever_came_first(rounds):
    """Constant images of 10 and 20: 15 when both have been there, whatever the order and sizes."""
    batches = batches_of((8, 4))
    level = jnp.asarray([10.0, 20.0]).reshape(2, *(1,) * (batches["image"].ndim - 1))
    batches["image"] = jnp.broadcast_to(level, batches["image"].shape)
    method = once(harmofl, MapNet(), SGD, channels=1, prepare=as_maps, weigh=by_size)
    state = begun(method, KEY, variables_of(MapNet()), 2)
    seen = np.zeros(2, bool)
    for present in rounds:
        state, _ = method.round(state, batches | {"participates": jnp.asarray(present, bool)}, KEY)
        seen |= np.asarray(present, bool)
        expected = np.asarray([10.0, 20.0])[seen].mean() if seen.any() else 0
        mean = state.shared["amplitude"]["mean"]
        np.testing.assert_allclose(mean, [expected], rtol=1e-6)
