"""What the server makes of a round: the weights of clients, and the state that it selects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import runs
from federations import OneNorm, assert_equal, batches_of, variables_of
from fedjax_bn import client as local
from fedjax_bn.aggregation import by_size, risk_extrapolation, uniform, weighted_mean
from fedjax_bn.arguments.errors import ConfigError, RiskError
from fedjax_bn.data.domain import Split
from fedjax_bn.data.sampling import validation_batches
from fedjax_bn.engine.risk_extrapolation import check_risks
from fedjax_bn.engine.weighing import normalized, relative_weights
from fedjax_bn.local_step import LocalStep
from fedjax_bn.methods import fedavg, scaffold
from fedjax_bn.methods.selection import best_of_round
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.state import Received
from fedjax_bn.training.rounds import Rounds


def by_hand(sizes, risks, eta):
    inverse = 1 / np.asarray(risks, np.float64)
    powers = np.exp(eta * inverse / inverse.sum() + np.asarray(sizes) / np.sum(sizes))
    return powers / powers.sum()


@pytest.mark.slow
def test_both_solvers_give_the_same_weights_over_six_decades_of_risks_under_jit(x64):
    random = np.random.default_rng(3)
    far_apart = np.where(np.arange(100) % 2, 1e-4, 1e2)
    drawn = [10 ** random.uniform(-4, 2, count) for count in (2, 9, 100)]
    for eta, scale in ((0.0, 1e-6), (0.8, 1.0), (3.0, 1e6)):
        for risks in (*drawn, far_apart):
            sizes, risks = random.integers(1, 500, len(risks)), scale * risks
            ours, least_variance = (
                jax.jit(risk_extrapolation(eta, solver))(jnp.asarray(sizes), jnp.asarray(risks))
                for solver in ("closed_form", "slsqp")
            )
            assert ours.dtype == jnp.float64
            np.testing.assert_allclose(ours, by_hand(sizes, risks, eta), rtol=1e-12)
            np.testing.assert_allclose(least_variance, ours, rtol=6e-6)


@pytest.mark.parametrize("solver", ["closed_form", "slsqp"])
def test_clients_without_samples_are_as_if_they_were_not_there(solver):
    rule = jax.jit(risk_extrapolation(0.5, solver))
    weights = rule(jnp.asarray([3, 0, 5, 0]), jnp.asarray([0.2, 0.0, 0.9, jnp.nan]))
    np.testing.assert_allclose(weights[jnp.array([0, 2])], by_hand([3, 5], [0.2, 0.9], 0.5), 1e-5)
    assert weights[1] == weights[3] == 0
    np.testing.assert_array_equal(rule(jnp.zeros(4, int), jnp.zeros(4)), np.zeros(4))


@pytest.mark.parametrize("risk", [0.0, np.nan, np.inf, -0.25, 1e-38])
@pytest.mark.parametrize("solver", ["closed_form", "slsqp"])
def test_a_risk_that_is_not_positive_and_finite_makes_its_clients_weight_nan(solver, risk):
    sizes, risks = jnp.asarray([4, 4, 4]), jnp.asarray([0.3, 0.5, risk], jnp.float32)
    weights = jax.jit(risk_extrapolation(0.5, solver))(sizes, risks)
    np.testing.assert_array_equal(np.isnan(weights), [False, False, True])
    with pytest.raises(ValueError, match="cat"):
        check_risks(np.asarray(sizes), np.asarray(risks), ["ant", "bee", "cat"])


def test_a_round_with_a_wrong_risk_changes_nothing_and_says_so():
    """A loss of exactly 0: one logit is so far ahead that float32 has no smaller loss."""
    start = variables_of(OneNorm())
    start["params"]["c"]["bias"] = jnp.asarray([1e6, 0.0, 0.0])
    batches = batches_of((8, 8)) | {"label": jnp.zeros((2, 2, 4), jnp.int32)}
    method = fedavg(OneNorm(), optax.sgd(0.1), weigh=risk_extrapolation())
    before = method.init(jax.random.key(0), start, 2)
    shared = jax.tree.map(jnp.copy, before.shared)
    after, metrics = method.round(before, batches, jax.random.key(0))
    assert np.isnan(metrics["weights"]).all()
    assert_equal(after.shared, shared)
    np.testing.assert_allclose(after.weights, [0.5, 0.5])


def test_a_run_with_a_wrong_risk_stops_and_names_the_client(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    monkeypatch.setattr("fedjax_bn.run.train.open_rounds", lambda *_: silent())
    with pytest.raises(RiskError, match="bee"):
        runs.run(tmp_path, weigh="risk_extrapolation")


def silent():
    """Rounds whose second client has no loss."""
    risk, weights = np.array([0.5, 0.0, 0.4]), np.full(3, np.nan)
    metrics = {"loss": risk, "risk": risk, "weights": weights, "finite": np.ones(3, bool)}
    metrics["server_finite"] = np.bool_(True)
    return Rounds("", lambda state: lambda state: (state, metrics))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8"])
def test_a_leaf_keeps_its_dtype(dtype):
    leaf = jnp.asarray([[1, 2], [4, 4]], dtype)
    mean = weighted_mean(leaf, jnp.asarray([1.0, 2.0]))
    assert mean.dtype == leaf.dtype
    np.testing.assert_allclose(
        np.asarray(mean, np.float64), [3, 10 / 3 // 1 if "int" in dtype else 10 / 3], rtol=1e-2
    )


def test_float64_leaves_are_averaged_in_float64(x64):
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
    for weights in (jnp.asarray([40, 21, 56]), by_size(jnp.asarray([40, 21, 56]), jnp.zeros(3))):
        mean = weighted_mean(leaf, weights)
        np.testing.assert_allclose(mean, np.average(leaf, 0, [40, 21, 56]), rtol=1e-13)


def test_a_client_of_weight_zero_is_left_out_even_if_it_is_nan():
    leaf = jnp.asarray([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 4.0]])
    np.testing.assert_array_equal(weighted_mean(leaf, jnp.asarray([1.0, 0.0, 1.0])), [2, 3])
    assert not np.isfinite(weighted_mean(leaf, jnp.ones(3))).any()


@pytest.mark.parametrize(
    ("rule", "sizes", "expected"),
    [
        (by_size, [40, 21, 56], [40 / 117, 21 / 117, 56 / 117]),
        (by_size, [0, 1, 3], [0, 0.25, 0.75]),
        (uniform, [40, 21, 56], [1 / 3, 1 / 3, 1 / 3]),
        (uniform, [0, 1, 3], [0, 0.5, 0.5]),
        (by_size, [0, 0], [0, 0]),
    ],
)
def test_weighing_rules_sum_to_one_over_those_who_count(rule, sizes, expected):
    sizes = jnp.asarray(sizes, jnp.int32)
    weights = rule(sizes, jnp.ones(len(sizes)))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == jnp.result_type(float)
    # Rounds over several devices weigh by these, and divide last.
    np.testing.assert_array_equal(normalized(relative_weights(rule, sizes)), weights)


def update(variables, state, batch, received, key):
    del received, key
    value = variables["params"] + batch["image"].sum()
    return {"params": value}, state + 1, value


COUNTING = LocalStep(init=lambda variables: jnp.zeros((), jnp.int32), update=update)
START = {"params": jnp.zeros(())}


def batches(steps):
    label, valid = jnp.zeros((steps, 1), jnp.int32), jnp.ones((steps, 1), bool)
    return {"image": jnp.ones((steps, 1)), "label": label, "valid": valid}


def near(variables, received):
    """The score of a client whose memory is the wanted sum."""
    return -jnp.abs(variables["params"] - received.memory)


@functools.cache
def selecting(every):
    """Local training of ten steps towards a sum, as one program."""
    select, key = best_of_round(near, every), jax.random.key(0)
    begin = START, jnp.int32(0), batches(10), key
    return jax.jit(lambda target: select(COUNTING, Received({}, {}, target), *begin))


@pytest.mark.parametrize(
    ("target", "every", "best"),
    [
        (7, 2, 6),  # between 6 and 8: the first of equals
        (100, 2, 10),
        (0, 2, 2),  # what was received is not a candidate
        (10, 4, 10),  # the last steps are fewer than a chunk
        (3, 50, 10),
    ],
)
def test_the_state_with_the_best_score_is_kept(target, every, best):
    trained = selecting(every)(float(target))
    np.testing.assert_array_equal(trained.variables["params"], best)
    np.testing.assert_array_equal(trained.losses, np.arange(1, 11))
    np.testing.assert_array_equal(trained.counts, 1)
    np.testing.assert_array_equal(trained.state, 10)


def test_empty_steps_between_the_others_change_nothing():
    """A client of several epochs beside larger ones has them, and alone over Flower it has none."""

    def noisy(variables, state, batch, received, key):
        value = variables["params"] + batch["image"].sum() * jax.random.uniform(key)
        return {"params": value}, state + 1, value

    step, state = LocalStep(COUNTING.init, noisy), jnp.zeros((), jnp.int32)
    valid = np.array([1, 0, 1, 1, 0, 1, 1, 1], bool)
    data = batches(8) | {"valid": jnp.asarray(valid)[:, None]}
    key, received = jax.random.key(0), Received({}, {}, 1.0)
    select = jax.jit(lambda data: best_of_round(near, 2)(step, received, START, state, data, key))
    among, alone = select(data), select(batches(6))
    np.testing.assert_array_equal(among.losses, np.where(valid, among.losses, 0))
    np.testing.assert_array_equal(among.losses[valid], alone.losses)
    np.testing.assert_array_equal(among.counts, valid)
    assert 0 < alone.steps < 6
    for name in ("variables", "state", "steps"):
        jax.tree.map(np.testing.assert_array_equal, *(getattr(one, name) for one in (among, alone)))
    plain = jax.jit(lambda data: local.run_steps(step, received, START, state, data, key))
    np.testing.assert_array_equal(plain(data).steps, 6)


def splits_of(sizes):
    random = np.random.default_rng(0)
    return [
        Split(
            random.normal(size=(n, federations.FEATURES)).astype(np.float32),
            random.integers(0, federations.CLASSES, n).astype(np.int32),
        )
        for n in sizes
    ]


def test_scaffold_divides_by_the_steps_behind_what_is_uploaded():
    """With the state after one step chosen, x - c lr is what the server averages, whatever S is."""
    model, sizes = federations.OneNorm(), [20, 12, 16]
    train = best_of_round(lambda variables, received: jnp.zeros(()), 1)
    method = scaffold(model, optax.sgd(0.5), clients="map", train=train, weigh=uniform)
    validation = {"validation": validation_batches(splits_of([7, 3, 5]), batch_size=4)}
    batches, start = federations.batches_of(sizes) | validation, federations.variables_of(model)
    state, _ = federations.run_rounds(method, start, batches)
    moved = jax.tree.map(
        lambda x, y: (np.asarray(x) - y) / np.float32(0.5), start["params"], state.shared["params"]
    )
    federations.assert_close(state.server.sent, moved, 1e-3, 1e-5)


def test_selection_needs_validation_samples(monkeypatch):
    data = runs.dataset(validation=False)
    monkeypatch.setitem(experiment.DATASETS, "tiny", lambda config: data)
    with pytest.raises(ConfigError, match="local_selection=3"):
        prepare(runs.config(local_selection=3))
