"""Who takes part in a round, and how much and by what the clients train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.sampling import by_epochs, by_steps
from fedjax_bn.engine.keys import step_keys
from fedjax_bn.run.experiment.build import build, choose_participation, prepare
from fedjax_bn.run.experiment.method import OPTIMIZERS
from fedjax_bn.training.availability import draw_cohort, read_trace
from fedjax_bn.training.loop import train
from fedjax_bn.training.records import samples_a_round, summarize
from fedjax_bn.training.rounds import open_rounds, recorded_round

KEY = jax.random.key(4)
SIZES = np.array([10, 20, 30, 40, 1, 60])
SHARES = SIZES / SIZES.sum()


def cohorts(rounds: int, trace=None, **changes) -> tuple[np.ndarray, np.ndarray]:
    """Clients and who of them takes part, [rounds, C], of many rounds at once."""
    who = choose_participation(runs.config(**changes), len(SIZES))._replace(trace=trace)

    def of(number):
        client, present = draw_cohort(who, SIZES, KEY, number)
        return client, True if present is None else present

    return jax.device_get(jax.jit(jax.vmap(of))(np.arange(rounds)))


def chance_by_size(k: int) -> float:
    """Client k is the first, or the second after another first."""
    rest = [j for j in range(6) if j != k]
    return SHARES[k] + sum(SHARES[j] * SHARES[k] / (1 - SHARES[j]) for j in rest)


@pytest.mark.parametrize(
    ("draw", "chances"), [("uniform", [1 / 3] * 6), ("by_size", [*map(chance_by_size, range(6))])]
)
def test_two_clients_are_drawn_by_their_chances_and_none_twice(draw, chances):
    client, _ = cohorts(4000, clients_per_round=2, participation=draw)
    assert (client[:, 0] < client[:, 1]).all()
    share = np.bincount(client.ravel(), minlength=6) / 4000
    np.testing.assert_allclose(share, chances, atol=4 * 0.5 / np.sqrt(4000))


def test_dropouts_come_at_their_rate_and_independently_of_the_draw():
    plain, _ = cohorts(2000, clients_per_round=3)
    client, present = cohorts(2000, clients_per_round=3, participation="uniform:dropout=0.3")
    np.testing.assert_array_equal(plain, client)
    assert abs(present.mean() - 0.7) < 4 * np.sqrt(0.21 / 6000)


def test_a_trace_says_who_takes_part_and_begins_again(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("# rounds\n0-2, 5\nall # everybody\n\n4\n")
    trace = read_trace(str(path), 6)
    client, present = cohorts(6, trace, clients_per_round=2)
    available = [{0, 1, 2, 5}, set(range(6)), {4}] * 2
    for drawn, takes_part, expected in zip(client, present, available, strict=True):
        assert set(drawn[takes_part]) <= expected
        assert len(drawn[takes_part]) == min(2, len(expected))
    _, everybody = cohorts(3, trace)
    assert everybody.tolist() == [[k in clients for k in range(6)] for clients in available[:3]]


@pytest.mark.parametrize(
    ("content", "fault"), [("0,1\n6\n", "line 2.*'6'"), ("4-2", "line 1.*'4-2'"), ("#", "a line")]
)
def test_a_wrong_trace_names_the_file_and_the_fault(tmp_path, monkeypatch, content, fault):
    runs.install(monkeypatch)
    path = tmp_path / "trace:1.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path}.*{fault}"):
        build(runs.config(participation=f"by_size:trace={path}:dropout=0.1"))


def test_who_is_absent_neither_trains_nor_counts(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    (tmp_path / "trace").write_text("0,2\n1\n")
    trace = f"uniform:trace={tmp_path / 'trace'}"
    config = runs.config(target="", rounds=2, participation=trace)
    experiment, keys, start = prepare(config, traced=False)
    state, records = start(), []
    round = recorded_round(open_rounds(experiment, keys, state).compile(state), experiment)
    train(round, state, rounds=2, records=records)
    trained = [[name for name, loss in r["loss"].items() if loss is not None] for r in records]
    assert trained == [["ant", "cow"], ["bee"]]
    assert records[1]["weights"] == {"ant": 0.0, "bee": 1.0, "cow": 0.0, "dog": 0.0}

    dropping = {"clients_per_round": 1, "participation": f"{trace}:dropout=0.2"}
    for changes, present in (({"participation": trace}, (2 + 1) / 2), (dropping, 0.8)):
        samples = samples_a_round(build(runs.config(**changes)))
        assert samples == pytest.approx(present * (22 + 18 + 11) / 3)


LOCAL_KEY = jax.random.key(0)
LOCAL_SIZES, CLIENTS = jnp.asarray([5, 3, 4], jnp.int32), jnp.arange(3, dtype=jnp.int32)


def test_each_client_makes_its_own_number_of_epochs():
    draw = jax.jit(by_epochs(2, (1, 3, 2)), static_argnums=2)(LOCAL_SIZES, CLIENTS, 5, LOCAL_KEY)
    assert draw.index.shape == draw.valid.shape == (3, 9, 2)
    for k, (size, epochs) in enumerate(((5, 1), (3, 3), (4, 2))):
        for epoch in range(3):
            steps = slice(3 * epoch, 3 * epoch + 3)
            seen = np.sort(draw.index[k, steps][draw.valid[k, steps]])
            expected = np.arange(size) if epoch < epochs else []
            np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_client_draws_depends_on_no_other_clients_size(x64):
    """A client alone, or beside one of any size, draws its samples in the same order."""

    def drawn(sampler, rows, longest):
        draw = jax.jit(sampler, static_argnums=2)(
            LOCAL_SIZES[rows], CLIENTS[rows], longest, LOCAL_KEY
        )
        return np.asarray(draw.index)[np.asarray(draw.valid)]

    k, size, everybody = slice(1, 2), 3, slice(None)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        alone = drawn(by_epochs(2, (3,)), k, size)
        np.testing.assert_array_equal(drawn(by_epochs(2, (3,)), everybody, 5)[15:24], alone)
        np.testing.assert_array_equal(drawn(by_epochs(2, (1,)), everybody, 5)[5:8], alone[:3])
        steps = drawn(by_steps(2, 7, 3), everybody, 5)[14:28]
        np.testing.assert_array_equal(steps, drawn(by_steps(2, 7, size), k, size))


def test_steps_take_the_same_keys_with_and_without_empty_ones_between_them():
    valid = jnp.asarray([[1, 1], [1, 0], [0, 0], [1, 1], [0, 0]], bool)
    keys = jax.random.key_data(jax.jit(step_keys)(LOCAL_KEY, valid))[np.array([0, 1, 3])]
    np.testing.assert_array_equal(keys, jax.random.key_data(jax.random.split(LOCAL_KEY, 3)))


def test_a_run_takes_the_epochs_of_each_client(monkeypatch):
    runs.install(monkeypatch)
    config = runs.config(client_epochs=("1", "3", "2"))
    experiment = build(config)
    draw = jax.jit(experiment.work.sampler(11, 22), static_argnums=2)
    draw = draw(jnp.asarray([22, 18, 11]), CLIENTS, 22, LOCAL_KEY)
    np.testing.assert_array_equal(draw.valid.sum((1, 2)), [22, 54, 22])
    record = {"round": 1, "seconds": 2.0, "accuracy": {"mean": 1.0}}
    assert summarize(experiment, [record], 1.0)["samples_per_second"] == 98 / 2


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_pytorchs(nesterov):
    """v = 0.9 v + g, and a step of -lr v, by Nesterov of -lr (g + 0.9 v): `torch.optim.SGD`."""
    config = runs.config(**{"optimizer.momentum": 0.9, "optimizer.nesterov": nesterov}).optimizer
    optimizer = OPTIMIZERS["sgd"](config, config.learning_rate)
    expected, velocity = np.array([1.0, -2.0]), np.zeros(2)
    values = jnp.asarray([1.0, -2.0])
    state = optimizer.init(values)
    for _ in range(4):
        updates, state = optimizer.update(jnp.cos(values), state, values)
        values = optax.apply_updates(values, updates)
        gradient = np.cos(expected)
        velocity = 0.9 * velocity + gradient
        expected = expected - 0.01 * (gradient + 0.9 * velocity if nesterov else velocity)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
