"""Callbacks: when they are called, and what a run shows of its rounds."""

import gzip
import json
import signal
import types

import numpy as np
import pytest

import runs
from fedjax_bn.training import plots
from fedjax_bn.training.callbacks.evaluation import StopRequests
from fedjax_bn.training.callbacks.progress import Progress
from fedjax_bn.training.callbacks.tensorboard import TensorBoard
from fedjax_bn.training.loop import train as train_rounds
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


class Watcher:
    """A callback with every hook, which asks to stop in one round."""

    def __init__(self, calls, name, stop=0):
        self.calls, self.name, self.stop = calls, name, stop

    def __enter__(self):
        self.calls.append((self.name, "enter"))

    def __exit__(self, *error):
        self.calls.append((self.name, "exit"))

    def on_round_begin(self, round):
        self.calls.append((self.name, "begin", round))

    def on_round_end(self, round, state, metrics):
        self.calls.append((self.name, "end", round, state, dict(metrics)))
        metrics[self.name] = round
        return round == self.stop

    def on_train_end(self, round, state, metrics):
        self.calls.append((self.name, "last", round))


def count(state):
    return state + 1, {"round": state + 1}


def test_callbacks_are_called_in_order_and_see_what_others_added():
    calls, records, states = [], [{"round": 1}], []
    only_end = types.SimpleNamespace(on_round_end=lambda round, state, _: states.append(state))
    callbacks = [Watcher(calls, "a"), Watcher(calls, "b", stop=2), only_end]
    assert train_rounds(count, 1, rounds=5, records=records, callbacks=callbacks) == 2
    assert calls == [
        *(("a", "enter"), ("b", "enter"), ("a", "begin", 2), ("b", "begin", 2)),
        ("a", "end", 2, 2, {"round": 2}),
        ("b", "end", 2, 2, {"round": 2, "a": 2}),
        *(("a", "last", 2), ("b", "last", 2), ("b", "exit"), ("a", "exit")),
    ]
    assert records == [{"round": 1}, {"round": 2, "a": 2, "b": 2}]
    assert states == [2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_round_and_acts_as_usual_afterwards(number):
    stop = StopRequests()
    usual = signal.signal(number, signal.default_int_handler)  # under nohup it is ignored

    def interrupted(state):
        if state == 1:
            signal.raise_signal(number)
        return count(state)

    assert train_rounds(interrupted, 0, rounds=5, records=[], callbacks=[stop]) == 2
    assert stop.asked
    assert signal.signal(number, usual) is signal.default_int_handler
