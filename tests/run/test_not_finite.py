"""Updates and steps that are not finite: a run stops, or it leaves them out."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.run import train


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


@pytest.mark.parametrize("rule", ["stop", pytest.param("drop", marks=pytest.mark.slow)])
def test_a_round_in_which_every_client_fails_is_an_error_that_names_them(tmp_path, rule):
    with pytest.raises(NotFiniteError, match=r"round 1: .* ant, bee, cow "):
        runs.run(tmp_path / "run", optimizer__learning_rate=1e30, on_nonfinite=rule)
    assert runs.lines(tmp_path / "run") == []


# Clients' updates above 1.2, finite, times an eta that is finite too.
OVERFLOW = {"method": "fedavgm:eta=3e38", "optimizer__learning_rate": 100.0, "rounds": 2}


def test_a_step_of_the_server_that_is_not_finite_stops_the_run_with_the_round(tmp_path):
    with pytest.raises(NotFiniteError, match=r"^round 1: the server's step is not finite; lower"):
        runs.run(tmp_path / "run", **OVERFLOW)
    assert runs.lines(tmp_path / "run") == []


def test_with_drop_a_step_of_the_server_that_is_not_finite_is_left_out(tmp_path):
    folder = tmp_path / "run"
    runs.run(folder, on_nonfinite="drop", **OVERFLOW)
    lines = runs.lines(folder)
    assert [line["server_finite"] for line in lines] == [False, False]
    assert "not_finite" not in lines[0]
    _, _, begin = train.prepare(runs.config(on_nonfinite="drop", **OVERFLOW))
    first = begin()
    last = runs.saved(folder, first)
    parts = [(state.shared, state.server) for state in (first, last)]
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_with_drop_the_others_go_on_without_the_client_that_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.undo()
    data = runs.dataset()
    data.domains[1].train.images[:] *= np.float32(1e30)
    runs.install(monkeypatch, data)
    runs.run(tmp_path / "run", on_nonfinite="drop")
    for line in runs.lines(tmp_path / "run"):
        assert line["not_finite"] == ["bee"]
        assert line["weights"]["bee"] == 0
        np.testing.assert_allclose(line["weights"]["ant"], 22 / 33, rtol=1e-6)
        assert line["loss"]["cow"] < 2
