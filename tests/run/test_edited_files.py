"""A run's own files, edited, truncated or replaced: success or an error message, nothing else."""

import copy
import json
import os
import shutil

import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import UserError
from fedjax_bn.report import plots
from fedjax_bn.report.page import write_report
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.files import finished, ownership
from fedjax_bn.training import machine, workdir
from fedjax_bn.training.workdir import NUMBER, TEXT, misfit

NOTHING_LIKE_IT = (
    None,
    True,
    -1,
    0,
    3,
    1.5,
    float("nan"),
    10**30,
    "",
    "x" * 50,
    [],
    [1],
    {},
    {"a": 1},
)
FILES = ("config.json", "summary.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A finished run, and its files' contents."""
    folder = runs.finished(tmp_path_factory.mktemp("edited") / "run")
    return folder, {name: (folder / name).read_text() for name in FILES}


@pytest.fixture
def folder(straight, tmp_path, monkeypatch):
    """A copy without checkpoints, whose plots are not drawn."""
    runs.install(monkeypatch)
    for name in ("curves", "methods"):
        monkeypatch.setattr(plots, name, lambda *given: b"")
    kept = shutil.ignore_patterns("checkpoints", "events", "plots")
    return shutil.copytree(straight[0], tmp_path / "run", ignore=kept)


def read_all(folder, build: bool = True) -> list[str]:
    """Reads a workdir in all ways; returns the sentences that came of it.

    Where not `build`, the model that config.json names is not built.
    """

    def resume():
        workdir.read_lines(folder / "metrics.jsonl", 6)
        workdir.rounds_recorded(folder / "metrics.jsonl")

    def claim_again():
        ownership.check_claim(folder, dict(flatten(runs.config())), {"data": "x"})
        machine.difference(folder, machine.describe_machine())

    def evaluate():
        about = finished.read_about(folder)
        if build:
            finished.restore(folder, finished.configuration(about["config"]), about["form"])

    said = []
    for read in (resume, claim_again, evaluate, lambda: write_report(folder)):
        try:
            read()
        except (UserError, ValueError) as error:
            said.append(str(error))
    return said


def places(content, path=()):
    """Every place in nested JSON."""
    yield path
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, one in items:
            yield from places(one, (*path, key))


def changed(content, path, value):
    """The same with another value at a place; without it where the value is `...`."""
    if not path:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


def write(folder, name, content) -> None:
    lines = name.endswith(".jsonl") and isinstance(content, list)
    text = "".join(json.dumps(r) + "\n" for r in content) if lines else json.dumps(content)
    (folder / name).write_text(text)


def parsed(name, text):
    return list(map(json.loads, text.splitlines())) if name.endswith("l") else json.loads(text)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FILES)
def test_anything_at_any_place_of_a_file_is_read_or_told_in_a_sentence(
    folder, straight, name, seed
):
    random = np.random.default_rng(seed)
    content = parsed(name, straight[1][name])
    every = list(places(content))
    for _ in range(12):
        path = every[random.integers(len(every))]
        value = (..., *NOTHING_LIKE_IT)[random.integers(len(NOTHING_LIKE_IT) + bool(path))]
        value = None if value is ... and not path else value
        write(folder, name, changed(content, path, value))
        said = read_all(folder, build=False)
        assert all("\n" not in text and len(text) < 600 for text in said), (path, value, said)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, lambda text: text[: len(text) // 2].encode()) for name in FILES),
        (FILES[0], lambda text: b""),
        (FILES[1], lambda text: b"\0" * 100),
        (FILES[2], lambda text: b"\xff\xfe" + text.encode()),
        (FILES[0], lambda text: b"[" * 100_000),
        (FILES[1], lambda text: b'{"config": ' * 5000),
        (FILES[2], lambda text: b'{"round": 1' + b"0" * 5000 + b"}"),
    ],
)
def test_a_truncated_file_or_one_of_other_bytes_is_told_in_a_sentence(
    folder, straight, name, damage
):
    (folder / name).write_bytes(damage(straight[1][name]))
    said = read_all(folder)
    assert any(name in text for text in said)
    assert all("\n" not in text and len(text) < 600 for text in said)


def test_a_folder_in_the_place_of_a_file_is_told_in_a_sentence(folder):
    for name in FILES:
        (folder / name).unlink()
        (folder / name).mkdir()
    said = read_all(folder)
    assert len(said) == 4
    assert all("Is a directory" in text for text in said)


def test_a_pipe_in_a_checkpoint_is_told_in_a_sentence(straight, tmp_path):
    folder = shutil.copytree(straight[0], tmp_path / "run")
    (step,) = (folder / "checkpoints" / "selected").glob("[0-9]*")
    os.mkfifo(step / "_sharding_of_elsewhere")
    (said, *_) = [text for text in read_all(folder) if "must be a regular file" in text]
    assert str(step) in said


@pytest.mark.parametrize(
    ("form", "value", "what"),
    [
        ({"a": NUMBER}, {}, "it has no 'a'"),
        ({"a": NUMBER}, [], "it must be an object"),
        ({"a?": NUMBER}, {"a": "1"}, "it['a'] must be a number"),
        ({"*": {"*": NUMBER}}, {"x": {"y": True}}, "it['x']['y'] must be a number"),
        ([TEXT], ["a", 1], "it[1] must be text"),
        ({"a": NUMBER}, {"a": 10**30}, "it['a'] must be a number"),
        ({"a": NUMBER, "b?": [TEXT]}, {"a": float("nan"), "c": None}, ""),
    ],
)
def test_the_first_place_that_does_not_fit_is_named(form, value, what):
    assert misfit(value, form) == what
