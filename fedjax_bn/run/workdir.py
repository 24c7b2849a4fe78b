"""The files of a run: config.json, metrics.jsonl, summary.json; written atomically."""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from fedjax_bn import __version__
from fedjax_bn.run.errors import WorkdirError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see all of it or nothing, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def describe_machine() -> dict[str, Any]:
    """Versions and devices, for the record."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "versions": {"fedjax_bn": __version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
        "devices": [str(device) for device in jax.devices()],
    }


# Where data are kept, and what is too large to be read, change no result.
_MAY_DIFFER = {"data.cache", "data.device_megabytes", "data.max_megapixels"}


def claim(workdir: Path, config: dict[str, Any], about: dict[str, Any]) -> None:
    """Makes a folder the workdir of one configuration, or checks that it is already.

    Args:
      workdir: the folder, new or of an earlier start of the same run.
      config: flat configuration, dotted key -> value; must be equal on every start, but for keys
        that change no result (`_MAY_DIFFER`).
      about: versions, devices and data, recorded at the first start; of it only "data" must be
        equal.

    Raises:
      WorkdirError: the folder holds a run of another configuration or of other data, or holds
        files that are no run's.
    """
    path = workdir / "config.json"
    new = json.loads(json.dumps({"config": config, **about}))
    if not path.exists():
        _check_unused(workdir)
        try:
            write_json(path, new)
        except OSError as error:
            raise WorkdirError(
                f"cannot write to {workdir} ({error}): give another --workdir"
            ) from error
        return
    old = read_json(path, ("config", "data"))
    keys = sorted({*old["config"], *new["config"]} - _MAY_DIFFER)
    changes = [
        f"{key} ({old['config'].get(key)!r} there, {new['config'].get(key)!r} now)"
        for key in keys
        if old["config"].get(key) != new["config"].get(key)
    ]
    if not changes and old["data"] != new["data"]:
        changes = ["the data themselves (their hash)"]
    if changes:
        raise WorkdirError(
            f"{workdir} belongs to a run of another configuration; these differ: "
            f"{', '.join(changes)}. Give another --workdir, or the old values to go on"
        )


def _check_unused(workdir: Path) -> None:
    """Raises WorkdirError if a workdir without config.json is a file or holds anything."""
    if workdir.exists() and not workdir.is_dir():
        raise WorkdirError(f"{workdir} is a file: give a folder with --workdir")
    # Hidden files are what a run leaves that was killed before it wrote its config.json.
    names = sorted(path.name for path in workdir.glob("*") if path.name[0] != ".")
    if names:
        raise WorkdirError(
            f"{workdir} is not empty ({names[0]}, ...) and holds no config.json of a run: give an "
            "empty or new folder with --workdir"
        )


def read_json(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a JSON file of a run, an object that has at least `keys`.

    Raises:
      WorkdirError: it is not there or damaged.
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not content.keys() >= set(keys):
            raise ValueError(f"it must be an object with {', '.join(keys)}")
        return content
    except (OSError, ValueError) as error:
        raise WorkdirError(
            f"cannot read {path} ({error}): move that folder away or give another --workdir"
        ) from error


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON line in a single write."""
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())


def read_lines(path: Path, rounds: int) -> list[dict[str, Any]]:
    """The records of the first `rounds` rounds; later or torn lines of a killed run are dropped.

    Raises:
      WorkdirError: lines of those rounds are missing.
    """
    records = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines[:rounds], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or record.get("round") != number:
            break
        records.append(record)
    if len(records) < rounds:
        raise WorkdirError(
            f"{path} is damaged at round {len(records) + 1} of the {rounds} that the checkpoint "
            f"has: move {path.parent} away and start again, or give another --workdir"
        )
    return records


def rewrite_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes records as JSON lines."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
