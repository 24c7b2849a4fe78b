"""Orbax checkpoints of a run: its latest rounds, and the round selected by validation."""

import contextlib
import gc
import hashlib
import io
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from fedjax_bn.run.errors import CheckpointError

PyTree = Any


def open_folder(folder: Path, keep: int) -> ocp.CheckpointManager:
    """Opens (and makes) a folder of checkpoints that keeps the `keep` newest.

    Raises:
      CheckpointError: a checkpoint in it is damaged so that the folder cannot be listed.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    try:
        return ocp.CheckpointManager(folder.absolute(), options=options)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"a checkpoint in {folder} is damaged ({textwrap.shorten(str(error), 120)}): delete "
            "the newest folder there and run again, or give another --workdir"
        ) from error


def save(manager: ocp.CheckpointManager, round: int, state: PyTree) -> None:
    """Saves `state` as `round`, in the background; a checkpoint of that round is replaced.

    The state is copied first, because the next round donates its buffers.
    """
    if round in manager.all_steps():
        manager.wait_until_finished()
        manager.delete(round)
    state = jax.tree.map(np.array, state)
    about = {"sha256": digest(state)}  # TensorStore does not notice a flipped bit
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
    device = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like)
    folder = manager.directory / str(round)
    with quiet():
        try:
            state = manager.restore(round, args=ocp.args.StandardRestore(like))
            about = manager.metadata(round).custom_metadata or {}
            if digest(state) == about.get("sha256"):
                return state
            reason = "its checksum does not match"
        except Exception as error:  # Orbax and TensorStore raise many kinds.
            reason = textwrap.shorten(str(error) or repr(error), 120)
        time.sleep(0.3)  # until the other readers have failed
        gc.collect()
    raise CheckpointError(
        f"the checkpoint {folder} is damaged or of another model ({reason}): delete that folder "
        "and run again to go on from an earlier checkpoint or from the start"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what readers of a damaged checkpoint print when another reader has already failed."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.unraisablehook = hook


def digest(state: PyTree) -> str:
    """SHA-256 in hex over forms and values of all leaves in order."""
    hashed = hashlib.sha256()
    for leaf in map(np.asarray, jax.tree.leaves(state)):
        hashed.update(repr((str(leaf.dtype), leaf.shape)).encode())
        hashed.update(np.ascontiguousarray(leaf).data)
    return hashed.hexdigest()
