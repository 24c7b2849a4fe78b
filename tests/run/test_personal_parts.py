"""Personal parts on the command line: each method and rule, and what a continued run restores."""

import pytest
from test_resume import assert_same_end

import runs

METHODS = ("ditto", "apfl", "fedala", "fedrep", "gperxan")
RULES = ("all_but_norms", "all_but_head", "only_head")
CHANGES = [{"method": name} for name in METHODS]
CHANGES += [{"method": "fedavg", "model": "MLP:norm=group", "share": rule} for rule in RULES]
OFTEN = ("ditto", "all_but_norms")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(one, marks=[pytest.mark.slow] * set(one.values()).isdisjoint(OFTEN))
        for one in CHANGES
    ],
)
def test_a_run_that_is_given_more_rounds_ends_as_a_straight_one(monkeypatch, tmp_path, changes):
    runs.install(monkeypatch)
    summary = runs.run(tmp_path / "straight", rounds=4, **changes)
    assert "dog" in str(summary)
    runs.run(tmp_path / "further", rounds=2, **changes)
    runs.run(tmp_path / "further", rounds=4, **changes)
    config = runs.config(rounds=4, **changes)
    assert_same_end(tmp_path / "further", tmp_path / "straight", config)
