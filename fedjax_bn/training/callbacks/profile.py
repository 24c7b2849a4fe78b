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
    """Writes the trace of one round (0: none) to FOLDER/plugins/profile, where XProf finds it.

    It comes before all other callbacks, so that the trace has the round alone. Of several
    processes, only the first one writes a trace. WorkdirError: it cannot be written.
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
            self._stack.enter_context(jax.profiler.StepTraceAnnotation("round", step_num=round))

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Ends the trace."""
        self.__exit__()
