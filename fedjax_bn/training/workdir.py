"""Writes and reads the files of a run, and describes its machine.

A file is written beside its place, synced to the disk, and then renamed. Lines of metrics.jsonl are
appended, and synced before a checkpoint depends on them (`sync`). So after a power cut the files
from which a run continues are whole, and later lines and checkpoints are dropped.
"""

import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from fedjax_bn import __version__
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.data.sets.files import names_in_npz, read_npz
from fedjax_bn.engine.devices import cpu_cores

Record = dict[str, Any]  # the content of a JSON file: of a round, a run or an evaluation

# The keys that readers need of a run's files.
CLAIM = ("config", "data")
FINISHED = (*CLAIM, "form")
SUMMARY = ("method", "dataset", "seed", "rounds", "selected_round", "accuracy", "last_round")
DATA = ("classes", "clients", "unseen", "boxes", "number")

# What of a machine the last bits of a run's results depend on.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# On these depends every random number, so a run cannot continue with others.
RANDOM = ("default_prng_impl", "random_seed_offset", "threefry_partitionable")
_OPTIONS = ("enable_x64", "default_matmul_precision", "disable_most_optimizations", *RANDOM)
_VARIABLES = ("XLA_FLAGS", "NPROC")  # NPROC is the number of threads that XLA uses on CPU
# XLA's compiler chooses its vectors by these features, and its libraries their kernels.
_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


@contextmanager
def faults_named(place: Path | str) -> Iterator[None]:
    """Raises WorkdirError, with a message for the user, if the system refuses a write."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise WorkdirError(
            f"cannot write to {place} ({reason}): make room or make it writable, and give the same "
            "command to continue, or use another --workdir"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see all of it or nothing, also after a kill or a power cut."""
    data = content.encode() if isinstance(content, str) else content
    # Only the owner of a workdir writes there (`ownership.owned`), so the temporary name is free.
    partial = path.with_name(f".{path.name}.partial")
    with faults_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


def write_picture(path: Path, draw: Callable[[], bytes]) -> None:
    """Writes what `draw()` returns; after a fault there is a warning, and no picture."""
    try:
        write_atomically(path, draw())
    except Exception as error:  # matplotlib may fail in any way, and no run depends on pictures
        with suppress(OSError):
            path.unlink(missing_ok=True)
        warnings.warn(f"the picture {path} is not drawn ({error!r})", stacklevel=2)


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


@contextmanager
def _unreadable_named(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorkdirError(f"cannot read {path} ({reason}): {remedy}") from error


def read_json(path: Path, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a JSON file of a run; WorkdirError if damaged, without a key, or of another version."""
    with _unreadable_named(path, "move its folder away or give another --workdir"):
        content = dict(json.loads(path.read_text("utf-8-sig")))
        writer = content.get("versions", {}).get("fedjax_bn", __version__)
        if writer != __version__:
            raise ValueError(f"version {writer} of fedjax_bn wrote it, and this is {__version__}")
        if missing := [key for key in needs if key not in content]:
            raise ValueError(f"it has no {missing[0]!r}")
    return content


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz that a report shows; WorkdirError if it is damaged."""
    with _unreadable_named(path, "move it away, and the report leaves it out"):
        return read_npz(path, names_in_npz(path))


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
    """Returns the records of the first `rounds` rounds; WorkdirError if one of them is missing."""
    records = _records(path)
    if missing := [number for number in range(1, rounds + 1) if number not in records]:
        raise WorkdirError(
            f"{path} has no line of round {missing[0]} of the {rounds} saved: use another --workdir"
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
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            records.setdefault(int(record["round"]), record)
    return records


def describe_machine() -> dict[str, Any]:
    """Returns versions, devices, and all else that affects how sums are ordered and rounded."""
    devices = jax.devices()
    path = Path("/proc/cpuinfo")  # only Linux has it; elsewhere the features are unknown
    lines = path.read_text().splitlines() if path.exists() else []
    about = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    flags = about.get("flags", about.get("Features", "")).split()
    return {
        "versions": {"fedjax_bn": __version__, "python": platform.python_version()}
        | {name: version(name) for name in _PACKAGES},
        "devices": [str(device) for device in devices],
        "machine": {
            "backend": jax.default_backend(),
            "device_kind": devices[0].device_kind,
            "architecture": platform.machine(),
            "cpu": about.get("model name", platform.processor()),
            "cpu_features": [feature for feature in _FEATURES if feature in flags],
            "cores": cpu_cores(),  # among which XLA splits a sum, which determines its order
            "options": {name: jax.config.values[f"jax_{name}"] for name in _OPTIONS},
            "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        },
    }


def difference(folder: Path, about: dict[str, Any]) -> str:
    """Returns a message on what of `describe_machine` has changed since a run began, or ""."""
    recorded, current = _facts_of(read_json(folder / "config.json")), _facts_of(about)
    changes = [
        f"{name} ({recorded[name]!r} there, {current[name]!r} now)"
        for name in sorted(recorded.keys() & current.keys())
        if recorded[name] != current[name]
    ]
    message = f"{folder} began with other values of {', '.join(changes)}; from here on its last "
    return f"{message}bits may differ from those of a run without a stop" if changes else ""


def _facts_of(about: Record) -> dict[str, Any]:
    groups = {name: about[name] for name in ("versions", "devices") if name in about}
    return flatten_dict(groups | about.get("machine", {}), sep=".")
