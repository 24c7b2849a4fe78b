"""FedRDN: statistics of images by NumPy, draws, and by what each client predicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations as fed
from fedjax_bn import adaptation
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.contrib import fedrdn
from fedjax_bn.contrib.fedrdn import normalized_by_random_clients
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
