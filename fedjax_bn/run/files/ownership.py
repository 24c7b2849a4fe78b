"""Ties a workdir to one configuration and its data, and to one process at a time."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.training import workdir
from fedjax_bn.training.workdir import CLAIM, RANDOM, Record

LOCK, OWNER = ".lock", ".owner.json"  # a folder that holds only hidden files is still unused
PATIENCE = 30.0  # seconds that a report or an evaluation waits for another one's files
# These keys do not change results: where data and compiled programs are kept, what is written in
# addition, and the devices, except for the order of sums (`workdir.difference`).
_MAY_DIFFER = {
    *("compilation_cache", "data.cache", "data.device_megabytes", "mesh.batch", "mesh.clients"),
    *("predictions", "profile", "rounds"),  # of rounds see `claim`
}


@contextmanager
def owned(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the owner of a folder, which is made if it is missing.

    With `wait`, another owner has `PATIENCE` seconds to end. A folder that another process owns,
    or that cannot be written to, is a WorkdirError.
    """
    # The lock is the kernel's (flock): it ends with the process, however the process ends, and
    # holds between hosts on NFS. If a file system has no flock, filelock uses a file, which stays
    # after a kill on another host.
    with workdir.faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=PATIENCE if wait else 0)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout as error:
            raise WorkdirError(
                f"{folder} is in use by {_name(folder)}: wait until it has ended, or give another "
                f"--workdir (without flock, delete {folder / LOCK} after a kill)"
            ) from error
    try:
        workdir.write_json(folder / OWNER, {"host": socket.gethostname(), "pid": os.getpid()})
        yield
    finally:
        # `LOCK` stays: if it were removed, two processes could lock two files of that name.
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def owner_of(folder: Path) -> str:
    """Returns who owns a folder now, such as "process 7 on HOST"; "" if no process does."""
    if not (folder / OWNER).exists():
        return ""
    try:
        with FileLock(folder / LOCK, timeout=0):
            return ""  # the process that wrote its name there was killed
    except Timeout:
        return _name(folder)


def _name(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError):  # it has not written its name yet
        return "another process"


def claim(
    folder: Path, config: Record, about: Record, follows: str = "", write: bool = True
) -> None:
    """Makes a folder the workdir of one configuration, or checks that it is already.

    Args:
      config: dotted key -> value, equal at every start except for `_MAY_DIFFER`.
      about: versions, devices and data, see `_differences`; recorded at the first start.
      follows: the key whose schedule depends on `rounds`, which must then be equal; "" for none.
      write: whether to write; else the folder is only checked.

    A folder of another run, or with files that are not from a run, is a WorkdirError.
    """
    path, lines = folder / "config.json", folder / "metrics.jsonl"
    if not path.exists():
        # A run that was killed before it wrote its config.json leaves only hidden files.
        files = [file for file in folder.glob("*") if file.name[0] != "."]
        if files or (folder.exists() and not folder.is_dir()):
            raise WorkdirError(
                f"{folder} holds no run, but is not an empty or new folder: give one by --workdir"
            )
        if write:
            workdir.write_json(path, {"config": config, **about})
        return
    recorded = workdir.read_json(path, CLAIM)
    record = json.loads(json.dumps({"config": config, **about}))  # tuples are lists there
    was, rounds = recorded["config"].get("rounds"), config["rounds"]
    rounds_played = workdir.rounds_recorded(lines)
    problem = ""
    if differences := _differences(recorded, record):
        problem = (
            f"belongs to a run of another configuration; these differ: {', '.join(differences)}. "
            "Give another --workdir, or the old values to continue"
        )
    elif was != rounds and follows:
        problem = (
            f"belongs to a run of {was} rounds, and {follows} follows from that number: give "
            f"rounds={was}, or another --workdir, or start_from={folder} when it has finished"
        )
    elif was != rounds and (
        rounds < rounds_played
        # The last round of a run is always evaluated.
        or (rounds == rounds_played and "accuracy" not in workdir.read_lines(lines, rounds)[-1])
    ):
        problem = f"has made {rounds_played} rounds already: give more than rounds={rounds}"
    if problem:
        raise WorkdirError(f"{folder} {problem}")
    if not write or was == rounds:
        return
    promised = {name: about[name] for name in ("privacy",) if name in about}
    # The profiled round of an earlier start may be above the new number of rounds.
    changed = {"rounds": rounds, "profile": config["profile"]}
    workdir.write_json(path, {**recorded, **promised, "config": {**recorded["config"], **changed}})
    (folder / "summary.json").unlink(missing_ok=True)  # the run is no longer finished


def _differences(earlier: Record, record: Record) -> list[str]:
    """Returns what differs between two starts that must be equal, in words."""
    pairs = {key: (earlier["config"].get(key), value) for key, value in record["config"].items()}
    # What Flower has served has no options.
    there, here = (about.get("machine", {}).get("options", {}) for about in (earlier, record))
    pairs |= {f"JAX_{k.upper()}": (there[k], here[k]) for k in RANDOM if k in there and k in here}
    differences = [
        f"{key} ({before!r} there, {now!r} now)"
        for key, (before, now) in pairs.items()
        if before != now and key not in _MAY_DIFFER
    ]
    if earlier["data"] != record["data"]:
        differences.append("the data themselves (their hash)")
    if earlier.get("start_from") != record.get("start_from"):
        differences.append("the model that start_from names (its hash)")
    return differences
