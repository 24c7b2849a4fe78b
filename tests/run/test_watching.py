"""What a run prints and logs: on a terminal, in a file, in TensorBoard, to Weights & Biases."""

import io
import os
import shutil
import sys
import termios
import time

import numpy as np
import pytest

import runs
from fedjax_bn.run import train
from fedjax_bn.training import workdir
from fedjax_bn.training.callbacks.progress import Progress
from fedjax_bn.training.rounds import Rounds


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch, draw=True)


def record(number: int, **more: object) -> dict:
    return {"round": number, "loss": {"ant": 0.5, "bee": None, "cow": 0.25}, "seconds": 0.5, **more}


def test_rounds_are_lines_in_a_file_and_a_bar_on_a_terminal(monkeypatch, capsys):
    evaluated = {"accuracy": {"mean": 61.24}}
    with Progress("fedbn", 800, 4, samples=1000) as shown:
        shown.on_round_end(5, None, record(5))  # too early for a line
        shown.on_round_end(6, None, record(6, **evaluated))
        shown.on_round_end(800, None, record(800) | {"loss": {"ant": None}})
    words = "loss 0.375, accuracy 61.2 %, 2,000 samples/s"
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"fedbn: round 6 of 800, {words}, ")
    assert last == "fedbn: round 800 of 800, no client took part, 00:00 left"

    here, there = os.openpty()
    termios.tcsetwinsize(there, (24, 80))
    with os.fdopen(there, "w") as terminal, os.fdopen(here, "rb") as seen:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("fedbn", 800, 4, samples=1000) as shown:
            time.sleep(0.2)  # tqdm draws ten times a second at most
            shown.on_round_end(5, None, record(5, **evaluated))
        terminal.flush()
        last = seen.readline().decode().strip().split("\r")[-1]
    assert "5/800" in last
    assert words in last


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
        train, "open_rounds", lambda *_: Rounds("", lambda state: pytest.fail("it compiles"))
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
