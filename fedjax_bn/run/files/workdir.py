"""The files of a run, and the one way in which they are written and read.

A file is written beside its place, synced to the disk, and then renamed. Lines of metrics.jsonl are
appended, and synced before a checkpoint counts them (`sync`). So after a power cut the files from
which a run continues are whole, and later ones are dropped.
"""

import json
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from fedjax_bn.data.regular_files import Refused, read_regular, read_text
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.files.forms import OBJECT, RECORD, Form, misfit

Record = dict[str, Any]  # what a JSON file holds: of a round, a run, an evaluation
_MOST_LINES = 2**30  # bytes of metrics.jsonl
_WRITING = RLock()  # held while a file is written, so that a process can end between two writes


@contextmanager
def no_write_under_way(seconds: float) -> Iterator[None]:
    """Waits, for at most so many seconds, until no file is being written, and lets none start."""
    held = _WRITING.acquire(timeout=seconds)
    try:
        yield
    finally:
        if held:
            _WRITING.release()


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
    """Writes a file so that readers see all of it or nothing, whenever process or power ends.

    Only the owner of a workdir writes there (`ownership.owned`), so the name of the file that is
    not yet whole is free, and one that a kill left there is overwritten.

    Raises:
      WorkdirError: the disk is full, or the folder cannot be written to; no part of it stays.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    with _WRITING, faults_named(path):
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


def sync(path: Path) -> None:
    """Waits until the disk has a file's content, or a folder's names.

    Raises:
      WorkdirError: it could not be written.
    """
    with faults_named(path):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, form: Form = OBJECT) -> dict[str, Any]:
    """Reads a JSON file of a run, by default any object.

    Raises:
      WorkdirError: it is missing, no regular file, damaged, or of another form.
    """
    try:
        content = json.loads(read_text(path))
        if wrong := misfit(content, form):
            raise ValueError(wrong)
        return content
    except (OSError, ValueError, RecursionError) as error:
        remedy = "move that folder away or give another --workdir"
        raise WorkdirError(f"cannot read {path} ({_reason(error)}): {remedy}") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz that a report shows.

    Raises:
      WorkdirError: it is damaged.
    """
    try:
        return read_npz(path, names_in_npz(path))
    except (OSError, ValueError) as error:
        raise not_readable(path, error) from error


def not_readable(path: Path, why: Exception) -> WorkdirError:
    """Returns the error for a file that a report can do without."""
    return WorkdirError(
        f"cannot read {path} ({_reason(why)}): move it away, and the report leaves it out"
    )


def _reason(error: Exception) -> str:
    return textwrap.shorten(getattr(error, "strerror", None) or str(error), 120)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON line; `sync` waits for it.

    Raises:
      WorkdirError: it could not be written; no part of it stays.
    """
    data = (json.dumps(record) + "\n").encode()
    with _WRITING, faults_named(path), open(path, "ab", buffering=0) as file:
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
    records = {record["round"]: record for record in reversed(_whole_lines(path))}
    for number in range(1, rounds + 1):
        if number not in records or _other_names(records[number], records[1]):
            raise WorkdirError(
                f"{path} is damaged at round {number} of the {rounds} that the checkpoint has: "
                f"move {path.parent} away and start again, or give another --workdir"
            )
    return [records[number] for number in range(1, rounds + 1)]


def _other_names(record: dict[str, Any], first: dict[str, Any]) -> str:
    """Returns which part of a round's record has other names than the first record's, or ""."""

    def names(part: Any) -> Any:
        return {k: names(one) for k, one in part.items()} if isinstance(part, dict) else None

    for key in ("loss", "weights", "accuracy", "validation", "unseen", "mask_l1"):
        if key in record and key in first and names(record[key]) != names(first[key]):
            return key
    return ""


def rounds_recorded(path: Path) -> int:
    """Returns how many rounds have their lines, from the first on without a gap."""
    numbers = {record["round"] for record in _whole_lines(path)}
    return next(n for n in range(len(numbers) + 1) if n + 1 not in numbers)


def keep_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Rewrites a file of lines if it holds others than these records."""
    lines = [json.dumps(record).encode() for record in records]
    if path.exists() and _lines_of(path) != lines:
        write_atomically(path, b"".join(line + b"\n" for line in lines))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of rounds, in the order of their lines."""
    found = []
    for line in _lines_of(path):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if not misfit(record, RECORD):
                found.append(record)
    return found


def _lines_of(path: Path) -> list[bytes]:
    try:
        return read_regular(path, _MOST_LINES).splitlines() if path.exists() else []
    except (OSError, Refused) as error:
        raise WorkdirError(f"cannot read {path} ({error.strerror}): move it away") from error
