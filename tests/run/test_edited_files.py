"""A run's own files, truncated, damaged or of another version: an error message names the file."""

import json
import shutil

import pytest

import runs
from fedjax_bn.arguments.errors import UserError
from fedjax_bn.run.files import finished
from fedjax_bn.training import workdir


@pytest.fixture
def folder(tmp_path):
    """A finished run without checkpoints."""
    straight = runs.finished(tmp_path / "straight")
    ignore = shutil.ignore_patterns("checkpoints", "events", "plots")
    return shutil.copytree(straight, tmp_path / "run", ignore=ignore)


def read_all(folder) -> None:
    """Reads a workdir as a run that continues and an evaluation do."""
    finished.read_about(folder)
    workdir.read_json(folder / "summary.json", workdir.SUMMARY)
    workdir.read_lines(folder / "metrics.jsonl", 6)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("half", [True, False])
def test_a_damaged_file_is_named_whole(folder, name, half):
    text = (folder / name).read_text()
    (folder / name).write_text(text[: len(text) // 2] if half else "\0" * 100)
    with pytest.raises(UserError, match=str(folder / name)):
        read_all(folder)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("config.json", {"form": None}, "has no 'form'"),
        ("summary.json", {"rounds": None}, "has no 'rounds'"),
        ("config.json", {"versions": {"fedjax_bn": "0.1.7"}}, r"0\.1\.7"),
    ],
)
def test_what_a_file_lacks_and_another_version_are_named(folder, name, change, match):
    content = json.loads((folder / name).read_text()) | change
    content = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=match):
        read_all(folder)


def test_torn_lines_after_the_checkpoint_are_dropped_and_missing_ones_refused(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[4][:20]]))
    assert workdir.rounds_recorded(path) == 4
    assert [record["round"] for record in workdir.read_lines(path, 4)] == [1, 2, 3, 4]
    for left, missing in ((lines[:4], 5), (lines[:1] + lines[2:], 2), ([], 1)):
        path.write_bytes(b"".join(left))
        with pytest.raises(UserError, match=f"round {missing} of the 5"):
            workdir.read_lines(path, 5)
