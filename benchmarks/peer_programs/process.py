"""Runs a program as a process: asks it for rounds, and measures it and its children (Linux)."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

from machine import cpu_seconds, megabytes, tree
from peer_programs.rounds import MARK

BENCHMARKS = Path(__file__).parents[1]
LONGEST = 600.0  # seconds of a round, or of starting
ALONE = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # turns telemetry off


class Peer:
    """A running program.

    Attributes:
      losses: the mean loss of every client, for each round.
      cpu: user and system seconds of the program and its children, for each round.
      megabytes: the largest memory of all its processes after a round (proportional shares).
    """

    def __init__(self, interpreter: str, module: str, network: str, task: Path, log: Path) -> None:
        """Starts the program, and returns when it is ready.

        Raises:
          RuntimeError: the program ended, or was not ready in time.
        """
        self.losses: list[list[float]] = []
        self.cpu: list[tuple[float, float]] = []
        self.megabytes, self._log = 0.0, log
        paths = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [interpreter, "-m", f"peer_programs.{module}", network, str(task)],
                env=os.environ | ALONE | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            self._answer()  # "ready"
        except RuntimeError:
            self.end()
            raise

    def a_round(self) -> None:
        """Makes one round.

        Raises:
          RuntimeError: the program ended, or did not answer in time.
        """
        before = self._spent()
        with contextlib.suppress(BrokenPipeError):  # the program ended: `_answer` raises the error
            self._pipe("stdin").write("round\n")
            self._pipe("stdin").flush()
        losses = self._answer()
        after = self._spent()
        self.losses.append(losses)
        self.cpu.append(tuple(b - a for a, b in zip(before, after, strict=True)))

    def weigh(self) -> None:
        """Updates `megabytes`; this takes too long to be timed with a round."""
        self.megabytes = max(self.megabytes, sum(map(megabytes, tree(self._process.pid))))

    def end(self) -> None:
        """Ends the program and all its children."""
        children = tree(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            self._pipe("stdin").close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in children[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._pipe("stdout").close()

    def _answer(self) -> list[float]:
        """Returns the content of the next line with `MARK`."""
        late = threading.Timer(LONGEST, self._process.kill)
        late.start()
        try:
            for line in self._pipe("stdout"):
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
        finally:
            late.cancel()
        said = self._log.read_text().strip().splitlines()
        raise RuntimeError(f"it ended: {' '.join(said[-3:])[-600:]} (all of it: {self._log})")

    def _pipe(self, name: str) -> IO[str]:
        return getattr(self._process, name)

    def _spent(self) -> tuple[float, ...]:
        spent = map(cpu_seconds, tree(self._process.pid))
        return tuple(map(sum, zip(*spent, strict=True)))
