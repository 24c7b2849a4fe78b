"""Full disks: what does not fit leaves no part, and a run goes on when there is room."""

import contextlib
import gc
import resource
import shutil

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.run import train
from fedjax_bn.training import workdir
from fedjax_bn.training.callbacks.tensorboard import TensorBoard


@contextlib.contextmanager
def files_no_larger_than(size: int):
    """The kernel refuses larger files, as a full disk refuses them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("write", "old", "new"),
    [
        (workdir.write_atomically, "old", "x" * 300),
        (workdir.append_line, {"round": 1}, {"loss": "x" * 300}),
    ],
)
def test_a_file_or_line_that_does_not_fit_leaves_the_old_one_and_no_part(tmp_path, write, old, new):
    path = tmp_path / "file"
    write(path, old)
    before = path.read_bytes()
    with files_no_larger_than(100), pytest.raises(WorkdirError, match=f"{path}.*File too large"):
        write(path, new)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of events that do not fit
@pytest.mark.parametrize("size", [600, 2000])
def test_a_run_whose_disk_is_full_leaves_no_parts_and_goes_on_when_there_is_room(
    tmp_path, monkeypatch, size
):
    """600 bytes hold no line of round 3; 2000 bytes hold them, and no array of a checkpoint."""
    runs.install(monkeypatch)
    straight = runs.unfinished(tmp_path / "straight", runs.config())
    folder = shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "latest" / "6")
    lines = runs.lines_written(folder)[:4]
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    real, limit = TensorBoard.__enter__, contextlib.ExitStack()

    def then_full(events):
        limit.enter_context(files_no_larger_than(size))
        return real(events)

    with monkeypatch.context() as patch, limit:
        patch.setattr(TensorBoard, "__enter__", then_full)
        with pytest.raises(WorkdirError, match=r"^[^\n]*File too large[^\n]*\Z"):
            runs.run(folder)
    gc.collect()
    assert not [p for p in folder.rglob("*") if p.name.endswith(".partial") or "-tmp" in p.name]
    train.run(runs.config(), folder, say=lambda text: None)
    like = jax.eval_shape(train.prepare(runs.config())[2])
    ended = [runs.saved(place, like) for place in (folder, straight)]
    jax.tree.map(np.testing.assert_array_equal, *ended)
