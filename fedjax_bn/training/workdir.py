"""Writes and reads the files of a run, and defines the forms of their JSON.

A file is written beside its place, synced to the disk, and then renamed. Lines of metrics.jsonl are
appended, and synced before a checkpoint depends on them (`sync`). So after a power cut the files
from which a run continues are whole, and later lines and checkpoints are dropped. Edited or damaged
JSON is refused with an error message.
"""

import json
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.data.regular_files import Refused, read_regular, read_text
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz

Record = dict[str, Any]  # the content of a JSON file: of a round, a run or an evaluation
_MOST_LINES = 2**30  # bytes of metrics.jsonl
_OF_CLIENTS = {"loss", "weights", "accuracy", "validation", "unseen", "mask_l1"}  # by client
_WRITING = RLock()  # held while a file is written, so that a process can end between two writes

# The form of a JSON value: a _Kind, a list of one form, or a dict from key to form. A key that ends
# with "?" may be missing; "*" means any further names.
Form = Any


class _Kind(NamedTuple):
    """What a single value must be."""

    word: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """Returns whether it is a float, NaN (a client without samples) included, or a 64-bit int."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


_ANY = _Kind("anything", lambda value: True)
TEXT = _Kind("text", lambda value: type(value) is str)
NUMBER = _Kind("a number", _is_number)
_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_OR_NOTHING = _Kind("a number or null", lambda value: value is None or _is_number(value))
_COUNT = _Kind("a whole number above 0", lambda value: type(value) is int and 0 < value < 2**31)
_INDEX = _Kind("a whole number", lambda value: type(value) is int and 0 <= value < 2**31)
_MANY = _Kind("a whole number", lambda value: type(value) is int and 0 <= value < 2**63)  # pixels
_ACCURACY = {"mean": NUMBER, "*": NUMBER}
_UNSEEN = {"*": {"*": NUMBER}}
_MEASURES = {"*": {"*": _OR_NOTHING}}  # of internal clients
_UNSEEN_MEASURES = {"*": _MEASURES}
_BOTH = {"internal": _ACCURACY, "unseen": _UNSEEN}
_OBJECT = {"*": _ANY}

CLAIM = {
    "config": _OBJECT,
    "data": TEXT,
    "notes?": [TEXT],
    "versions?": {"*": TEXT},
    "devices?": [TEXT],
    "machine?": _OBJECT,
    "started_in?": TEXT,
    "*": _ANY,
}
FINISHED = CLAIM | {
    "form": {
        "dataset": TEXT,
        "clients": [TEXT],
        "num_classes": _COUNT,
        "shape": [_COUNT],
        "dtype": TEXT,
        "mean": [NUMBER],
        "std": [NUMBER],
        "classes?": [TEXT],
        "boxes?": _COUNT,
        "masks?": [TEXT],
    }
}
SUMMARY = {
    "method": TEXT,
    "dataset": TEXT,
    "seed": NUMBER,
    "rounds": _COUNT,
    "selected_round": _COUNT,
    "accuracy": _BOTH,
    "last_round": _BOTH,
    "seconds_per_round": NUMBER,
    "compile_seconds": NUMBER,
    "samples_per_second": NUMBER,
    "score?": TEXT,
    "measures?": {"internal": _MEASURES, "unseen": _UNSEEN_MEASURES},
    "traffic?": {"*": NUMBER},
    "*": _ANY,
}
_SPLIT = {"samples": _INDEX, "classes": [_MANY]}
DATA = {
    "classes": [TEXT],
    "clients": {"*": {"train": _SPLIT, "validation?": _SPLIT, "test": _SPLIT}},
    "unseen": {"*": {"test": _SPLIT}},
    "boxes": _FLAG,
    "masks?": _FLAG,
    "number": _COUNT,
}
_RECORD = {
    "round": _COUNT,
    "loss": {"*": _OR_NOTHING},
    "weights": {"*": _OR_NOTHING},
    "seconds": NUMBER,
    "accuracy?": _ACCURACY,
    "validation?": _ACCURACY,
    "unseen?": _UNSEEN,
    "mask_l1?": _ACCURACY,
    "measures?": _MEASURES,
    "unseen_measures?": _UNSEEN_MEASURES,
    "norm?": {"*": _OR_NOTHING},
    "far_norms?": {"*": _OR_NOTHING},
    "not_finite?": [TEXT],
    "clients?": [_INDEX],
    "left_out?": {"*": TEXT},
    "refused?": {"*": TEXT},
    "*": _ANY,
}


def misfit(value: Any, form: Form, place: str = "it") -> str:
    """Returns what is wrong with a value read from JSON; "" if it has the form."""
    if isinstance(form, _Kind):
        return "" if form.holds(value) else f"{place} must be {form.word}"
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{place} must be a list"
        named = ((f"{place}[{i}]", one, form[0]) for i, one in enumerate(value))
    else:
        if not isinstance(value, dict):
            return f"{place} must be an object"
        keys = {key.rstrip("?") for key in form} - {"*"}
        missing = [key for key in form if key not in value and key[-1:] not in "?*"]
        if missing:
            return f"{place} has no {missing[0]!r}"
        further = form.get("*")
        named = (
            (f"{place}[{key[:40]!r}]", one, form.get(key, form.get(f"{key}?", further)))
            for key, one in value.items()
            if key in keys or further is not None
        )
    return next(filter(None, (misfit(one, of, name) for name, one, of in named)), "")


@contextmanager
def no_write_under_way(seconds: float) -> Iterator[None]:
    """Waits at most `seconds` until no file is being written, and lets no new write start."""
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
    """Writes a file so that readers see all of it or nothing, also after a kill or a power cut.

    Only the owner of a workdir writes there (`ownership.owned`), so the temporary name is free, and
    a file of that name that a kill left is overwritten.

    Raises:
      WorkdirError: the disk is full, or the folder cannot be written to; no part of the file stays.
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
      WorkdirError: the system cannot write it to the disk.
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


def read_json(path: Path, form: Form = _OBJECT) -> dict[str, Any]:
    """Reads a JSON file of a run, by default any object.

    Raises:
      WorkdirError: the file is missing, not a regular file, damaged, or of another form.
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
      WorkdirError: the file is damaged.
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
    """Appends one JSON line; `sync` waits until the disk has it.

    Raises:
      WorkdirError: the line could not be written; no part of it stays.
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

    def names(part: Any) -> Any:
        return {k: names(one) for k, one in part.items()} if isinstance(part, dict) else None

    for number in range(1, rounds + 1):
        record = records.get(number, {})
        # Clients' names may have been edited. Only parts that both records have are compared.
        both = _OF_CLIENTS & record.keys() & records.get(1, {}).keys()
        if not record or any(names(record[key]) != names(records[1][key]) for key in both):
            raise WorkdirError(
                f"{path} is damaged at round {number} of the {rounds} that the checkpoint has: "
                f"move {path.parent} away and start again, or give another --workdir"
            )
    return [records[number] for number in range(1, rounds + 1)]


def rounds_recorded(path: Path) -> int:
    """Returns how many rounds have lines, from round 1 to the first gap."""
    numbers = {record["round"] for record in _whole_lines(path)}
    return next(n for n in range(len(numbers) + 1) if n + 1 not in numbers)


def keep_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Rewrites a file of lines if its lines differ from these records."""
    lines = [json.dumps(record).encode() for record in records]
    if path.exists() and _lines_of(path) != lines:
        write_atomically(path, b"".join(line + b"\n" for line in lines))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of rounds, in the order of their lines."""
    found = []
    for line in _lines_of(path):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if not misfit(record, _RECORD):
                found.append(record)
    return found


def _lines_of(path: Path) -> list[bytes]:
    try:
        return read_regular(path, _MOST_LINES).splitlines() if path.exists() else []
    except (OSError, Refused) as error:
        raise WorkdirError(f"cannot read {path} ({error.strerror}): move it away") from error
