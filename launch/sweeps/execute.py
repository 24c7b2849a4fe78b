"""Executes the runs of a sweep on this machine, several at a time, and repeats those that fail.

Each run resumes from its workdir, so if the sweep is killed, the same command continues. A run that
another process trains is left to that process.
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
MISTAKE = 2  # the exit status of a user's mistake, for which a retry is useless
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_place = threading.local()  # .number: the index of this thread among those that run at a time


class Job(NamedTuple):
    """One run."""

    name: str
    folder: Path  # its workdir
    # returns the steps that are left to do, each as Python's arguments, in order
    todo: Callable[[], list[list[str]]]


class Outcome(NamedTuple):
    """The outcome of a run: its name, one of STATES, and the reason."""

    name: str
    state: str
    why: str = ""


class Processes:
    """The running processes, and the signal that ended them, after which no other starts."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.signal = 0

    def call(self, command: Sequence[str], **options: Any) -> int:
        """Runs a command and returns its exit status; after a stop it starts no command."""
        if self.signal:
            return MISTAKE
        # In a session of its own, so that Ctrl-C reaches it once, through `stop`.
        with subprocess.Popen(command, start_new_session=True, **options) as process:
            self.running.add(process)
            if self.signal:
                process.send_signal(signal.SIGTERM)
            status = process.wait()
        self.running.discard(process)
        return status

    def stop(self, number: int, frame: Any = None) -> None:
        """Handles a signal: passes it on to the running processes."""
        del frame
        self.signal = number
        # SLURM itself sends SIGTERM to every process of a step; a second SIGTERM would end a run
        # before it has saved its state.
        by_slurm = number == signal.SIGTERM and "SLURM_STEP_ID" in os.environ
        for process in () if by_slurm else tuple(self.running):
            process.send_signal(signal.SIGTERM)


@contextmanager
def _passing_on(processes: Processes) -> Iterator[None]:
    """Passes signals that would end this process on to its runs, which then save their state."""
    handlers = {number: signal.getsignal(number) for number in _STOP}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # nohup and `&` ignore some signals: that is kept
            signal.signal(number, processes.stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def execute(
    jobs: Sequence[Job], at_once: int = 1, retries: int = 0, logs: Path | None = None
) -> list[Outcome]:
    """Executes the steps that are left of every job, and continues after a failure.

    Args:
      jobs: the runs, in the order in which they start.
      at_once: the number of runs at a time, each on its share of this process's cores (Linux) and
        of the GPUs in CUDA_VISIBLE_DEVICES.
      retries: how often a failed step is tried again.
      logs: the folder of files for each run's output; None: the output of this process.

    Returns:
      One outcome for each job. After Ctrl-C or SIGTERM running jobs save their state, and all
      others are "stopped".
    """
    processes, numbers = Processes(), SimpleQueue()
    for number in range(at_once):
        numbers.put(number)

    def perform(job: Job) -> Outcome:
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
        outcome = _attempt(job, call, retries)
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
        return list(pool.map(perform, jobs))


def _settle(number: int, at_once: int) -> None:
    """Binds this thread, and the processes that it starts, to its share of the cores."""
    _place.number = number
    if at_once > 1 and hasattr(os, "sched_setaffinity"):  # Linux has it; 0 is this thread alone
        os.sched_setaffinity(0, share(sorted(os.sched_getaffinity(0)), number, at_once))


def share(cores: Sequence[int], number: int, at_once: int) -> Sequence[int]:
    """Returns the cores of a run; two runs share a core only if there are more runs than cores."""
    first, end = (len(cores) * i // at_once for i in (number, number + 1))
    return cores[first:end] or [cores[number % len(cores)]]


def environment(number: int, at_once: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with a run's GPU, without preallocation if runs share a GPU."""
    if at_once == 1:
        return dict(variables)
    devices = [name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpu = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if at_once > len(devices) else {}
    return {**shared, **variables, **gpu}


def _attempt(job: Job, call: Callable[[Sequence[str]], int], retries: int) -> Outcome:
    """Executes the steps that are left of a job by `call(step) -> status`."""
    todo = job.todo()
    for step in todo:
        if owner := owner_of(job.folder):
            return Outcome(job.name, IN_USE, f"by {owner}")
        for attempt in range(1 + retries):
            print(f"{job.name} starts, try {attempt + 1}", file=sys.stderr, flush=True)
            status = call(step)
            if status in (0, MISTAKE):  # a retry would repeat the mistake
                break
        if status:
            owner = owner_of(job.folder)  # another process may have taken the run meanwhile
            state, why = (IN_USE, f"by {owner}") if owner else (FAILED, f"with status {status}")
            return Outcome(job.name, state, why)
    return Outcome(job.name, DONE if todo else BEFORE)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns a text with the number of runs by outcome, and the reasons of unfinished ones."""
    lines = []
    for state in STATES:
        chosen = [outcome for outcome in outcomes if outcome.state == state]
        lines += [f"{state:16}{len(chosen):6}"] if chosen else []
        reasons = dict.fromkeys(outcome.why for outcome in chosen if outcome.why)
        lines += [f"  {by_folder(o.name for o in chosen if o.why == w)} {w}" for w in reasons]
    return "\n".join(lines)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Returns 130 if the sweep was stopped, 1 if a run failed, 3 if one is still open, else 0."""
    states = {outcome.state for outcome in outcomes}
    if STOPPED in states:
        return 130
    return 1 if FAILED in states else 3 * bool(states & {IN_USE, WAITS})
