"""A run continues from what a kill or a power cut left of its writes.

The writes of a small run are recorded, and what a disk may hold is made for every prefix of them.
"""

import os
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import CheckpointError
from fedjax_bn.run import train
from fedjax_bn.training import checkpoint
from fedjax_bn.training.callbacks.watching import TensorBoard
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
        for place in (path, *path.parents):
            if place == self.folder:
                return True
            if (
                self.names.get(place.parent.stat().st_ino, {}).get(place.name)
                != place.stat().st_ino
            ):
                return False
        return False


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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A straight run, all images, and the state after each of its rounds."""
    folder, states = tmp_path_factory.mktemp("cut") / "run", {}
    real, disk = checkpoint.save, Disk(folder)

    def save(manager, number, state):
        states[number] = jax.tree.map(np.array, state)
        real(manager, number, state)
        manager.wait()  # a thread of its own would change names meanwhile

    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        patch.setattr(checkpoint, "save", save)
        watch(patch, disk)
        runs.run(folder, rounds=ROUNDS)
        disk.record()
    for number in disk.kept:
        os.close(number)
    return folder, list(disk.images.values()), states


def lay(image: Image, folder: Path) -> Path:
    """Writes an image as a workdir."""
    for name, content in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def selected_in(folder: Path) -> set[int]:
    """The rounds of which there is a whole checkpoint of the selected round."""
    places = [p for p in (folder / "checkpoints" / "selected").iterdir() if p.name.isdecimal()]
    return {int(place.name) for place in places if is_whole(place)}


def is_whole(place: Path) -> bool:
    """Whether a checkpoint has its checksums, as `sha256sum --check` reads them."""
    sums = place / checkpoint.CHECKSUMS
    if not sums.exists():
        return False
    pairs = [line.split("  ", 1) for line in sums.read_text().splitlines()]
    paths = [(digest, place / name) for digest, name in pairs]
    return all(p.exists() and sha256(p.read_bytes()).hexdigest() == d for d, p in paths)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_prefix_of_the_writes_of_a_run_is_gone_on_from(recorded, tmp_path, every):
    straight, images, states = recorded
    start = train.prepare(runs.config(rounds=ROUNDS))[2]
    lines, reached = runs.lines(straight), set()
    assert len(images) > 20
    for number, image in enumerate(images[::-every]):
        folder = lay(image, tmp_path / str(number))
        state, records = train.resume(folder, start)
        rounds = int(state.round)
        assert records == lines[:rounds] == runs.lines(folder)
        if rounds:
            jax.tree.map(np.testing.assert_array_equal, state, states[rounds])
        if any("validation" in record for record in records):
            # Or a later round took its place, which will be reached, and selected, again.
            assert {select_round(records), *range(rounds + 1, ROUNDS + 1)} & selected_in(folder)
        reached.add(rounds)
    assert reached == {0, 2, 4, 5}


def test_a_run_that_goes_on_from_one_of_them_ends_with_the_same_bits(recorded, tmp_path):
    straight, images, states = recorded
    image = images[np.random.default_rng(5).integers(len(images))]
    folder = lay(image, tmp_path / "run")
    runs.run(folder, rounds=ROUNDS)
    one, two = (list(map(runs.without_times, runs.lines(f))) for f in (folder, straight))
    assert one == two
    ended = runs.saved(folder, states[ROUNDS])
    jax.tree.map(np.testing.assert_array_equal, ended, states[ROUNDS])
    assert runs.steps(folder, "selected") == runs.steps(straight, "selected")


def test_a_run_goes_back_to_the_checkpoint_that_its_records_suffice_for(recorded, tmp_path):
    states = recorded[2]
    folder = runs.unfinished(tmp_path / "short", runs.config(rounds=ROUNDS))
    lines = runs.lines_written(folder)
    (folder / "metrics.jsonl").write_bytes(b"\n".join([*lines[:4], lines[4][:30]]))
    runs.run(folder, rounds=ROUNDS)
    jax.tree.map(np.testing.assert_array_equal, runs.saved(folder, states[5]), states[5])
    assert len(runs.lines(folder)) == ROUNDS


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
