"""Ties a workdir to one configuration and its data, and to one process at a time.

The owner's name is in a hidden file. config.json records the configuration, the data's hash and the
machine.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.arguments.text import brief
from fedjax_bn.training.machine import RANDOM
from fedjax_bn.training.workdir import (
    CLAIM,
    Record,
    faults_named,
    read_json,
    read_lines,
    rounds_recorded,
    write_json,
)

LOCK, OWNER = ".lock", ".owner.json"  # a folder that holds only hidden files is still unused
PATIENCE = 30.0  # seconds that a report or an evaluation waits for another one's files
# These keys do not change results: where data and compiled programs are kept, which images are too
# large, what is written in addition, and the devices, except for the order of sums
# (`machine.difference`).
_MAY_DIFFER = {
    "compilation_cache",
    "data.cache",
    "data.device_megabytes",
    "data.max_megapixels",
    "mesh.batch",
    "mesh.clients",
    "predictions",
    "profile",
}


@contextmanager
def owned(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the owner of a folder, which is made if it is missing.

    The lock is the kernel's (flock): it ends with the process, however the process ends, and holds
    between hosts on NFS. If a file system has no flock, filelock uses a file, which stays after a
    kill on another host.

    Args:
      folder: the workdir.
      wait: whether to wait for another owner, at most `PATIENCE` seconds.

    Raises:
      WorkdirError: another process owns the folder, or it cannot be written to.
    """
    with faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=PATIENCE if wait else 0)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout as error:
            soft = f" (or, if it is gone, delete {folder / LOCK})"
            raise WorkdirError(
                f"{folder} is in use by {_name(folder)}, which writes there: wait until it has "
                f"ended{soft if isinstance(lock, SoftFileLock) else ''}, or give another --workdir"
            ) from error
    try:
        write_json(folder / OWNER, {"host": socket.gethostname(), "pid": os.getpid()})
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
    """Returns what the owner of a folder wrote about itself."""
    try:
        owner = json.loads((folder / OWNER).read_text())
        return f"process {int(owner['pid'])} on {str(owner['host'])[:80]!s}"
    except (OSError, ValueError, TypeError, KeyError):  # it has not written its name yet
        return "another process"


def claim(workdir: Path, config: Record, about: Record, follows: str = "") -> str:
    """Makes a folder the workdir of one configuration, or checks that it is already.

    Args:
      workdir, config, about, follows: as in `check_claim`; `about` is recorded at the first start.

    Returns:
      A message on the difference from a run that had this number of rounds at first; mostly "".

    Raises:
      WorkdirError: as `check_claim`, or the folder cannot be written to.
    """
    check_claim(workdir, config, about, follows)
    path = workdir / "config.json"
    if not path.exists():
        write_json(path, {"config": config, **about})
        return ""
    recorded = read_json(path, CLAIM)
    was, rounds = recorded["config"].get("rounds"), config["rounds"]
    if was == rounds:
        return ""
    promised = {name: about[name] for name in ("privacy",) if name in about}
    # The profiled round of an earlier start may be above the new number of rounds.
    changed = {"rounds": rounds, "profile": config["profile"]}
    write_json(path, {**recorded, **promised, "config": {**recorded["config"], **changed}})
    (workdir / "summary.json").unlink(missing_ok=True)  # the run is no longer finished
    if rounds_recorded(workdir / "metrics.jsonl") < was or not was % config["eval_every"]:
        return ""
    return (
        f"round {was} was evaluated because it was the last one, which a run that was given "
        f"{rounds} rounds at once would not do (eval_every={config['eval_every']}): the model "
        "is the same, but another round may be selected"
    )


def _random_options(about: Record) -> Record:
    """Returns what a config.json has of JAX's options for random numbers, name -> value."""
    options = (about.get("machine") or {}).get("options")
    return {k: options[k] for k in RANDOM if k in options} if isinstance(options, dict) else {}


def check_claim(workdir: Path, config: Record, about: Record, follows: str = "") -> None:
    """Checks that a folder is or can become the workdir of a configuration; writes nothing.

    Args:
      workdir: the folder, new or of an earlier start of the same run.
      config: flat configuration, dotted key -> value. It must be equal at every start, except for
        keys that do not change results (`_MAY_DIFFER`), and `rounds`, which may not be below the
        number of rounds done.
      about: versions, devices and data; only "data", "start_from", and JAX's options for random
        numbers must be equal.
      follows: the key whose schedule depends on `rounds`, which must then be equal; "" for none.

    Raises:
      WorkdirError: the folder holds a run of another configuration or of other data, or files that
        are not from a run.
    """
    if not (workdir / "config.json").exists():
        # A run that was killed before it wrote its config.json leaves only hidden files.
        names = sorted(path.name for path in workdir.glob("*") if path.name[0] != ".")
        if workdir.exists() and not workdir.is_dir():
            raise WorkdirError(f"{workdir} is a file: give a folder with --workdir")
        if names:
            raise WorkdirError(
                f"{workdir} is not empty ({names[0]}, ...) and holds no config.json of a run: give "
                "an empty or new folder with --workdir"
            )
        return
    record = json.loads(json.dumps({"config": config, **about}))
    earlier_record = read_json(workdir / "config.json", CLAIM)
    earlier_config, this_config = earlier_record["config"], record["config"]
    changes = [
        f"{key} ({earlier_config.get(key)!r} there, {this_config.get(key)!r} now)"
        for key in sorted({*earlier_config, *this_config} - _MAY_DIFFER - {"rounds"})
        if earlier_config.get(key) != this_config.get(key)
    ]
    if not changes and earlier_record["data"] != record["data"]:
        changes = ["the data themselves (their hash)"]
    if not changes and earlier_record.get("start_from") != record.get("start_from"):
        changes = ["the model that start_from names (its hash)"]
    if not changes:
        before, after = (_random_options(record) for record in (earlier_record, record))
        changes = [
            f"JAX_{name.upper()} ({brief(before[name])} there, {brief(after[name])} now)"
            for name in sorted(before.keys() & after.keys())  # older runs recorded none
            if before[name] != after[name]
        ]
    if changes:
        raise WorkdirError(
            f"{workdir} belongs to a run of another configuration; these differ: "
            f"{', '.join(changes[:8])}. Give another --workdir, or the old values to continue"
        )
    was, rounds = earlier_config.get("rounds"), config["rounds"]
    if was == rounds:
        return
    if follows:
        raise WorkdirError(
            f"{workdir} belongs to a run of {was} rounds, and {follows} follows from that number: "
            f"with rounds={rounds} its rounds so far would have been others. Give rounds={was}, or "
            f"another --workdir, or start from it (start_from={workdir}) when it has finished"
        )
    path = workdir / "metrics.jsonl"
    rounds_played = rounds_recorded(path)
    if rounds < rounds_played:
        raise WorkdirError(
            f"{workdir} has made {rounds_played} rounds already, more than rounds={rounds}: "
            f"give {rounds_played} or more, or another --workdir"
        )
    if rounds == rounds_played and "accuracy" not in read_lines(path, rounds_played)[-1]:
        raise WorkdirError(
            f"{workdir} has made {rounds_played} rounds, and the last one was not evaluated: "
            f"give more than rounds={rounds}, or another --workdir"
        )
