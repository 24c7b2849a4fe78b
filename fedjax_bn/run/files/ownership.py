"""One process owns a workdir while it writes there."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.files.workdir import faults_named, write_json

LOCK, OWNER = ".lock", ".owner.json"  # hidden: a folder that holds only these is still unused
PATIENCE = 30.0  # seconds that a report or an evaluation waits for another one's files


@contextmanager
def owned(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the owner of a folder, which is made where there is none.

    The lock is the kernel's (flock), not the presence of a file: it ends with the process, however
    that ends, and on NFS it holds between hosts. Only where a file system has no flock does
    filelock fall back to a file, which a kill on another host leaves behind. The file `.lock`
    stays; to remove it would let two processes lock two files of that name.

    Args:
      folder: the workdir.
      wait: for another owner, at most `PATIENCE` seconds.

    Raises:
      WorkdirError: another process owns the folder, or it cannot be written to.
    """
    with faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=PATIENCE if wait else 0)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout as error:
            raise WorkdirError(_refusal(folder, lock)) from error
    try:
        write_json(folder / OWNER, {"host": socket.gethostname(), "pid": os.getpid()})
        yield
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def owner_of(folder: Path) -> str:
    """Who owns a folder now, such as "process 7 on HOST"; "" where nobody does."""
    if not (folder / OWNER).exists():
        return ""
    try:
        with FileLock(folder / LOCK, timeout=0):
            return ""  # whoever wrote its name there was killed
    except Timeout:
        return _name(folder)


def _name(folder: Path) -> str:
    """What the owner of a folder wrote of itself."""
    try:
        owner = json.loads((folder / OWNER).read_text())
        return f"process {int(owner['pid'])} on {str(owner['host'])[:80]!s}"
    except (OSError, ValueError, TypeError, KeyError):  # it has not written its name yet
        return "another process"


def _refusal(folder: Path, lock: FileLock) -> str:
    """One sentence on who owns the folder."""
    left = f" (or, if it is gone, delete {folder / LOCK})" if isinstance(lock, SoftFileLock) else ""
    return (
        f"{folder} is in use by {_name(folder)}, which writes there: wait until it has ended{left}"
        ", or give another --workdir"
    )
