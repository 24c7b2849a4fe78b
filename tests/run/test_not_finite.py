"""Updates and steps that are not finite: a run stops, or it leaves them out."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.run import train

# Clients' updates above 1.2, finite, times an eta that is finite too.
OVERFLOW = {"method": "fedavgm:eta=3e38", "optimizer__learning_rate": 100.0, "rounds": 2}
HUGE = {"optimizer__learning_rate": 1e30}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (HUGE, "ant, bee, cow "),
        pytest.param(HUGE | {"on_nonfinite": "drop"}, "ant, bee, cow ", marks=pytest.mark.slow),
        (OVERFLOW, "the server's step"),
    ],
)
def test_a_round_that_nobody_can_use_is_an_error_that_names_it(tmp_path, changes, named):
    with pytest.raises(NotFiniteError, match=f"^round 1: .*{named}"):
        runs.run(tmp_path / "run", **changes)
    assert runs.lines(tmp_path / "run") == []


def test_with_drop_a_step_of_the_server_that_is_not_finite_is_left_out(tmp_path):
    changes = OVERFLOW | {"on_nonfinite": "drop"}
    runs.run(tmp_path, **changes)
    lines = runs.lines(tmp_path)
    assert [line["server_finite"] for line in lines] == [False, False]
    assert "not_finite" not in lines[0]
    start = train.prepare(runs.config(**changes))[2]()
    parts = [(state.shared, state.server) for state in (start, runs.saved(tmp_path, start))]
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_with_drop_the_others_go_on_without_the_client_that_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.undo()
    data = runs.dataset()
    data.domains[1].train.images[:] *= np.float32(1e30)
    runs.install(monkeypatch, data)
    runs.run(tmp_path, on_nonfinite="drop", rounds=2)
    for line in runs.lines(tmp_path):
        assert line["not_finite"] == ["bee"]
        assert line["weights"]["bee"] == 0
        np.testing.assert_allclose(line["weights"]["ant"], 22 / 33, rtol=1e-6)
        assert line["loss"]["cow"] < 2
