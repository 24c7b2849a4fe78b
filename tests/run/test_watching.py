"""What a run prints and logs: in a file, and in TensorBoard."""

import pytest

import runs
from fedjax_bn.training.callbacks.watching import Progress


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch, draw=True)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run with pictures of its data."""
    place = tmp_path_factory.mktemp("watching") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, draw=True)
        runs.run(place)
    return place


def test_tensorboard_shows_the_pictures_of_the_data(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "events"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"samples", "class_counts"}
    picture = events.Images("class_counts")[0]
    assert picture.encoded_image_string == (folder / "plots" / "class_counts.png").read_bytes()
