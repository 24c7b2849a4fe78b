"""A run continues from what a kill, a power cut or a full disk left of its writes.

The writes of a small run are recorded, and what a disk may hold is made for every prefix of them.
"""

import contextlib
import gc
import os
import resource
import shutil
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import CheckpointError, WorkdirError
from fedjax_bn.run import train
from fedjax_bn.run.files import ownership
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.callbacks.tensorboard import TensorBoard
from fedjax_bn.training.population import start_population
from fedjax_bn.training.records import select_round

Image = dict[str, bytes]  # path -> content of what a run continues from
PARTS = ("config.json", "metrics.jsonl", "summary.json", "checkpoints")
ROUNDS = 5


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


class Disk:
    """What of a folder was waited for: contents by `fsync` of files, names by that of folders.

    The worst that a power cut leaves are files that hold what they held when they were waited for
    last, under the names of now or under those of the last wait.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.kept: list[int] = []  # open, so that no number of an inode is used twice
        self.images: dict[frozenset, Image] = {}  # the different ones, in order

    def wait(self, number: int) -> None:
        """Records an fsync."""
        inode = os.fstat(number).st_ino
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path != self.folder and self.folder not in path.parents:
            return
        self.kept.append(os.dup(number))
        if path.is_dir():
            self.names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.contents[inode] = path.read_bytes()

    def record(self) -> None:
        """Adds what the disk may hold now."""
        files = {}
        for part in PARTS:
            for path in (self.folder / part, *sorted((self.folder / part).rglob("*"))):
                if path.is_file() and "-tmp" not in str(path):
                    files[str(path.relative_to(self.folder))] = path
        killed = {name: path.read_bytes() for name, path in files.items()}
        cut = {name: self.contents.get(path.stat().st_ino, b"") for name, path in files.items()}
        torn = dict(killed)
        if lines := torn.get("metrics.jsonl"):
            waited_for = cut["metrics.jsonl"]
            torn["metrics.jsonl"] = lines[: max(len(lines) - 9, len(waited_for))]
        named = {name: cut[name] for name, path in files.items() if self.known(path)}
        for image in (killed, torn, cut, named):
            self.images.setdefault(frozenset(image.items()), image)

    def known(self, path: Path) -> bool:
        """Whether the name of a file and of all folders above it were waited for."""
        places = [path, *path.parents]
        for place in places[: places.index(self.folder)]:
            names = self.names.get(place.parent.stat().st_ino, {})
            if names.get(place.name) != place.stat().st_ino:
                return False
        return True


def watch(monkeypatch, disk: Disk) -> None:
    """Records what the disk may hold before every change of a name, every wait, and each line."""

    lock = threading.RLock()  # Orbax deletes in a thread of its own

    def before(function: Callable, after: Callable = lambda *args: None) -> Callable:
        def changed(*args, **kwargs):
            with lock:
                disk.record()
                result = function(*args, **kwargs)
                after(*args)
                return result

        return changed

    for name in ("replace", "rename", "unlink", "remove", "rmdir"):
        monkeypatch.setattr(os, name, before(getattr(os, name)))
    monkeypatch.setattr(os, "fsync", before(os.fsync, disk.wait))
    monkeypatch.setattr(TensorBoard, "on_round_end", before(TensorBoard.on_round_end))


HOST = {"target": "", "clients_per_round": 2, "population": "host"}
HOST |= {"method": "scaffold", "share": "all_but_batch_norm"}


class Recorded(NamedTuple):
    """A straight run, what its disk may hold at any moment, and the states it saved."""

    changes: dict
    folder: Path
    images: list[Image]
    states: dict[int, Any]  # by round


@pytest.fixture(scope="module", params=[{}, HOST], ids=["device", "host"])
def recorded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut") / "run"
    real, disk, states = checkpoint.save, Disk(folder), {}

    def save(manager, number, state):
        states[number] = jax.tree.map(np.array, state)
        real(manager, number, state)
        manager.wait()  # a thread of its own would change names meanwhile

    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        patch.setattr(checkpoint, "save", save)
        watch(patch, disk)
        runs.run(folder, rounds=ROUNDS, **request.param)
        disk.record()
    for number in disk.kept:
        os.close(number)
    return Recorded(request.param, folder, list(disk.images.values()), states)


def lay(image: Image, folder: Path) -> Path:
    """Writes an image as a workdir."""
    for name, content in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def selected_in(folder: Path) -> set[int]:
    """The rounds of which there is a checkpoint of the selected round, as `sha256sum` finds it."""
    rounds = set()
    for sums in (folder / "checkpoints" / "selected").glob(f"*/{checkpoint.CHECKSUMS}"):
        pairs = [line.split("  ", 1) for line in sums.read_text().splitlines()]
        paths = [(digest, sums.parent / name) for digest, name in pairs]
        if all(p.exists() and sha256(p.read_bytes()).hexdigest() == d for d, p in paths):
            rounds.add(int(sums.parent.name))
    return rounds


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_every_prefix_of_the_writes_of_a_run_is_gone_on_from(recorded, tmp_path, every):
    experiment, _, start = train.prepare(runs.config(rounds=ROUNDS, **recorded.changes))
    start, lines, reached = start_population(experiment, start), runs.lines(recorded.folder), set()
    assert len(recorded.images) > 20
    for number, image in enumerate(recorded.images[::-every]):
        folder = lay(image, tmp_path / str(number))
        state, records = ownership.resume(folder, start)
        rounds = int(state.round)
        assert records == lines[:rounds] == runs.lines(folder)
        if rounds:
            jax.tree.map(np.testing.assert_array_equal, state, recorded.states[rounds])
        if any("validation" in record for record in records):
            # Or a later round took its place, which will be reached, and selected, again.
            assert {select_round(records), *range(rounds + 1, ROUNDS + 1)} & selected_in(folder)
        reached.add(rounds)
    assert reached == {0, 2, 4, 5}


def test_a_run_that_goes_on_from_one_of_them_ends_with_the_same_bits(recorded, tmp_path):
    images, last = recorded.images, recorded.states[ROUNDS]
    folder = lay(images[np.random.default_rng(5).integers(len(images))], tmp_path / "run")
    runs.run(folder, rounds=ROUNDS, **recorded.changes)
    places = folder, recorded.folder
    ends, straight = ([*map(runs.without_times, runs.lines(place))] for place in places)
    assert ends == straight
    jax.tree.map(np.testing.assert_array_equal, runs.saved(folder, last), last)
    assert runs.steps(folder, "selected") == runs.steps(recorded.folder, "selected")


def test_what_a_power_cut_empties_in_a_checkpoint_is_not_needed_but_its_form_is_checked(tmp_path):
    state = {"a": np.arange(3.0), "round": np.int32(2)}
    folder = tmp_path / "latest"
    with checkpoint.open_folder(folder, keep=2) as manager:
        checkpoint.save(manager, 2, state)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        if (folder / "2" / name).exists():
            (folder / "2" / name).write_bytes(b"")
    with checkpoint.open_folder(folder, keep=2) as manager:
        jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(manager, state), state)
        for other in ({"a": np.arange(4.0)}, {"b": np.arange(3.0)}, {"a": np.arange(3)}):
            with pytest.raises(CheckpointError, match="of another model"):
                checkpoint.restore(manager, {"round": np.int32(2)} | other)


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
