"""What a run prints and logs: on a terminal, in a file, in TensorBoard, to Weights & Biases."""

import io
import os
import shutil
import sys
import termios
import types

import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data import messages
from fedjax_bn.run import train
from fedjax_bn.training import workdir
from fedjax_bn.training.callbacks import progress
from fedjax_bn.training.callbacks.progress import Progress
from fedjax_bn.training.callbacks.wandb import Wandb
from fedjax_bn.training.rounds import Rounds


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch, draw=True)


def record(number: int, **more: object) -> dict:
    return {"round": number, "loss": {"ant": 0.5, "bee": None, "cow": 0.25}, "seconds": 0.5, **more}


def clock_of(monkeypatch, *moments: float) -> list[float]:
    """A clock for `progress` that stands at the last of the list's moments."""
    now = list(moments)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def test_in_a_file_rounds_are_plain_lines_with_loss_accuracy_pace_and_time_left(
    monkeypatch, capsys
):
    now = clock_of(monkeypatch, 0.0)
    with Progress("fedbn", 8, 4, samples=1000) as shown:
        for moment, done in (
            (2.0, record(5)),  # too early for a line
            (4.0, record(6, accuracy={"mean": 61.24})),
            (60.0, record(7)),
            (80.0, record(8)),
        ):
            now.append(moment)
            shown.on_round_end(done["round"], None, done)
    told = capsys.readouterr().err
    assert told.splitlines() == [
        "fedbn: round 6 of 8, loss 0.375, accuracy 61.2 %, 2,000 samples/s, 1 s left",
        "fedbn: round 7 of 8, loss 0.375, 2,000 samples/s, 56 s left",
        "fedbn: round 8 of 8, loss 0.375, 2,000 samples/s, 0 s left",
    ]


def test_the_time_left_counts_neither_start_up_nor_compiling(monkeypatch, capsys):
    """Round 1 ends after 300 s of start-up, the first evaluation compiles for 100 s."""
    now = clock_of(monkeypatch, 0.0)
    told = []
    with Progress("fedbn", 100, 0, samples=1000) as shown:
        for number, moment in enumerate((300, 301, 302, 402, 403, 404, 405, 407), 1):
            now.append(float(moment))
            evaluated = {"accuracy": {"mean": 50.0}} if number % 4 == 0 else {}
            shown.on_round_end(number, None, record(number, **evaluated))
            told += capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in told] == [
        "50 s left",  # the round's own 0.5 s
        "1 min 36 s left",
        "1 min 47 s left",  # (1 + 1 + 1 + 1 + 1 + 2) / 6 for 92 rounds
    ]


def test_a_round_without_clients_has_no_loss_and_no_pace(capsys):
    with Progress("fedbn", 1, 0, samples=9) as shown:
        shown.on_round_end(1, None, record(1) | {"loss": {"ant": None}})
    assert "no client took part, 0 s left" in capsys.readouterr().err


def test_on_a_terminal_of_80_columns_a_bar_says_the_same(monkeypatch):
    here, there = os.openpty()
    termios.tcsetwinsize(there, (24, 80))
    with os.fdopen(there, "w") as terminal, os.fdopen(here, "rb") as seen:
        monkeypatch.setattr(sys, "stderr", terminal)
        now = clock_of(monkeypatch, 0.0)
        with Progress("fedbn", 800, 4, samples=1000, score="accuracy") as shown:
            now.append(1000.0)  # of compiling
            shown.on_round_end(5, None, record(5, accuracy={"mean": 61.24}))
        terminal.flush()
        last = seen.readline().decode().strip().split("\r")[-1]
    assert "5/800" in last
    assert "<06:37, " in last  # 795 rounds of 0.5 s
    assert "loss 0.375, accuracy 61.2 %, 2,000 samples/s]" in last


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.6, "8 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_duration_is_said_as_people_say_it(seconds, text, capsys):
    with Progress("fedbn", 2, 0, samples=9) as shown:
        shown.on_round_end(1, None, record(1, accuracy={"mean": 1.0}) | {"seconds": seconds})
    assert f", {text} left" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run with pictures of its data."""
    place = tmp_path_factory.mktemp("watching") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, draw=True)
        runs.run(place)
    return place


def test_a_run_whose_rounds_are_done_makes_its_summary_without_compiling(
    tmp_path, folder, monkeypatch
):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    whole = workdir.read_json(tmp_path / "summary.json")
    (tmp_path / "summary.json").unlink()
    monkeypatch.setattr(
        train, "open_rounds", lambda *_: Rounds("", {}, lambda state: pytest.fail("it compiles"))
    )
    monkeypatch.setattr(train, "traffic", lambda *_: whole["traffic"])
    assert runs.without_times(runs.run(tmp_path)) == runs.without_times(whole)


def test_tensorboard_shows_the_pictures_of_the_data(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "events"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"samples", "class_counts"}
    picture = events.Images("class_counts")[0]
    assert picture.encoded_image_string == (folder / "plots" / "class_counts.png").read_bytes()
    assert picture.width == width_of(picture.encoded_image_string)


def width_of(data: bytes) -> int:
    from matplotlib import image

    return np.asarray(image.imread(io.BytesIO(data))).shape[1]


def test_weights_and_biases_gets_every_round_under_one_name(tmp_path, monkeypatch):
    calls, logged = [], []

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            logged.append("closed")

        def log(self, values, step):
            logged.append((step, values["loss/ant"]))

    fake = types.ModuleType("wandb")
    fake.__spec__ = object()
    fake.init = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    records = [{"round": number, "loss": {"ant": number / 2}} for number in (1, 2)]
    config = runs.config(wandb="hospitals", rounds=2)
    plan = train.prepare(config)[0].plan
    with Wandb(plan, tmp_path) as callback:
        for one in records:
            callback.on_round_end(one["round"], None, one)
    (options,) = calls
    assert options["project"] == "hospitals"
    assert options["resume"] == "allow"
    assert options["config"]["method"] == "fedbn"
    assert logged == [(1, 0.5), (2, 1.0), "closed"]


def test_a_project_without_the_package_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"config\.wandb='x'"):
        runs.run(tmp_path, wandb="x")


def test_reading_into_a_file_is_told_in_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(messages, "WAIT", 0.0)
    with messages.progress_bar(1200, "decoding", True) as bar:
        bar.update(1000)
        bar.update(200)
    with messages.progress_bar(1200, "decoding", False) as bar:
        bar.update(1200)
    lines = "decoding: 1,000 of 1,200 images\ndecoding: 1,200 of 1,200 images\n"
    assert capsys.readouterr().err == lines
