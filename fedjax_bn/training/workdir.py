"""Writes and reads the files of a run.

A file is written beside its place, synced to the disk, and then renamed. Lines of metrics.jsonl are
appended, and synced before a checkpoint depends on them (`sync`). So after a power cut the files
from which a run continues are whole, and later lines and checkpoints are dropped.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn import __version__
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.data.sets.files import names_in_npz, read_npz

Record = dict[str, Any]  # the content of a JSON file: of a round, a run or an evaluation

# The keys that readers need of a run's files.
CLAIM = ("config", "data")
FINISHED = (*CLAIM, "form")
SUMMARY = ("method", "dataset", "seed", "rounds", "selected_round", "accuracy", "last_round")
DATA = ("classes", "clients", "unseen", "boxes", "number")


@contextmanager
def faults_named(place: Path | str) -> Iterator[None]:
    """Raises WorkdirError, with a message for the user, if the system refuses a write."""
    try:
        yield
    except OSError as error:
        raise WorkdirError(
            f"cannot write to {place} ({error.strerror or error}): make room there or make it "
            "writable and give the same command to continue, or give another --workdir"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see all of it or nothing, also after a kill or a power cut.

    Only the owner of a workdir writes there (`ownership.owned`), so the temporary name is free, and
    a file of that name that a kill left is overwritten. WorkdirError: no part of the file stays.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    with faults_named(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_picture(path: Path, draw: Callable[[], bytes]) -> None:
    """Writes what `draw()` returns; a fault, also of the disk, is a warning with path and reason.

    No run depends on its pictures, and what matplotlib draws of a user's data may fail in any way.
    After a fault there is no picture, also none of an earlier time.
    """
    try:
        write_atomically(path, draw())
    except Exception as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the picture {path} is not drawn ({reason})", stacklevel=2)


def sync(path: Path) -> None:
    """Waits until the disk has a file's content, or a folder's names."""
    with faults_named(path):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a JSON file of a run, which must have the keys that it `needs`.

    Raises:
      WorkdirError: the file is missing or damaged, lacks a key, or is of another version.
    """
    try:
        content = dict(json.loads(path.read_text("utf-8-sig")))
        if missing := [key for key in needs if key not in content]:
            raise ValueError(f"it has no {missing[0]!r}")
        version = content.get("versions", {}).get("fedjax_bn", __version__)
    except (OSError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise WorkdirError(
            f"cannot read {path} ({getattr(error, 'strerror', None) or error}): move that folder "
            "away or give another --workdir"
        ) from error
    if version != __version__:
        raise WorkdirError(
            f"{path} was written by version {version} of fedjax_bn, and this is {__version__}: use "
            "that version, or give another --workdir"
        )
    return content


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz that a report shows; WorkdirError if it is damaged."""
    try:
        return read_npz(path, names_in_npz(path))
    except (OSError, ValueError) as error:
        raise WorkdirError(
            f"cannot read {path} ({getattr(error, 'strerror', None) or error}): move it away, and "
            "the report leaves it out"
        ) from error


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON line, or no part of it; `sync` waits until the disk has it."""
    data = (json.dumps(record) + "\n").encode()
    with faults_named(path), open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:  # a disk that is nearly full writes a part of it
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def read_lines(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns the records of the first `rounds` rounds, without later or torn lines.

    Raises:
      WorkdirError: lines of those rounds are missing.
    """
    records = _records(path)
    if missing := [number for number in range(1, rounds + 1) if number not in records]:
        raise WorkdirError(
            f"{path} has no line of round {missing[0]} of the {rounds} that the checkpoint has: "
            f"move {path.parent} away and start again, or give another --workdir"
        )
    return [records[number] for number in range(1, rounds + 1)]


def rounds_recorded(path: Path) -> int:
    """Returns how many rounds have lines, from round 1 to the first gap."""
    records = _records(path)
    return next(number for number in range(len(records) + 1) if number + 1 not in records)


def keep_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Rewrites a file of lines if its lines differ from these records."""
    content = "".join(json.dumps(record) + "\n" for record in records)
    if path.exists() and path.read_bytes() != content.encode():
        write_atomically(path, content)


def _records(path: Path) -> dict[int, dict[str, Any]]:
    """Returns round -> its record, by the first of its lines."""
    records: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        # A power cut may leave a part of a line.
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            record = json.loads(line)
            records.setdefault(int(record["round"]), record)
    return records
