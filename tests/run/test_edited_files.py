"""A run's own files, truncated, damaged or of another version: an error message names the file."""

import json
import shutil

import pytest

import runs
from fedjax_bn.arguments.errors import UserError
from fedjax_bn.run.config import flatten
from fedjax_bn.run.files import finished, ownership
from fedjax_bn.training import workdir

FILES = ("config.json", "summary.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A finished run."""
    return runs.finished(tmp_path_factory.mktemp("edited") / "run")


@pytest.fixture
def folder(straight, tmp_path):
    """A copy without checkpoints."""
    kept = shutil.ignore_patterns("checkpoints", "events", "plots")
    return shutil.copytree(straight, tmp_path / "run", ignore=kept)


def read_all(folder) -> None:
    """Reads a workdir as a run that continues and an evaluation do."""
    about = json_of(folder / "config.json")
    ownership.claim(folder, dict(flatten(runs.config())), about, write=False)
    finished.read_about(folder)
    workdir.read_json(folder / "summary.json", workdir.SUMMARY)
    workdir.read_lines(folder / "metrics.jsonl", 6)


def json_of(path):
    try:
        return json.loads(path.read_text())
    except (ValueError, OSError):
        return {}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("half", [True, False])
def test_a_damaged_file_is_named_whole(folder, name, half):
    text = (folder / name).read_text()
    (folder / name).write_text(text[: len(text) // 2] if half else "\0" * 100)
    with pytest.raises(UserError) as error:
        read_all(folder)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize(
    ("name", "key"), [("config.json", "form"), ("config.json", "data"), ("summary.json", "rounds")]
)
def test_what_a_file_lacks_is_named(folder, name, key):
    content = json.loads((folder / name).read_text())
    del content[key]
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"has no '{key}'"):
        read_all(folder)


def test_a_workdir_of_another_version_is_refused_naming_both(folder):
    content = json.loads((folder / "config.json").read_text())
    content["versions"]["fedjax_bn"] = "0.1.7"
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"0\.1\.7"):
        read_all(folder)


def test_torn_lines_after_the_checkpoint_are_dropped_and_missing_ones_refused(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[4][:20]]))
    assert workdir.rounds_recorded(path) == 4
    assert [record["round"] for record in workdir.read_lines(path, 4)] == [1, 2, 3, 4]
    with pytest.raises(UserError, match="round 5"):
        workdir.read_lines(path, 5)
