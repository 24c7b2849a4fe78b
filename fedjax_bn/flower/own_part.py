"""What stays with a client, in its own folder: personal leaves and the memory of its method.

    FOLDER/FEDERATION/own-00000007.npz     behind its round 7, named arrays, each with a checksum

A file is written beside its place and renamed, so that a kill at any moment leaves the one before
it whole. The one that the client began its last round with is kept beside the new one: where the
server never got the upload, or did not take it, the client begins there again.
"""

import io
import zipfile
from pathlib import Path

import numpy as np

from fedjax_bn.engine.named_arrays import from_named, to_named
from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.files.workdir import write_atomically
from fedjax_bn.state import Own

_NAME = "own-{:08d}.npz"


def load(folder: Path, number: int, like: Own) -> Own:
    """A client's own part behind so many rounds.

    Args:
      folder: of one federation.
      number: rounds finished, at least 1.
      like: its form.

    Raises:
      WorkdirError: it is not there, damaged, or of another form.
    """
    path = folder / _NAME.format(number)
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return from_named(dict(arrays), like)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise WorkdirError(
            f"the own part of this client behind round {number} is not in {path} "
            f"({getattr(error, 'strerror', None) or error}): give back that folder as it was, or "
            "begin a new federation in another workdir of the server"
        ) from error


def save(folder: Path, number: int, own: Own, began: int) -> None:
    """Keeps a client's own part behind so many rounds, and the one that it began with.

    Args:
      folder: of one federation.
      number: rounds finished.
      own: what stays with the client.
      began: the number of the part that it began with; 0 for the common start.

    Raises:
      WorkdirError: the folder cannot be written to.
    """
    content = io.BytesIO()
    np.savez(content, **to_named(own))
    write_atomically(folder / _NAME.format(number), content.getvalue())
    for path in folder.glob(_NAME.replace("{:08d}", "*")):
        # Those behind it stay: a task that was held up may end after one of a later round.
        if path.name < _NAME.format(began):
            path.unlink(missing_ok=True)
