"""Full disks, folders that cannot be written to, pipes without a reader, narrow encodings."""

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.run import train
from fedjax_bn.training import workdir
from fedjax_bn.training.callbacks.tensorboard import TensorBoard

TALK = """
import sys
from pathlib import Path
from tqdm import tqdm
from fedjax_bn import main

def train(arguments):
    for number in tqdm(range(3000), mininterval=0):
        print("client caf\\u00e9", number)
    Path(sys.argv[1]).write_text("continued")

main.COMMANDS["train"] = train
file = sys.argv.pop(1)
sys.argv.append(file)
main.COMMANDS[file] = train
main.command()
"""


def talk(tmp_path, how: str) -> str:
    """What is left of a command that talks much, run in a shell as `how` says."""
    script = tmp_path / "talk.py"
    script.write_text(TALK)
    line = f"{sys.executable} {script} {tmp_path}/file {how}"
    environment = os.environ | {"PYTHONPATH": str(runs.ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert (tmp_path / "file").read_text() == "continued"
    return done.stdout


def test_pipes_that_are_closed_and_a_full_disk_behind_the_messages_end_no_run(tmp_path):
    assert talk(tmp_path, "2> /dev/null | head -1") == "client caf\\xe9 0\n"
    assert talk(tmp_path, "2>&1 > /dev/null | head -c 9").strip()
    if os.path.exists("/dev/full"):
        talk(tmp_path, "> /dev/full 2> /dev/full")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_command_whose_output_found_no_room_ends_with_an_error_and_a_reason():
    line = f"{sys.executable} -m fedjax_bn --version"
    done = [
        subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line} {how}"],
            env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        for how in ("> /dev/full", "| head -c 1", "> /dev/full 2>&1")
    ]
    assert [run.returncode for run in done] == [2, 0, 2]
    assert os.strerror(errno.ENOSPC) in done[0].stderr
    assert done[0].stderr.count("\n") == 1


@contextlib.contextmanager
def files_no_larger_than(size: int):
    """The kernel refuses larger files, as a full disk refuses them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_part(tmp_path):
    path = tmp_path / "report.html"
    workdir.write_atomically(path, "old")
    with files_no_larger_than(100), pytest.raises(WorkdirError, match="File too large") as error:
        workdir.write_atomically(path, "x" * 300)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    workdir.append_line(path, {"round": 1})
    before = path.read_bytes()
    with files_no_larger_than(len(before) + 5), pytest.raises(WorkdirError, match="File too large"):
        workdir.append_line(path, {"round": 2})
    assert path.read_bytes() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_whatever_the_system_says_of_a_write_is_one_sentence(tmp_path, monkeypatch, code):
    def fsync(number):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(WorkdirError) as error:
        workdir.write_json(tmp_path / "summary.json", {})
    assert os.strerror(code) in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_workdir_below_a_file_is_one_sentence(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match=r"cannot write to .*file/run .*Not a directory"):
        runs.run(tmp_path / "file" / "run")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that had room for all rounds; its summary is still to be written."""
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        return runs.unfinished(tmp_path_factory.mktemp("room") / "run", runs.config())


def left_over(folder):
    names = [path.name for path in folder.rglob("*")]
    return [name for name in names if name.endswith(".partial") or "-tmp" in name]


@pytest.mark.slow
@pytest.mark.parametrize("size", [600, 2000])
def test_a_run_whose_disk_is_full_says_so_leaves_no_parts_and_goes_on_when_there_is_room(
    straight, tmp_path, monkeypatch, size
):
    """600 bytes hold no line of round 3; 2000 bytes hold them, and no array of a checkpoint."""
    runs.install(monkeypatch)
    folder = shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "latest" / "6")
    lines = runs.lines_written(folder)[:4]
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    real = TensorBoard.__enter__
    limit = contextlib.ExitStack()

    def then_full(*args):
        limit.enter_context(files_no_larger_than(size))
        return real(*args)

    with monkeypatch.context() as patch, limit:
        patch.setattr(TensorBoard, "__enter__", then_full)
        with pytest.raises(WorkdirError, match="File too large") as error:
            runs.run(folder)
    assert "\n" not in str(error.value)
    assert not left_over(folder)
    train.run(runs.config(), folder, say=lambda text: None)
    like = jax.eval_shape(train.prepare(runs.config())[2])
    ended = [runs.saved(place, like) for place in (folder, straight)]
    jax.tree.map(np.testing.assert_array_equal, *ended)
