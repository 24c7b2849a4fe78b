"""Files of a client that takes part over Flower, in a folder of its own.

    FOLDER/FEDERATION/own-00000007.npz     its own part after round 7, named arrays: its personal
                                           leaves and the memory of its method
    FOLDER/FEDERATION/frozen.npz           the frozen leaves, if there are any
    FOLDER/FEDERATION/predictions.csv      of the last evaluation, if the node config asks for it
    FOLDER/FEDERATION/begun.npz            a round's training up to a step, see `train_in_pieces`

Files are written atomically. The file with which the client began its last round is kept too: if
the server did not accept the upload, the client begins with it again.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from logging import INFO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.common.logger import log

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.client import Begun, Trained
from fedjax_bn.engine.named_arrays import from_named, to_named
from fedjax_bn.federation import Own
from fedjax_bn.training.workdir import write_atomically

_OWN = "own-{:08d}.npz"
PyTree = Any


def train_in_pieces(
    take_steps: Callable[[Begun], Trained], every: int, path: Path, digest: np.ndarray
) -> Begun:
    """Makes a client's local steps of a round, and stores the training after every `every` steps.

    It goes on from the training in the file, unless that has another digest u8[N] of all on which
    the round depends, or cannot be read. `take_steps` is `FederatedMethod.train` of its last
    argument.
    """
    like = jax.eval_shape(take_steps, Begun())
    steps, trained, step = len(like.counts), None, np.zeros((), np.int32)
    with suppress(WorkdirError):
        stored = load_arrays(path, {"digest": digest, "begun": Begun(like, step)})
        if (stored["digest"] == digest).all():
            trained, step = stored["begun"]
            log(INFO, "going on from step %s of %s of the round, by %s", step, steps, path)
    # Always from the host, so that a training from the file runs in the same program.
    trained = trained or jax.device_get(take_steps(Begun()))
    while step < steps:
        trained = jax.device_get(take_steps(Begun(trained, step)))
        step = np.asarray(min(step + every, steps), np.int32)
        save_arrays(path, {"digest": digest, "begun": Begun(trained, step)})
    return Begun(trained)


def digest_of_round(settings: Any, inputs: PyTree) -> np.ndarray:
    """Returns the SHA-256 u8[32] of settings, as JSON, and of the names and bits of arrays."""
    content = hashlib.sha256(json.dumps(settings).encode())
    for name, array in to_named(inputs).items():
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return np.frombuffer(content.digest(), np.uint8)


def load_own(folder: Path, number: int, like: Own) -> Own:
    """Returns a client's own part after `number` rounds (at least 1) from a federation's folder.

    Raises WorkdirError if the file is missing, damaged, or of another form than `like`.
    """
    return load_arrays(folder / _OWN.format(number), like)


def save_own(folder: Path, number: int, own: Own, began: int) -> None:
    """Writes a client's own part after `number` rounds, and deletes those before round `began`."""
    save_arrays(folder / _OWN.format(number), own)
    for path in folder.glob(_OWN.replace("{:08d}", "*")):
        # Later parts stay, because a delayed task may end after the task of a later round.
        if path.name < _OWN.format(began):
            path.unlink(missing_ok=True)


def save_arrays(path: Path, tree: PyTree) -> None:
    """Writes a tree as named arrays."""
    content = io.BytesIO()
    np.savez(content, **to_named(tree))
    write_atomically(path, content.getvalue())


def load_arrays(path: Path, like: PyTree) -> Any:
    """Returns the tree of a file; WorkdirError if it is missing, damaged or not of this form."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return from_named(dict(arrays), like)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        remedy = "restore it, or begin anew in another workdir"
        raise WorkdirError(f"cannot read {path} ({error}): {remedy}") from error
