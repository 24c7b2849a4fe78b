"""Full disks, folders that cannot be written to, pipes without a reader, narrow encodings."""

import contextlib
import resource
import shutil

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.run import train
from fedjax_bn.training import workdir
from fedjax_bn.training.callbacks.watching import TensorBoard


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
