"""Profiles one round."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from fedjax_bn.training.processes import first
from fedjax_bn.training.records import Record
from fedjax_bn.training.workdir import faults_named


class Profile:
    """Writes the trace of one round to FOLDER/plugins/profile, where XProf finds it.

    It comes before all other callbacks, so that the trace has the round alone. Of several
    processes, only the first one writes a trace, that of its own devices.

    Args:
      round: the round that is profiled, from 1; 0 for none.
      folder: made if it is missing.

    Raises:
      WorkdirError: the folder cannot be made, or, by the round, the trace cannot be written.
      RuntimeError: by the round, if another trace of `jax.profiler` is running.
    """

    def __init__(self, round: int, folder: str | os.PathLike[str]) -> None:
        self._round, self._folder, self._stack = round, Path(folder), ExitStack()
        if round and first():
            with faults_named(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: Any) -> None:
        with faults_named(self._folder):
            self._stack.close()

    def on_round_begin(self, round: int) -> None:
        """Starts the trace if it is the round's turn."""
        if round == self._round and first():
            self._stack.enter_context(jax.profiler.trace(self._folder))
            step = jax.profiler.StepTraceAnnotation("round", step_num=round)
            self._stack.enter_context(step)

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Ends the trace."""
        self.__exit__()
