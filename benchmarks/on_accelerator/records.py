"""The one JSON file to which each job adds what became of it."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedjax_bn.run.files.workdir import write_json
from on_accelerator.jobs import Job, Record, perform

FINAL = ("done", "out of memory", "too long")  # the others are tried again
LEAST = 20.0  # seconds below which no job is begun


def open_file(path: Path, about: Record) -> Record:
    """What is written down so far; a new file is one of no parts.

    Args:
      path: the file, which may not exist yet.
      about: device, versions and sizes, which must be those of the file; the host's CPU need not.

    Raises:
      SystemExit: the file is of another device, of other versions or sizes.
    """
    about = json.loads(json.dumps(about))
    if not path.exists():
        return {"about": about, "parts": {}}
    records = json.loads(path.read_text())
    differ = [key for key in about if key != "cpu" and about[key] != records["about"].get(key)]
    if differ:
        raise SystemExit(
            f"{path} was written with another {', '.join(differ)}: give another --out, or remove it"
        )
    return records


def finished(records: Record, part: str, jobs: Sequence[Job]) -> bool:
    """Whether every job of a part has come to its end."""
    done = records["parts"].get(part, {})
    return all(_ended(done, job) for job in jobs)


def _ended(done: Record, job: Job) -> bool:
    """Whether there is nothing to try again; what was absent may be there now."""
    outcome = done.get(job.name, {}).get("outcome")
    return outcome in FINAL or (outcome == "absent" and bool(job.absent))


def do_part(
    path: Path,
    records: Record,
    part: str,
    jobs: Sequence[Job],
    seconds: float,
    say: Callable[[str], object] = print,
) -> None:
    """Does what is left of a part, writing the file after each job.

    Args:
      path: the file.
      records: its content, changed in place.
      part: name of the part.
      jobs: all of them, those that say most first.
      seconds: after which no job of the part runs; those left are "left out".
      say: prints.
    """
    if finished(records, part, jobs):
        say(f"{part}: finished before, nothing to do")
        return
    done = records["parts"].setdefault(part, {})
    end = time.monotonic() + seconds
    for job in jobs:
        if _ended(done, job):
            continue
        remaining = end - time.monotonic()
        if remaining < min(LEAST, seconds / 2) and not job.absent:
            done[job.name] = {"outcome": "left out", "why": "the part's time was over"}
        else:
            done[job.name] = perform(job, remaining)
        write_json(path, records)
        say(f"{part}: {job.name}: {summary(done[job.name])}")


def summary(record: Record) -> str:
    """One line on a record."""
    if record["outcome"] != "done":
        return f"{record['outcome']} ({record['why']})"
    if "samples_per_second" in record:
        return f"{record['samples_per_second']:,.0f} samples/s"
    return record.get("shown", f"done in {record['seconds']:.0f} s")
