"""Orbax checkpoints of a run: its latest rounds, and the round selected by validation.

A checkpoint holds checksums of its files. So damage is found before Orbax reads, which does not
notice a flipped bit, and whose parallel readers print tracebacks of what they do notice.
"""

import hashlib
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from fedjax_bn.data.regular_files import read_text
from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.run.errors import CheckpointError, WorkdirError
from fedjax_bn.run.files.workdir import sync
from fedjax_bn.run.processes.mesh import form_on, without_padding
from fedjax_bn.run.processes.together import by_first

PyTree = Any
Folder = ocp.training.Checkpointer
CHECKSUMS = "SHA256SUMS"  # in a checkpoint's folder, as `sha256sum --check` reads them
_ITEM = "default"  # its part with the arrays, the name that Orbax's first interface gave it
_FORM = "# form {}"  # the checksums' first line, which that takes for a comment
# Folder -> the form of what is being saved there. Orbax's own metadata could hold it, but it writes
# them again behind our checksums, so that a power cut may empty them.
_forms: dict[Path, str] = {}


def open_folder(folder: Path, keep: int) -> Folder:
    """Opens (and makes) a folder of checkpoints that keeps the `keep` newest.

    Raises:
      CheckpointError: a checkpoint in it is damaged so that the folder cannot be listed.
    """
    folder = folder.absolute()
    _check_regular(folder)
    options = ocp.Context()
    # Weights hardly shrink by compression, which takes longer than all else that a save does.
    options.array.saving.use_compression = False
    # The form is checked, so that what is cut or filled up are rows of padding.
    options.array.loading.enable_padding_and_truncation = True
    # Several processes may be writing in two folders at once, and must not mix them up.
    options.multiprocessing.barrier_sync_key_prefix = folder.name
    options.asynchronous.post_finalization_callback = partial(_add_checksums, folder)
    newest = ocp.training.preservation_policies.LatestN(keep)
    try:
        return Folder(
            folder, context=options, preservation_policy=newest, cleanup_tmp_directories=True
        )
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"a checkpoint in {folder} is damaged ({textwrap.shorten(str(error), 120)}): delete "
            "the newest folder there and run again, or give another --workdir"
        ) from error


def _check_regular(folder: Path) -> None:
    """Raises CheckpointError for a named pipe or a device, on which Orbax would wait for ever."""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if path.exists() and not path.is_file():
                raise CheckpointError(
                    f"{path} is no regular file, as every file of a checkpoint is: delete the "
                    "checkpoint it lies in, or give another --workdir"
                )


@contextmanager
def open_both(folder: Path, rounds_done: int) -> Iterator[tuple[Folder, Folder]]:
    """The latest and the selected checkpoints of a workdir, without rounds still to come.

    When the block ends, the disk has them.

    Raises:
      CheckpointError: as `open_folder`.
      WorkdirError: as `settle`.
    """
    by_first(lambda: _delete_later(folder / "checkpoints", rounds_done))
    latest = open_folder(folder / "checkpoints" / "latest", keep=2)
    selected = open_folder(folder / "checkpoints" / "selected", keep=1)
    with _settled(latest), _settled(selected):
        yield latest, selected


def _delete_later(folder: Path, rounds_done: int) -> None:
    """Deletes the rounds that a killed run saved and this one will reach, and save, again."""
    _delete(path for path in _checkpoints(folder, "*") if int(path.name) > rounds_done)


def delete_earlier(folder: Path) -> None:
    """Deletes all but the newest of a workdir's latest checkpoints, and keeps the selected one.

    A run calls it before it writes its summary: more rounds start from the newest checkpoint, and
    the one before it was kept only in case that the newest one is damaged.

    Raises:
      WorkdirError: a checkpoint cannot be deleted.
    """
    _delete(sorted(_checkpoints(folder / "checkpoints", "latest"), key=lambda p: int(p.name))[:-1])


def _checkpoints(folder: Path, kind: str) -> Iterator[Path]:
    """The folders of checkpoints, whose names are the numbers of their rounds."""
    return (path for path in folder.glob(f"{kind}/*") if path.name.isdecimal())


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise WorkdirError(f"cannot delete {path} ({error.strerror})") from error


def steps(manager: Folder) -> list[int]:
    """Returns the rounds of which a folder holds a checkpoint, the oldest first."""
    return [one.step for one in manager.checkpoints]


@contextmanager
def _settled(manager: Folder) -> Iterator[None]:
    """Closes a folder, and waits until the disk has what is in it."""
    try:
        yield
        settle(manager)
    finally:
        with suppress(Exception):  # the fault of a save, which `settle` has raised
            manager.close()


def resume(
    folder: Path, start: Callable[[], PyTree], rounds: int, mesh: Mesh | None = None
) -> PyTree:
    """The state of a workdir's latest checkpoint, or `start()` where there is none.

    Args:
      folder: the workdir.
      start: makes the state before the first round.
      rounds: that have records; where they are too few for the latest checkpoint, the one before
        it is taken if they are enough for that.
      mesh: the devices over which the state's clients are shared out; None for one.

    Raises:
      CheckpointError: as `open_folder` and `restore`.
    """
    with open_folder(folder / "checkpoints" / "latest", keep=2) as latest:
        if found := by_first(lambda: steps(latest)):
            enough = [round for round in found if round <= rounds]
            return restore(latest, form_on(jax.eval_shape(start), mesh), max(enough or found))
    return start()


def saved(folder: Path) -> str:
    """A part of a sentence on the rounds of a workdir that have a checkpoint."""
    last = max((int(p.name) for p in _checkpoints(folder / "checkpoints", "latest")), default=0)
    return (
        f"rounds 1 to {last} are saved in {folder}"
        if last
        else f"no round is saved in {folder} yet"
    )


def save(manager: Folder, round: int, state: PyTree) -> None:
    """Saves `state` as `round`, in the background; a checkpoint of that round is replaced.

    Every device writes its own rows. On CPU, where what is written would be the buffers that the
    next round donates, they are copied first.

    Raises:
      WorkdirError: as `settle`, of this or of the save before.
    """
    settle(manager)
    with _faults_named(manager):
        state = jax.tree.map(_kept, state)
        _forms[Path(manager.directory)] = _FORM.format(_form(state))
        again = round in steps(manager)
        manager.save_async(round, state, checkpointable_name=_ITEM, force=True, overwrite=again)


def _kept(leaf: Any) -> Any:
    """What a save reads of a leaf while the run goes on; from accelerators Orbax copies itself."""
    if isinstance(leaf, jax.Array):
        return jnp.copy(leaf) if on_cpu() else leaf
    return np.array(leaf)


def settle(manager: Folder) -> None:
    """Waits until the disk has what was saved.

    Raises:
      WorkdirError: it could not be written; no part of it is left behind.
    """
    with _faults_named(manager):
        manager.wait()
        sync(Path(manager.directory))


@contextmanager
def _faults_named(manager: Folder) -> Iterator[None]:
    """Turns what a failing save raises, of any kind, into a sentence."""
    folder = Path(manager.directory)
    try:
        yield
    except Exception as error:
        for left in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        if jax.process_count() > 1 and re.search("Gloo|heartbeat|coordination", str(error)):
            raise WorkdirError(
                f"cannot save a checkpoint in {folder}, because another process is lost: give the "
                "same command to continue from the last checkpoint"
            ) from error
        raise WorkdirError(
            f"cannot save a checkpoint in {folder} ({_reason(error)}): make room there or make it "
            "writable and give the same command to go on"
        ) from error


def _reason(error: Exception) -> str:
    """The error in a few words: the system's, where it stands behind others."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    found = re.search(
        r"No space left on device|Read-only file system|Disk quota exceeded|File too large",
        str(error),
    )
    return found[0] if found else textwrap.shorten(str(error) or repr(error), 120)


def restore(manager: Folder, like: PyTree, round: int | None = None) -> PyTree:
    """Reads the checkpoint of a round (by default the newest).

    Args:
      manager: an open folder.
      like: a tree of arrays or of `jax.ShapeDtypeStruct`, of the structure that was saved, whose
        leaves say by their `sharding` where they shall lie; by default on this process's first
        device. Rows of padding of a federation's state, which follow from its devices, may be
        more or fewer than were saved.
      round: one of `steps(manager)`.

    Raises:
      CheckpointError: there is none, it is damaged, or it holds other arrays.
    """
    if not (found := steps(manager)):
        raise CheckpointError(f"no checkpoint in {manager.directory}: train first")
    round = found[-1] if round is None else round
    folder = Path(manager.directory) / str(round)
    device = SingleDeviceSharding(jax.local_devices()[0])

    def there(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or device
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    like = jax.tree.map(there, like)
    other = by_first(lambda: _other_form(manager, round, like))
    if other:
        raise CheckpointError(
            f"the checkpoint {folder} is of another model, method or sharing rule ({other}): give "
            "the code and the keys of the run's first start to go on, or another --workdir"
        )
    try:
        reason = by_first(lambda: _fault(folder, like))
        if not reason:
            return _loaded(manager, round, like)
    except Exception as error:  # Orbax raises many kinds.
        reason = _shortened(error)
    raise CheckpointError(
        f"the checkpoint {folder} is damaged or of another model ({reason}): delete that folder "
        "and run again to go on from an earlier checkpoint or from the start"
    )


def _fault(folder: Path, like: PyTree) -> str:
    """Why a checkpoint cannot be read as a tree of this form; "" where it can."""
    try:
        if _read_checksums(folder)[0] != _FORM.format(_form(like)):
            return "its arrays have other names, shapes or dtypes"
        return "" if is_whole(folder) else "its checksums do not match"
    except (OSError, ValueError) as error:
        return _shortened(error)


def names_and_shapes(manager: Folder, round: int) -> PyTree:
    """Returns a checkpoint's tree of nested dicts, whose leaves have shape and dtype."""
    return manager.checkpointables_metadata(round).metadata[_ITEM]


def all_arrays(folder: Path) -> PyTree:
    """Returns all arrays of a checkpoint, in nested dicts, on this process's first device.

    Raises:
      CheckpointError: it is damaged.
    """
    if not is_whole(folder):
        raise CheckpointError(f"the checkpoint {folder} is damaged (its checksums do not match)")
    device = SingleDeviceSharding(jax.local_devices()[0])
    with open_folder(folder.parent, keep=2) as manager:
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
            names_and_shapes(manager, int(folder.name)),
        )
        return _loaded(manager, int(folder.name), like)


def _loaded(manager: Folder, round: int, like: PyTree) -> PyTree:
    """The arrays of a checkpoint in the dtypes of `like`.

    Orbax reads in threads of its own, which the context `jax.enable_x64` of this one does not
    reach: they would make float32 of float64.
    """
    here = jax.config.jax_enable_x64
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: jax.config.jax_enable_x64).result()
    jax.config.update("jax_enable_x64", here)
    try:
        return manager.load(round, like, checkpointable_name=_ITEM)
    finally:
        jax.config.update("jax_enable_x64", elsewhere)


def _other_form(manager: Folder, round: int, like: PyTree) -> str:
    """How a checkpoint's leaves differ from a tree's in names or shapes; "" for none."""
    try:
        if _read_checksums(Path(manager.directory) / str(round))[0] == _FORM.format(_form(like)):
            return ""
        theirs, ours = _shapes(names_and_shapes(manager, round)), _shapes(like)
    except Exception:  # damaged, as `_fault` says
        return ""
    one_side = sorted(theirs.keys() ^ ours.keys())
    if not one_side:
        # Rows of padding do not count.
        rows = {name: name.startswith(("personal/", "memory/")) for name in ours}
        differ = (n for n in sorted(ours) if theirs[n][rows[n] :] != ours[n][rows[n] :])
        name = next(differ, "")
        return f"{name} is {theirs[name]} there and {ours[name]} now" if name else ""
    name = one_side[0]
    part, _, leaf = name.partition("/")
    other = {"shared": "personal", "personal": "shared"}.get(part)
    if f"{other}/{leaf}" in (ours if name in theirs else theirs):
        was, now = (part, other) if name in theirs else (other, part)
        return f"{leaf} was {was} there and is {now} now, by the rule that says what is shared"
    return f"{name} is only {'there' if name in theirs else 'here'}"


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every leaf of a state, that of a population too."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves
    }
    return {name.removeprefix("state/"): shape for name, shape in found.items()}


def _shortened(error: Exception) -> str:
    return textwrap.shorten(str(error) or repr(error), 120)


def _form(state: PyTree) -> str:
    """SHA-256 in hex over paths, shapes and dtypes of all leaves, without rows of padding."""
    leaves = jax.tree.leaves_with_path(without_padding(state))
    text = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
    return hashlib.sha256(repr(text).encode()).hexdigest()


def _add_checksums(folder: Path) -> None:
    """Adds the checksums to a checkpoint whose files are written, before Orbax commits it.

    The disk has all that they speak of before the checkpoint gets its name.
    """
    for place in folder.iterdir():
        # Names that are numbers have been committed, or a killed run was deleting them.
        if place.is_dir() and not place.name.isdecimal():
            (place / CHECKSUMS).write_text(f"{_forms[folder]}\n{_checksums(place)}")
            for path in (*place.rglob("*"), place):
                sync(path)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's files are those of its checksums."""
    return (folder / CHECKSUMS).exists() and _read_checksums(folder)[1] == _checksums(folder)


def _read_checksums(folder: Path) -> tuple[str, str]:
    """The form in the first line, and the checksums below it."""
    form, _, sums = read_text(folder / CHECKSUMS).partition("\n")
    return form, sums


def _checksums(folder: Path) -> str:
    """A line for every file of the arrays; Orbax still writes to its own files beside them."""
    files = (path for path in sorted(folder.glob("*/**/*")) if path.is_file())
    return "".join(f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in files)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
