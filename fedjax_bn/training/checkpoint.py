"""Saves and restores a run's Orbax checkpoints: its latest rounds, and the selected round.

Each has a file of checksums, because Orbax does not notice a flipped bit, and its parallel readers
print tracebacks of damage that they notice.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from itertools import chain
from pathlib import Path
from traceback import format_exception
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from fedjax_bn.arguments.errors import CheckpointError, WorkdirError
from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.training.mesh import form_on
from fedjax_bn.training.processes import by_first
from fedjax_bn.training.workdir import faults_named, sync

PyTree = Any
Folder = ocp.training.Checkpointer
CHECKSUMS = "SHA256SUMS"  # in a checkpoint's folder, as `sha256sum --check` reads them
_ITEM = "default"  # the part with the arrays; the name is that of Orbax's first interface


class _Literal(type(epath.Path())):  # type: ignore[misc]
    """A path whose own characters [, * and ? are no patterns."""

    def glob(self, pattern: str) -> Iterator["_Literal"]:
        return (self / name for name in glob(pattern, root_dir=self))


def open_folder(folder: Path, keep: int) -> Folder:
    """Opens (and makes) a folder of checkpoints that keeps the `keep` newest."""
    options, folder = ocp.Context(), folder.absolute()
    # Compression hardly shrinks weights, and takes longer than the rest of a save.
    options.array.saving.use_compression = False
    # `_difference` checks all other sizes, so only padding rows are cut or added.
    options.array.loading.enable_padding_and_truncation = True
    # Processes may save to two folders at once; the prefix keeps their barriers apart.
    options.multiprocessing.barrier_sync_key_prefix = folder.name
    options.asynchronous.post_finalization_callback = partial(_add_checksums, folder)
    with _damage_named(f"a checkpoint in {folder}"):
        return Folder(
            _Literal(folder),
            context=options,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )


@contextmanager
def open_both(folder: Path, rounds_done: int) -> Iterator[tuple[Folder, Folder]]:
    """Opens the latest and selected checkpoints of a workdir, and deletes those of later rounds."""
    latest, selected = places = folder / "checkpoints/latest", folder / "checkpoints/selected"
    # A killed run saved these rounds, and this one will reach and save them again.
    later = (path for path in chain(*map(_saved_in, places)) if int(path.name) > rounds_done)
    by_first(lambda: _delete(later))
    managers = open_folder(latest, keep=2), open_folder(selected, keep=1)
    try:
        yield managers
        for manager in managers:
            settle(manager)  # the disk has what was saved
    finally:
        for manager in managers:
            with suppress(Exception):  # `settle` has already raised the error of a save
                manager.close()


def delete_earlier(folder: Path) -> None:
    """Deletes the checkpoints of a finished run, except for its selected and its last round."""
    latest = _saved_in(folder / "checkpoints/latest")
    selected_rounds = [path.name for path in _saved_in(folder / "checkpoints/selected")]
    _delete(path for path in latest if path != latest[-1] or path.name in selected_rounds)


def _saved_in(place: Path) -> list[Path]:
    paths = (path for path in place.glob("*") if path.name.isdecimal())
    return sorted(paths, key=lambda path: int(path.name))


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        # Renamed first: a kill must not leave half a checkpoint under the name of a whole one.
        # Orbax deletes folders with such a name when it opens their parent.
        doomed = path.with_name(f"{path.name}.orbax-checkpoint-tmp")
        with faults_named(path):
            path.rename(doomed)
            sync(path.parent)
            shutil.rmtree(doomed)


def steps(manager: Folder) -> list[int]:
    """Returns the rounds that have a checkpoint in an open folder, the oldest first."""
    return [checkpoint.step for checkpoint in manager.checkpoints]


def latest_state(
    folder: Path, start: Callable[[], PyTree], rounds: int, mesh: Mesh | None = None
) -> PyTree:
    """Returns the state from which a run with records of `rounds` continues, or `start()`."""
    # A later checkpoint than the records is used only if `latest` has no earlier one. A finished
    # run whose last round was the selected one has only a selected checkpoint.
    for kind in ("latest", "selected"):
        with open_folder(folder / "checkpoints" / kind, keep=2) as manager:
            saved = by_first(partial(steps, manager))
            usable = [round for round in saved if round <= rounds]
            if kind == "latest":
                usable = usable or saved
            if usable:
                return restore(manager, form_on(jax.eval_shape(start), mesh), max(usable))
    return start()


def save(manager: Folder, round: int, state: PyTree) -> None:
    """Saves `state` as `round` in the background; raises as `settle`, also for the last save."""

    def without_donation(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf)
        # On CPU the files would be written from buffers that the next round donates. Orbax itself
        # copies the buffers of accelerators.
        return jnp.copy(leaf) if on_cpu() else leaf

    settle(manager)
    with _faults_named(manager):
        tree, exists = jax.tree.map(without_donation, state), round in steps(manager)
        manager.save_async(round, tree, checkpointable_name=_ITEM, force=True, overwrite=exists)


def settle(manager: Folder) -> None:
    """Waits until the disk has what was saved; WorkdirError, and no part of it, if it cannot."""
    with _faults_named(manager):
        manager.wait()
        sync(Path(manager.directory))


@contextmanager
def _faults_named(manager: Folder) -> Iterator[None]:
    folder = Path(manager.directory)
    try:
        yield
    except Exception as error:  # of many kinds
        for unfinished in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        # The system's own error may be the cause of Orbax's error, or a part of its text.
        numbers = errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES
        match = re.search("|".join(map(os.strerror, numbers)), "".join(format_exception(error)))
        raise WorkdirError(
            f"cannot save to {folder} ({match[0] if match else error}): make room or make it "
            "writable, and give the same command to continue"
        ) from error


@contextmanager
def _damage_named(checkpoint: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many kinds
        raise CheckpointError(
            f"{checkpoint} is damaged ({error}): delete that checkpoint and run again"
        ) from error


def restore(manager: Folder, like: PyTree, round: int | None = None) -> PyTree:
    """Reads the checkpoint of a round (by default the newest).

    `like` is a tree of arrays or of `jax.ShapeDtypeStruct`, with the structure that was saved. Each
    leaf is placed by its `sharding`, by default on this process's first device. CheckpointError:
    the checkpoint is damaged, or holds other arrays.
    """
    folder = Path(manager.directory) / str(steps(manager)[-1] if round is None else round)
    if difference := by_first(lambda: _difference(manager, folder, like)):
        raise CheckpointError(
            f"the checkpoint {folder} is of another model, method or sharing rule ({difference}): "
            "give the keys of the run's first start, or another --workdir"
        )
    with _damage_named(f"the checkpoint {folder}"):
        # By names, because Orbax describes named tuples and dataclasses as dicts.
        tree = _with_leaves(_form(manager, folder), like)
        return _with_leaves(like, _loaded(manager, folder, tree))


def all_arrays(folder: Path) -> PyTree:
    """Returns all arrays of a checkpoint, in nested dicts, on this process's first device."""
    with open_folder(folder.parent, keep=2) as manager, _damage_named(f"the checkpoint {folder}"):
        # Without the devices that saved them, which this process may not have.
        forms = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            _checked_form(manager, folder),
        )
        return _loaded(manager, folder, forms)


def _checked_form(manager: Folder, folder: Path) -> PyTree:
    """Returns a checkpoint's tree of nested dicts, whose leaves have shape and dtype."""
    sums = folder / CHECKSUMS
    if not sums.exists() or sums.read_text() != _checksums(folder):
        raise ValueError("its checksums do not match")
    return _form(manager, folder)


def _form(manager: Folder, folder: Path) -> PyTree:
    return manager.checkpointables_metadata(int(folder.name)).metadata[_ITEM]


def _loaded(manager: Folder, folder: Path, like: PyTree) -> PyTree:
    device = SingleDeviceSharding(jax.local_devices()[0])

    def placed(leaf: Any) -> Any:
        # Orbax's own description of a leaf has no `sharding`. NumPy's arrays stay on the host.
        spread = getattr(leaf, "sharding", None) or device
        is_on_host = isinstance(leaf, np.ndarray)
        return leaf if is_on_host else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spread)

    # Orbax reads in threads of its own, which do not see this thread's context `jax.enable_x64` and
    # would convert float64 to float32.
    context_x64 = jax.config.jax_enable_x64
    with ThreadPoolExecutor(1) as pool:
        thread_x64 = pool.submit(getattr, jax.config, "jax_enable_x64").result()
    jax.config.update("jax_enable_x64", context_x64)
    try:
        return manager.load(int(folder.name), jax.tree.map(placed, like), checkpointable_name=_ITEM)
    finally:
        jax.config.update("jax_enable_x64", thread_x64)


def _difference(manager: Folder, folder: Path, like: PyTree) -> str:
    """Returns how a checkpoint's leaves differ from those of a tree; "" if they do not."""

    def leaves(tree: PyTree) -> dict[str, str]:
        descriptions = {}
        for name, leaf in _by_name(tree).items():
            # The number of padding rows depends on the devices. `weights` has that of clients too.
            rows = name.removeprefix("state/").startswith(("personal/", "memory/"))
            descriptions[name] = f"{leaf.dtype}{[*leaf.shape[rows:]]}"
        return descriptions

    with _damage_named(f"the checkpoint {folder}"):
        saved, expected = leaves(_checked_form(manager, folder)), leaves(like)
    for name in sorted({*saved, *expected}):
        before, now = (shapes.get(name, "nothing") for shapes in (saved, expected))
        if before != now:
            return f"{name} is {before} there and {now} now"
    return ""


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Returns name, as `shared/params/kernel`, -> leaf."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _with_leaves(tree: PyTree, leaves: PyTree) -> PyTree:
    """Returns `tree` with the leaves of another tree that have the same names."""
    leaf_by_name = _by_name(leaves)
    return jax.tree.unflatten(jax.tree.structure(tree), map(leaf_by_name.get, _by_name(tree)))


def _add_checksums(folder: Path) -> None:
    """Adds checksums before Orbax commits a checkpoint, whose name comes after all on the disk."""
    for place in folder.iterdir():
        # Folders with numbers for names are committed already, or a killed run was deleting them.
        if place.is_dir() and not place.name.isdecimal():
            (place / CHECKSUMS).write_text(_checksums(place))
            for path in (*place.rglob("*"), place):
                sync(path)


def _checksums(folder: Path) -> str:
    """Returns a line for each file of the arrays, not for those that Orbax has yet to write."""
    lines = ""
    for path in filter(Path.is_file, sorted(folder.glob("*/**/*"))):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines += f"{digest}  {path.relative_to(folder)}\n"
    return lines
