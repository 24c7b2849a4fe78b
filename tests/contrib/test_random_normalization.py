"""HarmoFL and FedRDN: what clients tell of their inputs, and steps towards flat minima."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn import adaptation
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.aggregation import by_size
from fedjax_bn.contrib import fedrdn, fedsam, harmofl
from fedjax_bn.contrib.fedrdn import normalized_by_random_clients
from fedjax_bn.contrib.harmofl import harmonize
from fedjax_bn.engine.privacy import gaussian
from fedjax_bn.federation import broadcast_of, own_of
from fedjax_bn.methods import fedavg
from fedjax_bn.models import hooks
from fedjax_bn.sharing import MEASURED, all_but_batch_norm
from fedjax_bn.state import Received

KEY, SIZES = jax.random.key(1), (9, 4, 6)
OPTIONS = {"prepare": fed.as_maps, "channels": 1}


def small_method():
    return fed.once(fedrdn, fed.MapNet(), fed.SGD, **OPTIONS)


def start():
    return fed.in_float64(fed.variables_of(fed.MapNet()))


def statistics(images):
    """Mean and deviation by the formula, of images [N, ...] of one channel."""
    flat = np.asarray(images).reshape(len(images), -1)
    return flat.mean(), flat.std(1).mean()


def own_of_all(batches):
    """The statistics of each client, [K, 2]."""
    return np.array(
        [
            statistics(np.asarray(x)[v])
            for x, v in zip(batches["image"], batches["valid"], strict=True)
        ]
    )


def test_in_the_first_round_each_client_trains_on_its_own_statistics(x64):
    batches, variables = fed.batches_of(SIZES), start()
    state = fed.begun(small_method(), KEY, variables, 3)
    m, s = own_of_all(batches)[1]
    plain = fedavg(fed.MapNet(), fed.SGD, prepare=lambda x, dtype: (fed.as_maps(x, dtype) - m) / s)
    given = {name: leaf[1] for name, leaf in batches.items()} | {
        "client": jnp.asarray(1, jnp.int32)
    }
    ours, theirs = (
        one.client(broadcast_of(before), own_of(before, 0), given, KEY)[1]
        for one, before in ((small_method(), state), (plain, fed.begun(plain, KEY, variables, 3)))
    )
    model = {name: ours.shared[name] for name in theirs.shared}
    fed.assert_close(model, theirs.shared, rtol=1e-9, atol=1e-12)


def test_the_bank_has_who_took_part_and_images_are_measured_once(x64):
    batches = fed.batches_of(SIZES)
    expected = own_of_all(batches)
    state, seen = fed.begun(small_method(), KEY, start(), 3), np.zeros(3)
    for present in ((True, False, True), (True, True, True)):
        state, _ = small_method().round(
            state, batches | {"participates": jnp.asarray(present)}, KEY
        )
        seen = np.maximum(seen, present)
        bank = jax.tree.map(np.asarray, state.server.sent)
        np.testing.assert_array_equal(bank["count"], seen)
        np.testing.assert_allclose(bank["mean"][:, 0], seen * expected[:, 0], rtol=1e-11)
        np.testing.assert_allclose(bank["std"][:, 0], seen * expected[:, 1], rtol=1e-11)
        own = state.personal[MEASURED]
        np.testing.assert_array_equal(own["count"], seen * SIZES)
        np.testing.assert_allclose(own["mean"], bank["mean"], rtol=1e-12)
    other = batches | {"image": 2 * batches["image"]}
    before = jax.tree.map(np.array, state.personal[MEASURED])
    state, _ = small_method().round(state, other | {"participates": jnp.ones(3, bool)}, KEY)
    fed.assert_equal(jax.tree.map(np.asarray, state.personal[MEASURED]), before)


def test_each_image_is_normalized_by_a_client_that_is_known_or_by_its_own(x64):
    random = np.random.default_rng(0)
    images = random.normal(size=(400, 2, 2, 3))
    bank = {
        "mean": random.normal(size=(4, 3)),
        "std": random.uniform(1, 2, (4, 3)),
        "count": np.array([1.0, 0.0, 0.0, 1.0]),
    }
    own = {"mean": np.array([7.0, 8.0, 9.0]), "std": np.array([0.5, 0.25, 2.0])}
    received = Received({}, {}, server=jax.tree.map(jnp.asarray, bank), client=jnp.asarray(2))
    found = normalized_by_random_clients(
        KEY, jnp.asarray(images), jax.tree.map(jnp.asarray, own), received
    )
    table = {2: own} | {k: {name: bank[name][k] for name in own} for k in (0, 3)}
    candidates = {k: (images - t["mean"]) / t["std"] for k, t in table.items()}
    close = {k: np.isclose(found, x, rtol=1e-12).all((1, 2, 3)) for k, x in candidates.items()}
    assert (sum(one.astype(int) for one in close.values()) == 1).all()
    counts = [one.sum() for one in close.values()]
    assert min(counts) > 90  # of 133


def test_a_channel_that_is_constant_at_a_client_is_divided_by_1(x64):
    """Images of others have other values there, which a deviation near 0 would make huge."""
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 2))
    own = {"mean": jnp.asarray([0.0, 0.3]), "std": jnp.asarray([2.0, 1e-9]), "count": jnp.ones(())}
    found = hooks.apply_hooks({MEASURED: own}, jnp.asarray(images), None)[1].images
    np.testing.assert_allclose(found, (images - [0, 0.3]) / [2, 1], rtol=1e-12)


def by_hand(variables, x):
    """Logits of normalized images."""
    model = {name: variables[name] for name in ("params", "batch_stats")}
    return jax.jit(fed.MapNet().apply)(model, x)


def test_clients_predict_by_their_own_statistics_and_the_unseen_by_their_streams(x64):
    state, _ = fed.run_rounds(small_method(), start(), fed.batches_of(SIZES))
    x = np.random.default_rng(2).normal(4, 3, (7, 3, 2, 1))
    m, s = own_of_all(fed.batches_of(SIZES))[1]
    client = fed.client_variables(state, 1)
    chosen = choose_adaptation("running", fed.MapNet(), 4).adaptation
    for adapt in (adaptation.running(fed.MapNet()), chosen):
        logits, _ = jax.jit(adapt.predict)(client, adapt.init(client), jnp.asarray(x))
        np.testing.assert_allclose(logits, by_hand(client, (x - m) / s), rtol=1e-10)

    served = fed.global_variables(state)
    assert not any(leaf.any() for leaf in jax.tree.leaves(served[MEASURED]))
    carry, padded = chosen.init(served), np.concatenate([x, np.full((1, 3, 2, 1), 99.0)])
    step = jax.jit(chosen.predict)
    for first in (0, 4):
        batch = padded[first : first + 4]
        valid = np.arange(first, first + 4) < 7
        logits, carry = step(served, carry, jnp.asarray(batch), jnp.asarray(valid))
        m, s = statistics(x[: first + 4])
        expected = by_hand(served, (batch - m) / s)
        np.testing.assert_allclose(logits[valid], expected[valid], rtol=1e-10)

    running = jax.jit(adaptation.running(fed.MapNet()).predict)
    alone, _ = running(served, (), jnp.asarray(x))
    each = (x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(alone, by_hand(served, each), rtol=1e-10)


def test_what_a_client_reveals_is_said_and_privacy_and_other_channels_are_refused():
    (note,) = small_method().notes
    assert "the server and all others the mean and deviation" in note
    wrong = fedrdn(fed.MapNet(), fed.SGD, prepare=fed.as_maps)
    safe = fedrdn(
        fed.MapNet(), fed.SGD, privacy=gaussian(1.0, 1.0), share=all_but_batch_norm, **OPTIONS
    )
    said = {r"W,3\].*fedrdn:channels": wrong, "3 arrays": safe}
    variables, batches = fed.variables_of(fed.MapNet()), fed.batches_of(SIZES)
    for match, method in said.items():
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(lambda method=method: fed.run_rounds(method, variables, batches)[0])


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
