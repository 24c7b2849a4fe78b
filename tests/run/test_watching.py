"""What a run shows of its rounds: lines, warnings, pictures in TensorBoard, a profile."""

import gzip
import json

import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.training import plots
from fedjax_bn.training.callbacks.profile import Profile
from fedjax_bn.training.callbacks.progress import Progress
from fedjax_bn.training.callbacks.tensorboard import TensorBoard
from fedjax_bn.training.records import round_record, warnings_of


def record(number: int, **more: object) -> dict:
    return {"round": number, "loss": {"ant": 0.5, "bee": None, "cow": 0.25}, "seconds": 0.5, **more}


def test_rounds_are_lines_in_a_file(capsys):
    evaluated = {"accuracy": {"mean": 61.24}}
    with Progress("fedbn", 800, 4, samples=1000) as shown:
        shown.on_round_end(5, None, record(5))  # too early for a line
        shown.on_round_end(6, None, record(6, **evaluated))
        shown.on_round_end(800, None, record(800) | {"loss": {"ant": None}})
    words = "loss 0.375, accuracy 61.2 %, 2,000 samples/s"
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"fedbn: round 6 of 800, {words}, ")
    assert last == "fedbn: round 800 of 800, no client took part, 00:00 left"


def with_norms(norms):
    metrics = {"loss": np.ones(4), "weights": np.full(4, 0.25), "norm": np.array(norms)}
    metrics |= {"finite": np.ones(4, bool), "server_finite": True}
    return round_record(["a", "b", "c", "d"], metrics, 1, 0.5)


@pytest.mark.parametrize(("norm", "times"), [(40.0, 40 / 3), (np.inf, None)])
def test_a_norm_of_more_than_ten_times_the_median_is_recorded_and_is_a_sentence(norm, times):
    found = with_norms([1.0, 3.0, np.nan, norm])
    assert found["norm"] == {"a": 1, "b": 3, "c": None, "d": None if times is None else 40}
    assert found["far_norms"] == {"d": times and pytest.approx(times)}
    json.dumps(found, allow_nan=False)
    (sentence,) = warnings_of(found)
    assert sentence.startswith("round 1: the norm of d's update ")


@pytest.mark.parametrize(
    "norms", [[1, 2, 3, 9.0], [np.nan, np.nan, 1, 99], [0, 0, 0, 5.0], [np.nan] * 4]
)
def test_near_norms_few_clients_and_clients_at_rest_are_no_warning(norms):
    assert warnings_of(with_norms(norms)) == []


def test_tensorboard_shows_pictures_of_the_data(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plots.write_data_plots(tmp_path, runs.DATA, ())
    with TensorBoard(tmp_path, 0):
        pass
    events = reader.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"samples", "class_counts"}
    picture = events.Images("class_counts")[0]
    written = (tmp_path / "plots" / "class_counts.png").read_bytes()
    assert picture.encoded_image_string == written


def test_a_run_writes_the_trace_of_one_round_alone(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    runs.run(tmp_path, rounds=2, profile=2)
    (trace,) = tmp_path.glob("profile/plugins/profile/*")
    assert next(trace.glob("*.xplane.pb")).stat().st_size > 1000
    (path,) = trace.glob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    (whole,) = [event for event in events if event["name"] == "round"]
    assert whole["args"]["step_num"] == "2"
    assert whole["dur"] <= 2e6 * runs.lines(tmp_path)[1]["seconds"]
    computed = [e for e in events if e.get("args", {}).get("hlo_module") == "jit_round"]
    assert computed
    assert all(whole["ts"] <= e["ts"] <= whole["ts"] + whole["dur"] for e in computed)
    assert any("device_get" in event["name"] for event in events)  # the metrics' transfer
    assert not any("backend_compile" in event["name"] for event in events)


def test_a_profile_into_a_file_is_an_error_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="file"):
        Profile(1, tmp_path / "file")
