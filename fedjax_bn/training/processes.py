"""Runs several processes as one: how they find each other, and what only the first one does.

With --distributed, JAX finds the others on SLURM (one task per GPU), under Open MPI and on Cloud
TPUs; elsewhere three variables name them. All processes compute; only process 0 writes to the
workdir and prints. If a process is lost, JAX ends the others.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_bn.arguments import errors
from fedjax_bn.arguments.errors import ConfigError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Variables that srun and mpirun set to the number of tasks that they started.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def join(distributed: bool | None, timeout: int = 300) -> None:
    """Connects this process with the others of its run, before any other call of JAX.

    With `distributed` False or None it trains alone. ConfigError: it is None in one of several
    processes, which would share a workdir, or JAX cannot connect them in `timeout` seconds.
    """
    place = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    tasks = {name: os.environ[name] for name in _TASKS if os.environ.get(name, "1") != "1"}
    if distributed is None and (launched := tasks | place):
        variables = ", ".join(f"{name}={value}" for name, value in launched.items())
        raise ConfigError(
            f"one of several processes ({variables}): give --distributed, or --nodistributed"
        )
    if not distributed:
        return
    try:
        if place:
            address, count, number = (place[name] for name in _VARIABLES)
            # Otherwise JAX asks Kubernetes for what the variables already set.
            options = {"cluster_detection_method": "deactivate"}
            options |= {"num_processes": int(count), "process_id": int(number)}
            jax.distributed.initialize(address, initialization_timeout=timeout, **options)
        else:
            jax.distributed.initialize(initialization_timeout=timeout)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--distributed: JAX cannot connect the processes ({error}): start all of them, with "
            f"{', '.join(_VARIABLES)} as in launch/local.sh, or leave --distributed out"
        ) from error
    sys.excepthook = _end_at_once


def _end_at_once(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Ends this process with a traceback; a normal exit would wait for those that wait for it."""
    traceback.print_exception(kind, error, trace)
    leave(1)


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Returns whether this is process 0, or the only one."""
    return not _several() or jax.process_index() == 0


def by_first(act: Callable[[], Any]) -> Any:
    """Calls a function in process 0 and returns its result, which JSON can hold, in all processes.

    All must call it, in the same order, outside of other threads. All raise a UserError of `act`.
    """
    if not _several():
        return act()
    result: dict[str, Any] = {}
    if first():
        # The others wait for the broadcast below, so an error must reach it too.
        try:
            result = {"value": act()}
        except errors.UserError as error:
            result = {"error": type(error).__name__, "text": str(error)}
    content = json.dumps(result).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    # Padded to one of a few sizes, because a program is compiled for each.
    row = np.zeros(max(256, 1 << (size - 1).bit_length()), np.uint8)
    if first():
        row[:size] = np.frombuffer(content, np.uint8)
    result = json.loads(multihost_utils.broadcast_one_to_all(row)[:size].tobytes())
    if "error" in result:
        raise getattr(errors, result["error"])(result["text"])
    return result["value"]


@contextmanager
def held_by_first(context: AbstractContextManager[None]) -> Iterator[None]:
    """Enters a context in process 0 only; the others continue once it has entered."""
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(context))
        yield


def any_asked(stop: bool) -> bool:
    """Returns whether any process was asked to stop; `stop`: whether this one was."""
    return bool(multihost_utils.process_allgather(np.asarray(stop)).any()) if _several() else stop


def require_same(name: str, value: Any) -> None:
    """Raises ConfigError in all processes, which all call it, if a value of theirs differs."""
    text = json.dumps(value, sort_keys=True)
    if any_asked(by_first(lambda: text) != text):
        raise ConfigError(f"{name} of a process is not that of process 0: give all one command")


def leave(status: int) -> None:
    """Ends this process after a fault if it is one of several: others wait for it at an exit."""
    if _several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
