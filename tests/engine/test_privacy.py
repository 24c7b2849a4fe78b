"""Clipping, noise and what they are worth: epsilon by two independent ways."""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import federations as fed
import runs
from fedjax_bn.aggregation import by_size, uniform
from fedjax_bn.contrib import harmofl
from fedjax_bn.engine.privacy import clipped, epsilon, gaussian, with_noise
from fedjax_bn.methods import fedadam, fedavg, fedbn, fedcd, scaffold
from fedjax_bn.run import serve, train
from fedjax_bn.sharing import all_but_batch_norm

MODEL, SGD = fed.OneNorm(), optax.sgd(0.1)
SIZES = (6, 9, 4)
KEY = fed.KEY
CLIP, NOISE = 0.05, 0.8


def norm_of(tree):
    return math.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))


def differences(one, other):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, one, other)


def test_an_update_is_shortened_to_the_norm_of_all_its_leaves(x64):
    random = np.random.default_rng(0)
    start, leaves = (
        {"a": jnp.asarray(random.normal(size=(3, 4))), "b": jnp.asarray(random.normal(size=5))}
        for _ in range(2)
    )
    change = np.concatenate([np.ravel(leaves[name] - start[name]) for name in "ab"])
    wanted = change * 0.7 / np.linalg.norm(change)
    found = clipped(leaves, start, 0.7)
    fed.assert_close(found["a"], np.asarray(start["a"]) + wanted[:12].reshape(3, 4), 1e-14)
    fed.assert_close(found["b"], np.asarray(start["b"]) + wanted[12:], 1e-14)
    fed.assert_equal(clipped(leaves, start, np.linalg.norm(change) + 1e-9), leaves)
    fed.assert_equal(clipped(start, start, 1e-9), start)


def test_noise_is_normal_with_its_deviation_and_independent_between_leaves_and_rounds():
    zeros = {name: jnp.zeros((200, 250)) for name in "ab"}
    one, other = (with_noise(zeros, jax.random.fold_in(KEY, n), 0.3) for n in range(2))
    drawn = np.stack([np.ravel(tree[name]) for tree in (one, other) for name in "ab"]) / 0.3
    assert np.abs(drawn.mean(1)).max() < 5 / math.sqrt(50_000)
    assert np.abs(drawn.var(1) - 1).max() < 5 * math.sqrt(2 / 50_000)
    assert scipy.stats.kstest(drawn[0], "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 5 / math.sqrt(50_000)
    assert with_noise(zeros, KEY, 0.0) is zeros


def test_without_noise_and_clip_the_bits_are_the_methods():
    model, batches = fed.PlainNet(), fed.batches_of(SIZES)
    plain, guarded = (
        fed.run_rounds(fedadam(model, SGD, **options), fed.variables_of(model), batches, 2)[0]
        for options in ({"weigh": uniform}, {"privacy": gaussian(math.inf)})
    )
    kept = guarded.server.kept
    fed.assert_equal(guarded._replace(server=guarded.server._replace(kept=kept.inner)), plain)
    assert int(kept.rounds) == 2


def by_hand(method, variables, batches):
    """The state after a round and the uploads, client by client, as a deployment makes them."""
    state, uploads = fed.one_by_one(method, fed.begun(method, KEY, variables, 3), batches)
    return method.server(state, fed.stacked(uploads)), uploads


def test_a_deployment_repeats_the_simulation_and_the_server_adds_noise(x64):
    """One sits out: the noise is that of the sum, divided by those who count."""
    variables, batches = fed.in_float64(fed.variables_of(MODEL)), fed.batches_of(SIZES)
    batches["participates"] = jnp.array([True, False, True])
    method = fedbn(MODEL, SGD, privacy=gaussian(CLIP, NOISE, seed=7))
    start = fed.begun(method, KEY, variables, 3).shared
    state, _ = fed.run_rounds(method, variables, batches, 1)
    ours, uploads = by_hand(method, variables, batches)
    fed.assert_close(ours, state, 1e-12, 1e-12)
    counting = [uploads[0].shared, uploads[2].shared]
    lengths = [norm_of(differences(shared, start)) for shared in counting]
    np.testing.assert_allclose(lengths, CLIP)
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *counting)
    noisy = with_noise(mean, jax.random.fold_in(jax.random.key(7), 0), CLIP * NOISE / 2)
    fed.assert_close(ours.shared, noisy, 1e-12, 1e-12)
    assert norm_of(differences(ours.shared, mean)) > CLIP / 10


def test_clients_that_add_noise_themselves_add_as_much_each_and_not_the_same(x64):
    variables, batches = fed.in_float64(fed.variables_of(MODEL)), fed.batches_of(SIZES)
    method = fedbn(MODEL, SGD, privacy=gaussian(CLIP, NOISE, at="client", seed=7))
    start = fed.begun(method, KEY, variables, 3).shared
    ours, uploads = by_hand(method, variables, batches)
    changes = [differences(upload.shared, start) for upload in uploads]
    expected = CLIP * NOISE * math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(start)))
    for one, other in itertools.pairwise(changes):
        assert norm_of(one) == pytest.approx(expected, rel=0.5)
        assert norm_of(differences(one, other)) > expected
    mean = jax.tree.map(lambda *rows: sum(rows) / 3, *(upload.shared for upload in uploads))
    fed.assert_close(ours.shared, mean, 1e-12, 1e-12)  # the server adds none


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: fedavg(MODEL, SGD, privacy=p), "all_but_statistics"),
        (lambda p: fedbn(MODEL, SGD, privacy=p, weigh=by_size), "weigh=uniform"),
        (lambda p: fedcd(MODEL, SGD, privacy=p), "weigh=uniform"),
        (lambda p: scaffold(MODEL, SGD, privacy=p, share=all_but_batch_norm), "4 arrays"),
        (lambda p: harmofl(MODEL, SGD, privacy=p, share=all_but_batch_norm), "harmofl"),
    ],
)
def test_what_noise_does_not_cover_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        fed.run_rounds(make(gaussian(1.0, 1.0)), fed.variables_of(MODEL), fed.batches_of(SIZES))


@pytest.mark.parametrize("arguments", [(0.0,), (math.nan,), (1.0, -1.0), (math.inf, 1.0)])
def test_a_mechanism_that_is_none_is_refused(arguments):
    with pytest.raises(ValueError, match="clip="):
        gaussian(*arguments)


def delta_of(eps, deviation):
    """delta of one Gaussian mechanism (Balle & Wang, ICML 2018, Theorem 8)."""
    normal = scipy.stats.norm
    first = normal.logcdf(0.5 / deviation - eps * deviation)
    second = eps + normal.logcdf(-0.5 / deviation - eps * deviation)
    return math.exp(first) - math.exp(second)


KINDS = ("present", "absent", "empty", "failed")


@functools.cache
def noised():
    """FedBN with noise, its start, and the uploads of four clients that all take part."""
    method = fedbn(MODEL, SGD, privacy=gaussian(CLIP, NOISE, seed=7))
    variables, batches = fed.in_float64(fed.variables_of(MODEL)), fed.batches_of((6, 9, 4, 5))
    _, uploads = fed.one_by_one(method, fed.begun(method, KEY, variables, 4), batches)
    return method, variables, batches, uploads


def changed(upload, kind):
    if kind == "absent":
        return upload._replace(participates=np.zeros((), bool))
    if kind == "empty":
        return upload._replace(size=np.zeros((), np.int32))
    if kind == "failed":
        broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), upload.shared)
        return upload._replace(shared=broken, finite=np.zeros((), bool))
    return upload


def ways_of(kinds):
    """The state before a round and after it, by `round`, `server` and `adding`."""
    method, variables, batches, uploads = noised()
    present = np.array([kind != "absent" for kind in kinds])
    image, valid = np.array(batches["image"]), np.array(batches["valid"])
    valid[[kind == "empty" for kind in kinds]] = False
    image[[kind == "failed" for kind in kinds], 0, 0] = np.inf
    given = {"image": jnp.asarray(image), "valid": jnp.asarray(valid)}
    given["participates"] = jnp.asarray(present)
    start = fed.begun(method, KEY, variables, 4)
    sent = [changed(upload, kind) for upload, kind in zip(uploads, kinds, strict=True)]
    running = method.adding.begin(4, sent[0])
    for upload in sent:
        running = method.adding.add(running, upload)
    yield method.adding.end(start, running)[0]
    yield method.server(start, fed.stacked(sent))
    yield method.round(start, batches | given, KEY)[0]


@pytest.mark.parametrize("others", [*itertools.combinations(KINDS, 3), KINDS[:1] * 3], ids="-".join)
def test_the_noise_hides_one_client_of_those_that_have_weight(x64, others):
    """Whoever is absent, empty or failed, the largest weight is hidden by z, and epsilon is so."""
    kinds = ("present", *others)
    pairs = zip(noised()[3], kinds, strict=True)
    chosen = [upload.shared for upload, kind in pairs if kind == "present"]
    mean = jax.tree.map(lambda *rows: sum(rows) / len(rows), *chosen)
    zeros = jax.tree.map(jnp.zeros_like, mean)
    unit = norm_of(with_noise(zeros, jax.random.fold_in(jax.random.key(7), 0), 1.0))
    for state in ways_of(kinds):
        deviation = norm_of(differences(state.shared, mean)) / unit
        np.testing.assert_allclose(deviation, CLIP * NOISE / len(chosen), rtol=1e-9)
        weight = float(state.weights.max())
        multiplier = deviation / (CLIP * weight)
        found = delta_of(epsilon_of(NOISE), multiplier / math.sqrt(40))
        assert found == pytest.approx(1e-5, rel=1e-6)


@functools.cache
def epsilon_of(noise):
    pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    return epsilon(noise, 40, 1e-5)


def test_epsilon_of_a_cohort_is_the_accountants_and_less_for_fewer_of_more():
    dp = pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(1000, 16, dp.GaussianDpEvent(1.0))
    accountant.compose(event, 30)
    assert epsilon(2.0, 30, 1e-5, (16, 1000)) == pytest.approx(accountant.get_epsilon(1e-5))
    values = [epsilon(2.0, 30, 1e-5, (16, many)) for many in (100, 1000)]
    assert values == sorted(values, reverse=True)
    assert epsilon(2.0, 30, 1e-5, (16, 16)) == epsilon(2.0, 30, 1e-5)
    assert epsilon(0.0, 30, 1e-5) == math.inf
    assert epsilon(0.0, 0, 1e-5) == epsilon(2.0, 0, 1e-5) == 0


@pytest.mark.slow
def test_a_run_says_what_it_spends_and_serve_what_that_does_not_cover(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    runs.install(monkeypatch)
    keys = {"method": "fedbn", "privacy": "server:clip=0.5:noise=2.0", "target": ""}
    said, config = [], runs.config(**keys, rounds=1, eval_every=1, checkpoint_every=1)
    summary = train.run(config, tmp_path / "run", say=said.append)
    assert summary["privacy"]["epsilon"] == epsilon(2.0, 1, 1e-5)
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    (note,) = (text for text in content["notes"] if text.startswith("privacy"))
    assert note in said
    said.clear()
    serve.run(tmp_path / "run", tmp_path / "served", say=said.append)
    assert "served without noise" in said[0]
