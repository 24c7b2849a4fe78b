"""A job: a command in a process of its own, with a limit of time, and what became of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parent
# The last of these in what a process says names its end.
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OutOfMemoryError")

Record = dict[str, Any]
Read = Callable[
    [str], Record
]  # what the process printed -> numbers, and optionally its own "outcome"


class Job(NamedTuple):
    """One thing to do.

    Attributes:
      name: unlike all others of its part.
      command: arguments of Python.
      read: finds the numbers in its output.
      seconds: it may take at most.
      environment: (name, value) of variables beside those of this process.
      accepts: statuses with which the output is read.
      resumes: whether it continues where it was when it is started again.
      absent: why it cannot be done here; empty where it can.
    """

    name: str
    command: list[str]
    read: Read
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    accepts: tuple[int, ...] = (0,)
    resumes: bool = False
    absent: str = ""


def perform(job: Job, remaining: float) -> Record:
    """Runs a job in at most `remaining` seconds.

    Returns:
      `outcome` ("done", "failed", "out of memory", "too long", "left out" for want of time, or
      "absent"), `why` unless it is done, `seconds`, and what the job's `read` found.
    """
    if job.absent:
        return {"outcome": "absent", "why": job.absent}
    begin = time.monotonic()
    code, output, errors = run(job, min(job.seconds, remaining))
    taken = {"seconds": round(time.monotonic() - begin, 1)}
    if code is None and job.resumes:
        return {"outcome": "left out", "why": "stopped; continues when started again", **taken}
    if code is None and remaining < job.seconds:
        return {"outcome": "left out", "why": "the part's time was over", **taken}
    if code is None:
        return {"outcome": "too long", "why": f"not done in {job.seconds:.0f} s", **taken}
    if code not in job.accepts:
        return {**_failure(code, errors or output), **taken}
    try:
        return {"outcome": "done", **job.read(output), **taken}
    except (ValueError, LookupError, OSError, SyntaxError) as error:  # what it should have written
        return {**_failure(code, errors or output or repr(error)), **taken}


def _failure(code: int, said: str) -> Record:
    lines = [line for line in said.splitlines() if line.strip()]
    for line in reversed(lines):
        if any(sign in line for sign in OUT_OF_MEMORY):
            return {"outcome": "out of memory", "why": line.strip()[:300]}
    if code == -signal.SIGKILL:
        return {"outcome": "out of memory", "why": "the system killed the process"}
    last = lines[-1].strip()[:300] if lines else "it said nothing"
    return {"outcome": "failed", "why": f"status {code}: {last}"}


def run(job: Job, seconds: float) -> tuple[int | None, str, str]:
    """Status, output and errors; no status where the process and its children were ended.

    It is asked to stop first, because a training then writes down where it is.
    """
    process = subprocess.Popen(
        [sys.executable, *job.command],
        cwd=ROOT,
        env=environment() | dict(job.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=max(seconds, 0.01))
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        pass
    for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        _signal(process, sign)
        try:
            output, errors = process.communicate(timeout=patience)
            break
        except subprocess.TimeoutExpired:
            continue
    return None, output, errors


def _signal(process: subprocess.Popen, sign: int) -> None:
    """To the process and its children, who are a group of their own."""
    try:
        os.killpg(process.pid, sign)
    except ProcessLookupError:
        return


def environment() -> dict[str, str]:
    """This process's, with the checkout and the benchmarks on Python's path."""
    paths = [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
