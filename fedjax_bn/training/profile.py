"""Profiles one round of a run: writes the trace of `jax.profiler`, which XProf shows."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.training.together import first

_TRACES = Path("plugins", "profile")  # where JAX writes a folder a trace, and XProf finds it


@contextmanager
def profiled(number: int, chosen: int, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Writes the trace of the chosen round, the block, to FOLDER/plugins/profile/round_NUMBER.

    The trace appears there whole, and replaces an earlier one of the same round. If there are
    several processes, only the first one writes a trace, that of its own devices.

    Args:
      number: of the round that the block runs, from 1.
      chosen: the round that is profiled; 0 for none.
      folder: made if it is missing.

    Raises:
      WorkdirError: the trace cannot be written.
      RuntimeError: another trace of `jax.profiler` is running.
    """
    if number != chosen or not first():
        yield
        return
    folder = Path(folder)
    partial, place = folder / ".partial", folder / _TRACES / f"round_{number}"
    require_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)  # that of a killed run
    jax.profiler.start_trace(partial)
    try:
        with jax.profiler.StepTraceAnnotation("round", step_num=number):
            yield
    finally:
        with _faults_named(folder):
            jax.profiler.stop_trace()
    with _faults_named(folder):
        (trace,) = (partial / _TRACES).iterdir()
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        trace.replace(place)
        shutil.rmtree(partial)


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
