"""Runs of a sweep on this machine: some at a time, failed ones again, and the outcome of each.

A run is resumed from its workdir, so that nothing is lost if the sweep itself is killed: the same
command continues. A run that another process trains is left to it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from plan import by_folder

from fedjax_bn.run.files.ownership import owner_of

DONE, BEFORE, FAILED, IN_USE, WAITS = "done", "finished before", "failed", "in use", "waits"
STOPPED = "stopped"
STATES = (DONE, BEFORE, FAILED, IN_USE, WAITS, STOPPED)
MISTAKE = 2  # the exit status of a mistake of the user's, which another try would only repeat
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_place = threading.local()  # .number: which of the runs at a time this thread has


class Job(NamedTuple):
    """One run.

    Attributes:
      name: the run's.
      folder: its workdir.
      todo: the arguments of Python of what is left to do now, in their order.
    """

    name: str
    folder: Path
    todo: Callable[[], list[list[str]]]


class Outcome(NamedTuple):
    """What came of a run: its name, one of STATES, and why."""

    name: str
    state: str
    why: str = ""


class Processes:
    """The processes under way, and the signal that ends them and all that follow."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.signal = 0

    def call(self, command: Sequence[str], **options: Any) -> int:
        """Runs a command and returns its exit status; after a stop nothing starts."""
        if self.signal:
            return MISTAKE
        # In a session of its own: Ctrl-C comes by `stop`, once.
        with subprocess.Popen(command, start_new_session=True, **options) as process:
            self.running.add(process)
            if self.signal:
                process.send_signal(signal.SIGTERM)
            status = process.wait()
        self.running.discard(process)
        return status

    def stop(self, number: int, frame: Any = None) -> None:
        """Handles a signal: passes it on to the processes."""
        del frame
        self.signal = number
        # SLURM sends SIGTERM to every process of a step; a second one would end a run at once.
        theirs = number == signal.SIGTERM and "SLURM_STEP_ID" in os.environ
        for process in () if theirs else tuple(self.running):
            process.send_signal(signal.SIGTERM)


@contextmanager
def _passing_on(processes: Processes) -> Iterator[None]:
    """Signals that would end this process end the others, which save their state, in its place."""
    old = {number: signal.getsignal(number) for number in _STOP}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:  # as nohup and `&` have it
            signal.signal(number, processes.stop)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def execute(
    jobs: Sequence[Job], at_once: int = 1, retries: int = 0, logs: Path | None = None
) -> list[Outcome]:
    """Does what is left of every job, and continues after a failure.

    Args:
      jobs: the runs, in the order in which they start.
      at_once: how many run at a time, each on its share of this process's cores (Linux) and of the
        GPUs in CUDA_VISIBLE_DEVICES.
      retries: how often a step that fails is tried again.
      logs: the folder of files that take what each run prints; None: it is printed where ours is.

    Returns:
      One outcome a job. After Ctrl-C or SIGTERM runs save their state, and the rest is "stopped".
    """
    processes, numbers = Processes(), SimpleQueue()
    for number in range(at_once):
        numbers.put(number)

    def one(job: Job) -> Outcome:
        if processes.signal:
            return Outcome(job.name, STOPPED)
        log = logs / f"{job.name}.txt" if logs else None

        def call(step: Sequence[str]) -> int:
            """Runs a step with this Python; returns its exit status."""
            command = [sys.executable, *step]
            variables = environment(_place.number, at_once, os.environ)
            if log is None:
                return processes.call(command, env=variables)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                return processes.call(command, env=variables, stdout=file, stderr=subprocess.STDOUT)

        began = time.monotonic()
        try:
            outcome = _attempt(job, call, retries)
        except OSError as error:  # of its log or its folder: the other runs continue
            outcome = Outcome(job.name, FAILED, f"before it could start: {error}")
        if processes.signal:
            return Outcome(job.name, STOPPED)
        if outcome.state == FAILED and log:
            outcome = outcome._replace(why=f"{outcome.why}; see {log}")
        if outcome.state != BEFORE:
            took = f"after {time.monotonic() - began:.0f} s"
            print(" ".join(filter(None, (*outcome, took))), file=sys.stderr, flush=True)
        return outcome

    with (
        _passing_on(processes),
        ThreadPoolExecutor(at_once, initializer=lambda: _settle(numbers.get(), at_once)) as pool,
    ):
        return list(pool.map(one, jobs))


def _settle(number: int, at_once: int) -> None:
    """Gives this thread, and what it starts, its share of the cores."""
    _place.number = number
    if at_once > 1 and hasattr(os, "sched_setaffinity"):  # Linux has it; 0 is this thread alone
        os.sched_setaffinity(0, share(sorted(os.sched_getaffinity(0)), number, at_once))


def share(cores: Sequence[int], number: int, at_once: int) -> Sequence[int]:
    """Returns the cores of a run; two runs share a core only if there are more runs than cores."""
    first, end = (len(cores) * i // at_once for i in (number, number + 1))
    return cores[first:end] or [cores[number % len(cores)]]


def environment(number: int, at_once: int, given: Mapping[str, str]) -> dict[str, str]:
    """Returns `given` with a run's GPU, and to take no more of it than it needs."""
    devices = [name for name in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    own = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if at_once > len(devices) else {}
    return {**shared, **given, **own} if at_once > 1 else dict(given)


def _attempt(job: Job, call: Callable[[Sequence[str]], int], retries: int) -> Outcome:
    """Does what is left of a job by `call(step) -> status`."""
    todo = job.todo()
    for step in todo:
        if owner := owner_of(job.folder):
            return Outcome(job.name, IN_USE, f"by {owner}")
        for again in range(retries + 1):
            tried = f", try {again + 1} of {retries + 1}" if again else ""
            print(f"{job.name} starts{tried}", file=sys.stderr, flush=True)
            status = call(step)
            if status in (0, MISTAKE):  # a mistake would only be repeated
                break
        if status:
            owner = owner_of(job.folder)  # it may have been faster
            state, why = (IN_USE, f"by {owner}") if owner else (FAILED, f"with status {status}")
            return Outcome(job.name, state, why)
    return Outcome(job.name, DONE if todo else BEFORE)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns how many runs came to what, and which of them did not finish, and why."""
    lines = []
    for state in STATES:
        found = [outcome for outcome in outcomes if outcome.state == state]
        if not found:
            continue
        lines.append(f"{state:16}{len(found):6}")
        if state not in (DONE, BEFORE):
            reasons = dict.fromkeys(outcome.why for outcome in found)
            lines += [
                f"  {by_folder(o.name for o in found if o.why == why)} {why}".rstrip()
                for why in reasons
            ]
    return "\n".join(lines)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Returns 130 if the sweep was stopped, 1 if a run failed, 3 if one is still open, else 0."""
    states = {outcome.state for outcome in outcomes}
    if STOPPED in states:
        return 130
    return 1 if FAILED in states else 3 * bool(states & {IN_USE, WAITS})
