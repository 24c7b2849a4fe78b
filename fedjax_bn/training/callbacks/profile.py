"""Profiles one round of a run: writes the trace of `jax.profiler`, which XProf shows."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.training.records import Record
from fedjax_bn.training.together import first

_TRACES = Path("plugins", "profile")  # where JAX writes a folder a trace, and XProf finds it


class Profile:
    """Writes the trace of one round to FOLDER/plugins/profile/round_NUMBER.

    It comes before all other callbacks, so that the trace has the round alone. Of several
    processes, only the first one writes a trace, that of its own devices.

    Args:
      round: the round that is profiled, from 1; 0 for none.
      folder: made if it is missing.
    """

    def __init__(self, round: int, folder: str | os.PathLike[str]) -> None:
        self._round, self._folder = round, Path(folder)
        self._stack = ExitStack()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def on_round_begin(self, round: int) -> None:
        """Starts the trace if it is the round's turn."""
        if round == self._round and first():
            self._stack.enter_context(_traced(round, self._folder))

    def on_round_end(self, round: int, state: Any, metrics: Record) -> None:
        """Ends the trace."""
        del round, state, metrics
        self._stack.close()


@contextmanager
def _traced(number: int, folder: Path) -> Iterator[None]:
    """Writes the trace of the block, which appears whole and replaces an earlier one.

    Raises:
      WorkdirError: the trace cannot be written.
      RuntimeError: another trace of `jax.profiler` is running.
    """
    unfinished, place = folder / ".partial", folder / _TRACES / f"round_{number}"
    require_folder(folder)
    shutil.rmtree(unfinished, ignore_errors=True)  # that of a killed run
    jax.profiler.start_trace(unfinished)
    try:
        with jax.profiler.StepTraceAnnotation("round", step_num=number):
            yield
    finally:
        with _faults_named(folder):
            jax.profiler.stop_trace()
    with _faults_named(folder):
        (trace,) = (unfinished / _TRACES).iterdir()
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        trace.replace(place)
        shutil.rmtree(unfinished)


def require_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the folder of a profile; raises WorkdirError if that is not possible."""
    with _faults_named(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)


@contextmanager
def _faults_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise WorkdirError(
            f"cannot write a profile to {folder} ({error}): make room there or make it writable, "
            "or leave profile out"
        ) from error
