"""The profile of a round: what is in it, when it is written, and what is refused."""

import gzip
import json
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError, WorkdirError
from fedjax_bn.run import train
from fedjax_bn.run.config.keys import base, check, flatten, override
from fedjax_bn.run.files.finished import configuration
from fedjax_bn.run.files.ownership import claim
from fedjax_bn.training.callbacks.profile import Profile


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


def traces(folder):
    """Names of the traces in a folder, each of which XProf shows as a run."""
    return sorted(path.name for path in folder.glob("plugins/profile/*"))


def events_of(trace):
    """The timed events of a trace, which is in both forms."""
    assert next(trace.glob("*.xplane.pb")).stat().st_size > 1000
    (path,) = trace.glob("*.trace.json.gz")
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_run_writes_the_trace_of_one_round_once(tmp_path):
    folder, said = tmp_path / "profile", []

    def train_on(**changes):
        said.clear()
        train.run(runs.config(**changes), tmp_path, say=said.append)

    train_on(rounds=2, profile=2)
    assert f"round 2 will be profiled, if it is reached, in {folder}" in said
    assert traces(folder) == ["round_2"]
    assert not (folder / ".partial").exists()
    events = events_of(folder / "plugins/profile/round_2")
    (whole,) = [event for event in events if event["name"] == "round"]
    assert whole["args"]["step_num"] == "2"
    assert whole["dur"] <= 2e6 * runs.lines(tmp_path)[1]["seconds"]
    computed = [e for e in events if e.get("args", {}).get("hlo_module") == "jit_round"]
    assert computed
    assert all(whole["ts"] <= e["ts"] <= whole["ts"] + whole["dur"] for e in computed)
    assert any("device_get" in event["name"] for event in events)  # the metrics' transfer
    assert not any("backend_compile" in event["name"] for event in events)

    before = runs.files(folder)
    train_on(rounds=3, profile=2)
    assert "round 2 is done, so no new profile of it is written" in said
    assert runs.files(folder) == before
    train_on(rounds=4, profile=4)
    assert traces(folder) == ["round_2", "round_4"]
    train_on(rounds=5)
    assert not any("profile" in text for text in said)
    assert traces(folder) == ["round_2", "round_4"]


@contextmanager
def profiled(round, chosen, folder):
    """The block as a round of a run that profiles a chosen one."""
    with Profile(chosen, folder) as callback:
        callback.on_round_begin(round)
        yield
        callback.on_round_end(round, None, {})


def test_a_killed_round_leaves_no_trace_and_the_next_one_is_whole(tmp_path):
    with pytest.raises(runs.Killed), profiled(2, 2, tmp_path):
        raise runs.Killed
    assert traces(tmp_path) == []
    for _ in range(2):  # the second replaces the first
        with profiled(2, 2, tmp_path):
            jax.block_until_ready(jnp.arange(3) + 1)
        assert traces(tmp_path) == ["round_2"]
        assert events_of(tmp_path / "plugins/profile/round_2")
    assert [path.name for path in tmp_path.iterdir()] == ["plugins"]
    with profiled(1, 2, tmp_path / "other"), profiled(1, 0, tmp_path / "other"):
        assert not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_to_is_an_error_message(tmp_path):
    (tmp_path / "file").touch()
    wanted = "cannot write a profile to .*file .*: make room there or make it writable, or leave"
    with pytest.raises(WorkdirError, match=wanted), profiled(1, 1, tmp_path / "file"):
        pass


@pytest.mark.parametrize("value", [-1, 4])
def test_a_round_that_the_run_does_not_have_is_refused(value):
    with pytest.raises(ConfigError, match=rf"config.profile={value}"):
        check(override(base(), f"rounds=3,profile={value}"))
    check(override(base(), "rounds=3,profile=3"))


def test_a_run_that_is_given_fewer_rounds_than_it_wanted_to_profile_is_still_read(tmp_path):
    flat = dict(flatten(runs.config()))
    for rounds, profile in ((20, 15), (10, 0)):
        claim(tmp_path, flat | {"rounds": rounds, "profile": profile}, {"data": "x"})
    config = configuration(json.loads((tmp_path / "config.json").read_text())["config"])
    assert (config.rounds, config.profile) == (10, 0)
