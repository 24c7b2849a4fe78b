"""The workdir of a run, tied to one configuration and its data, and to one process at a time."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from jax.sharding import Mesh

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.evaluation.answers import Keep, write_answers
from fedjax_bn.training.experiment import Plan
from fedjax_bn.training.processes import by_first, held_by_first, require_same
from fedjax_bn.training.workdir import CLAIM, RANDOM, SUMMARY, Record

LOCK, OWNER = ".lock", ".owner.json"  # a folder that holds only hidden files is still unused
PATIENCE = 30.0  # seconds that a report or an evaluation waits for another one's files
# These keys do not change results: where data and compiled programs are kept, what is written in
# addition, and the devices, except for the order of sums (`workdir.difference`).
_MAY_DIFFER = {
    *("compilation_cache", "data.cache", "data.device_megabytes", "mesh.batch", "mesh.clients"),
    *("predictions", "profile", "rounds"),  # of rounds see `claim`
}


class RunFiles(NamedTuple):
    """The workdir of one run, from the claim to the summary.

    All processes of a run call these methods in the same order. Only the first one reads and
    writes; the others receive what it has read, and its errors.
    """

    folder: Path
    plan: Plan
    about: Record  # see `claim`

    def finished(self) -> Record | None:
        """Returns the summary of a finished run, else None; another run's folder is refused.

        A run that is given more rounds has not finished, but one that ran out of patience has.
        """
        require_same("the configuration", self.plan.keys)
        require_same("the data", self.about["data"])

        def read() -> Record | None:
            claim(self.folder, self.plan.keys, self.about, self.plan.follows, write=False)
            path = self.folder / "summary.json"
            summary = workdir.read_json(path, SUMMARY) if path.exists() else {"rounds": 0}
            ended = summary["rounds"] >= self.plan.rounds or summary.get("stopped_early", False)
            return summary if ended else None

        return by_first(read)

    @contextmanager
    def continued(
        self, start: Callable[[], Any], mesh: Mesh | None, say: Callable[[str], None]
    ) -> Iterator[tuple[Any, list[Record]]]:
        """Owns the folder, and yields the state from which the run continues, and its records."""
        with held_by_first(owned(self.folder)):
            plan = self.plan
            if note := by_first(lambda: claim(self.folder, plan.keys, self.about, plan.follows)):
                say(note)
            state, records = resume(self.folder, start, mesh)
            if records:
                say(f"continuing from round {len(records)} of {plan.rounds} in {self.folder}")
            yield state, records

    def finish(self, summary: Record, answers: Keep) -> None:
        """Writes the unseen clients' answers, if there are any, and marks the run as finished."""

        def write() -> None:
            write_answers(self.folder, answers, self.plan.predictions)
            checkpoint.delete_earlier(self.folder)
            workdir.write_json(self.folder / "summary.json", summary)

        by_first(write)


def resume(
    folder: Path, start: Callable[[], Any], mesh: Mesh | None = None
) -> tuple[Any, list[Record]]:
    """Returns the state from which a workdir's run continues, and the records up to it.

    Drops records of later rounds. A damaged workdir is a WorkdirError or CheckpointError.
    """
    path = folder / "metrics.jsonl"
    recorded = by_first(lambda: workdir.rounds_recorded(path))
    state = checkpoint.latest_state(folder, start, recorded, mesh)

    def read() -> list[Record]:
        records = workdir.read_lines(path, int(state.round))
        workdir.keep_lines(path, records)
        return records

    return state, by_first(read)


@contextmanager
def owned(folder: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the owner of a folder, which is made if it is missing.

    With `wait`, another owner has `PATIENCE` seconds to end. A folder that another process owns,
    or that cannot be written to, is a WorkdirError.
    """
    # The lock is the kernel's (flock), which ends with the process and holds between hosts on NFS.
    # Without flock, filelock uses a file, which stays after a kill on another host.
    with workdir.faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=PATIENCE if wait else 0)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout as error:
            raise WorkdirError(
                f"{folder} is in use by {_name(folder)}: wait, or give another --workdir (without "
                f"flock, delete {folder / LOCK} after a kill)"
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
    folder: Path, config: Mapping[str, Any], about: Record, follows: str = "", write: bool = True
) -> str:
    """Makes a folder the workdir of one configuration, or checks that it is already.

    Returns a message on what has changed since the first start but may change, or "". A folder of
    another run, or with files that are not from a run, is a WorkdirError. `config` is dotted key ->
    value, equal at every start except for `_MAY_DIFFER`; `about` is recorded at the first start.
    `rounds` must be equal if `follows` names a key whose schedule depends on them. Without `write`
    the folder is only checked.
    """
    path, lines = folder / "config.json", folder / "metrics.jsonl"
    if not path.exists():
        # A run that was killed before it wrote its config.json leaves only hidden files.
        files = [file for file in folder.glob("*") if file.name[0] != "."]
        if files or (folder.exists() and not folder.is_dir()):
            raise WorkdirError(f"{folder} holds other files: give a new folder by --workdir")
        if write:
            workdir.write_json(path, {"config": config, **about})
        return ""
    recorded = workdir.read_json(path, CLAIM)
    record = json.loads(json.dumps({"config": config, **about}))  # tuples are lists there
    was, rounds = recorded["config"].get("rounds"), config["rounds"]
    rounds_played = workdir.rounds_recorded(lines)
    problem = ""
    if differences := _differences(recorded, record):
        problem = (
            f"belongs to a run of another configuration, {', '.join(differences)}: give another "
            "--workdir, or the old values to continue"
        )
    elif was != rounds and follows:
        problem = (
            f"belongs to a run of {was} rounds, from which {follows} follows: give rounds={was}, "
            f"or another --workdir, or start_from={folder} when it has finished"
        )
    elif was != rounds and (
        rounds < rounds_played
        # The last round of a run is always evaluated.
        or (rounds == rounds_played and "accuracy" not in workdir.read_lines(lines, rounds)[-1])
    ):
        problem = f"has made {rounds_played} rounds already: give more than rounds={rounds}"
    if problem:
        raise WorkdirError(f"{folder} {problem}")
    note = workdir.difference(folder, about) if write else ""
    if not write or was == rounds:
        return note
    # The profiled round of an earlier start may be above the new number of rounds.
    recorded["config"] |= {"rounds": rounds, "profile": config["profile"]}
    promised = {"privacy": about["privacy"]} if "privacy" in about else {}
    workdir.write_json(path, recorded | promised)
    (folder / "summary.json").unlink(missing_ok=True)  # the run is no longer finished
    return note


def _differences(earlier: Record, record: Record) -> list[str]:
    """Returns what differs between two starts that must be equal, in words."""
    pairs = {key: (earlier["config"].get(key), value) for key, value in record["config"].items()}
    # What Flower has served has no options.
    options, current = (about.get("machine", {}).get("options", {}) for about in (earlier, record))
    names = [name for name in RANDOM if name in options and name in current]
    pairs |= {f"JAX_{name.upper()}": (options[name], current[name]) for name in names}
    differences = [
        f"{key} ({before!r} there, {now!r} now)"
        for key, (before, now) in pairs.items()
        if before != now and key not in _MAY_DIFFER
    ]
    hashed = {"data": "the data themselves", "start_from": "the model that start_from names"}
    for key, name in hashed.items():
        differences += [f"{name} (by hash)"] if earlier.get(key) != record.get(key) else []
    return differences
