"""The profile of a round: what is in it, when it is written, and what is refused."""

import gzip
import json

import pytest

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.run import train
from fedjax_bn.training.callbacks.watching import Profile


def events_of(folder):
    """The timed events of a folder's trace, which is in both forms."""
    (trace,) = folder.glob("plugins/profile/*")
    assert next(trace.glob("*.xplane.pb")).stat().st_size > 1000
    (path,) = trace.glob("*.trace.json.gz")
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_run_writes_the_trace_of_one_round_once(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    folder, said = tmp_path / "profile", []
    train.run(runs.config(rounds=2, profile=2), tmp_path, say=said.append)
    assert any(str(folder) in text for text in said)
    events = events_of(folder)
    (whole,) = [event for event in events if event["name"] == "round"]
    assert whole["args"]["step_num"] == "2"
    assert whole["dur"] <= 2e6 * runs.lines(tmp_path)[1]["seconds"]
    computed = [e for e in events if e.get("args", {}).get("hlo_module") == "jit_round"]
    assert computed
    assert all(whole["ts"] <= e["ts"] <= whole["ts"] + whole["dur"] for e in computed)
    assert any("device_get" in event["name"] for event in events)  # the metrics' transfer
    assert not any("backend_compile" in event["name"] for event in events)

    before = runs.files(folder)
    train.run(runs.config(rounds=3, profile=2), tmp_path, say=said.append)
    assert runs.files(folder) == before


def test_a_folder_that_cannot_be_written_to_is_an_error_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="file"):
        Profile(1, tmp_path / "file")
