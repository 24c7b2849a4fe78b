"""Orbax checkpoints of a run: its latest rounds, and the round selected by validation.

A checkpoint holds checksums of its files. So damage is found before Orbax reads, which does not
notice a flipped bit, and whose parallel readers print tracebacks of what they do notice.
"""

import hashlib
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from fedjax_bn.run.errors import CheckpointError

PyTree = Any
CHECKSUMS = "SHA256SUMS"  # in a checkpoint's folder, as `sha256sum --check` reads them


def open_folder(folder: Path, keep: int) -> ocp.CheckpointManager:
    """Opens (and makes) a folder of checkpoints that keeps the `keep` newest.

    Raises:
      CheckpointError: a checkpoint in it is damaged so that the folder cannot be listed.
    """
    folder = folder.absolute()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=partial(_add_checksums, folder)),
    )
    try:
        return ocp.CheckpointManager(folder, options=options)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"a checkpoint in {folder} is damaged ({textwrap.shorten(str(error), 120)}): delete "
            "the newest folder there and run again, or give another --workdir"
        ) from error


def open_both(folder: Path, rounds_done: int) -> tuple[ocp.CheckpointManager, ...]:
    """The latest and the selected checkpoints of a workdir, without rounds still to come."""
    latest = open_folder(folder / "checkpoints" / "latest", keep=2)
    selected = open_folder(folder / "checkpoints" / "selected", keep=1)
    for round in selected.all_steps():
        if round > rounds_done:  # of a killed run; it will be reached, and saved, again
            selected.delete(round)
    return latest, selected


def resume(folder: Path, start: Callable[[], PyTree]) -> PyTree:
    """The state of a workdir's latest checkpoint, or `start()` where there is none.

    Raises:
      CheckpointError: as `open_folder` and `restore`.
    """
    with open_folder(folder / "checkpoints" / "latest", keep=2) as latest:
        if latest.all_steps():
            return restore(latest, jax.eval_shape(start))
    return start()


def save(manager: ocp.CheckpointManager, round: int, state: PyTree) -> None:
    """Saves `state` as `round`, in the background; a checkpoint of that round is replaced.

    The state is copied first, because the next round donates its buffers.
    """
    if round in manager.all_steps():
        manager.wait_until_finished()
        manager.delete(round)
    state = jax.tree.map(np.array, state)
    about = {"form": _form(state)}
    manager.save(round, args=ocp.args.StandardSave(state), custom_metadata=about)


def restore(manager: ocp.CheckpointManager, like: PyTree, round: int | None = None) -> PyTree:
    """Reads the checkpoint of a round (by default the newest).

    Args:
      manager: an open folder.
      like: a tree of arrays or of `jax.ShapeDtypeStruct`, of the structure that was saved.
      round: one of `manager.all_steps()`.

    Raises:
      CheckpointError: there is none, it is damaged, or it holds another model.
    """
    round = manager.latest_step() if round is None else round
    if round is None:
        raise CheckpointError(f"no checkpoint in {manager.directory}: train first")
    folder = Path(manager.directory) / str(round)
    device = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like)
    try:
        about = manager.metadata(round).custom_metadata or {}
        if about.get("form") != _form(like):
            reason = "its arrays have other names or shapes"
        elif _checksums(folder) != (folder / CHECKSUMS).read_text():
            reason = "its checksums do not match"
        else:
            return manager.restore(round, args=ocp.args.StandardRestore(like))
    except Exception as error:  # Orbax raises many kinds.
        reason = textwrap.shorten(str(error) or repr(error), 120)
    raise CheckpointError(
        f"the checkpoint {folder} is damaged or of another model ({reason}): delete that folder "
        "and run again to go on from an earlier checkpoint or from the start"
    )


def _form(state: PyTree) -> str:
    """SHA-256 in hex over paths, shapes and dtypes of all leaves."""
    leaves = jax.tree.leaves_with_path(state)
    text = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
    return hashlib.sha256(repr(text).encode()).hexdigest()


def _add_checksums(folder: Path) -> None:
    """Adds the checksums to a checkpoint whose files are written, before Orbax commits it."""
    for place in folder.iterdir():
        if place.is_dir() and not (place / CHECKSUMS).exists():
            (place / CHECKSUMS).write_text(_checksums(place))


def _checksums(folder: Path) -> str:
    """A line for every file of the arrays; Orbax still writes to its own files beside them."""
    files = (path for path in sorted(folder.glob("*/**/*")) if path.is_file())
    return "".join(f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in files)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
