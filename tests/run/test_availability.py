"""Who takes part in a round: chances by size, a trace of who is available, and dropouts."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.run.experiment.build import build, choose_participation
from fedjax_bn.training.availability import draw_cohort, read_trace
from fedjax_bn.training.records import samples_a_round

KEY = jax.random.key(4)
SIZES = np.array([10, 20, 30, 40, 0 + 1, 60])


def cohorts(rounds: int, trace=None, **changes) -> tuple[np.ndarray, np.ndarray]:
    """Clients and who of them takes part, [rounds, C], of many rounds at once."""
    how = choose_participation(runs.config(**changes), len(SIZES))._replace(trace=trace)

    def of(number):
        client, present = draw_cohort(how, SIZES, KEY, number)
        return client, True if present is None else present

    return jax.device_get(jax.jit(jax.vmap(of))(np.arange(rounds)))


def test_all_clients_alike_are_drawn_once_each_and_as_often_as_others():
    client, _ = cohorts(3000, clients_per_round=2)
    assert (client[:, 0] < client[:, 1]).all()
    share = np.bincount(client.ravel(), minlength=6) / 3000
    np.testing.assert_allclose(share, 1 / 3, atol=4 * np.sqrt(2 / 9 / 3000))


def test_by_size_the_chance_of_a_client_is_its_share_of_the_samples_not_yet_drawn():
    client, _ = cohorts(4000, clients_per_round=2, participation__draw="by_size")
    p = SIZES / SIZES.sum()
    # The first is k, or the second is after another first.
    expected = [p[k] + sum(p[j] * p[k] / (1 - p[j]) for j in range(6) if j != k) for k in range(6)]
    share = np.bincount(client.ravel(), minlength=6) / 4000
    np.testing.assert_allclose(share, expected, atol=4 * 0.5 / np.sqrt(4000))


def test_dropouts_come_at_their_rate_and_independently_of_the_draw():
    plain, _ = cohorts(2000, clients_per_round=3)
    client, present = cohorts(2000, clients_per_round=3, participation__dropout=0.3)
    np.testing.assert_array_equal(plain, client)
    assert abs(present.mean() - 0.7) < 4 * np.sqrt(0.21 / 6000)


def test_a_trace_says_who_takes_part_and_begins_again(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("# rounds\n0-2, 5\nall # everybody\n\n4\n")
    trace = read_trace(str(path), 6)
    client, present = cohorts(6, trace, clients_per_round=2)
    available = [{0, 1, 2, 5}, set(range(6)), {4}] * 2
    for drawn, mine, there in zip(client, present, available, strict=True):
        assert set(drawn[mine]) <= there
        assert len(drawn[mine]) == min(2, len(there))
    _, everybody = cohorts(3, trace)
    assert everybody.tolist() == [[k in there for k in range(6)] for there in available[:3]]


@pytest.mark.parametrize(
    ("content", "words"),
    [("0,1\n6\n", "line 2 has '6'"), ("4-2", "line 1 has '4-2'"), ("# nobody", "a line")],
)
def test_a_wrong_trace_is_refused_naming_the_file_and_the_fault(tmp_path, content, words):
    path = tmp_path / "trace.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        read_trace(str(path), 6)
    assert str(path) in str(error.value)


def test_who_is_absent_neither_trains_nor_counts(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    (tmp_path / "trace").write_text("0,2\n1\n")
    changes = {"participation__trace": str(tmp_path / "trace"), "target": "", "rounds": 2}
    runs.run(tmp_path / "run", **changes)
    first, second = runs.lines(tmp_path / "run")
    assert [name for name, loss in first["loss"].items() if loss is not None] == ["ant", "cow"]
    assert [name for name, loss in second["loss"].items() if loss is not None] == ["bee"]
    assert second["weights"] == {"ant": 0.0, "bee": 1.0, "cow": 0.0, "dog": 0.0}


@pytest.mark.parametrize(
    ("changes", "present"),
    [
        ({}, (2 + 1) / 2),
        ({"clients_per_round": 1}, 1),
        ({"clients_per_round": 1, "participation__dropout": 0.2}, 0.8),
    ],
)
def test_samples_a_second_are_of_those_who_take_part(tmp_path, monkeypatch, changes, present):
    runs.install(monkeypatch)
    (tmp_path / "trace").write_text("0,2\n1\n")
    config = runs.config(participation__trace=str(tmp_path / "trace"), **changes)
    assert samples_a_round(build(config)) == pytest.approx(present * (22 + 18 + 11) / 3)
