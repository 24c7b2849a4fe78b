"""Runs several processes as one: how they find each other, agree, and end.

With the flag --distributed this process is one of several. JAX finds the others on SLURM (one
task per GPU), under Open MPI and on Cloud TPUs; elsewhere three variables name them.

All processes compute; only process 0 writes to the workdir and prints. The others receive from it
what the workdir holds, and its errors (`by_first`). A process that fails ends at once; if one is
lost, a collective fails in the others, or JAX ends them because no heartbeat arrives. The same
command continues from the last checkpoint.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_bn.arguments import errors
from fedjax_bn.arguments.errors import ConfigError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_ADDRESS, _COUNT, _NUMBER = _VARIABLES
# Variables that srun and mpirun set to the number of tasks that they started.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_HEARTBEAT = 60  # seconds without a heartbeat, after which JAX ends the other processes
_GRACE = 4.0  # seconds in which the others can end before process 0 does


def join(wanted: bool | None, timeout: int = 300) -> None:
    """Connects this process with the others of its run, before any other call of JAX.

    Args:
      wanted: the flag. True: connect. False: train alone, whatever started it. None: train alone,
        but raise if a launcher has started several processes, which would share a workdir.
      timeout: seconds to wait for the others.

    Raises:
      ConfigError: the variables do not fit together, JAX knows no launcher here, or the others
        cannot be reached.
    """
    if wanted:
        _connect(_read_place(os.environ), timeout)
    elif wanted is None:
        there = os.environ
        found = [f"{name}={there[name]}" for name in _TASKS if there.get(name, "1") != "1"]
        found += [f"{name}={there[name]}" for name in _VARIABLES if name in there]
        if found:
            raise ConfigError(
                f"this is one of several processes ({', '.join(found)}): give --distributed to "
                "train together, or --nodistributed if each has a workdir of its own"
            )


def _read_place(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Reads the coordinator's address, the number of processes and this one's; None if not set."""
    given = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    if not given:
        return None
    if missing := [name for name in _VARIABLES if name not in given]:
        raise ConfigError(
            f"{' and '.join(given)} is set, but not {' and '.join(missing)}: set all three, "
            f"{_ADDRESS} to HOST:PORT of process 0, or none where JAX knows the launcher"
        )
    host, _, port = given[_ADDRESS].rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{_ADDRESS}={given[_ADDRESS]!r} must be HOST:PORT of process 0")
    for name in (_COUNT, _NUMBER):
        if not given[name].isdecimal():
            raise ConfigError(f"{name}={given[name]!r} must be a whole number")
    count, number = int(given[_COUNT]), int(given[_NUMBER])
    if number >= count:
        raise ConfigError(
            f"{_NUMBER}={number} must be at least 0 and below {_COUNT}={count}: count from 0"
        )
    return given[_ADDRESS], count, number


def _connect(place: tuple[str, int, int] | None, timeout: int) -> None:
    """Calls `jax.distributed.initialize` after checks for faults on which JAX ends the process."""
    address, count, number = place or (None, None, None)
    if address:
        _reach(address, number == 0, timeout)
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            # Otherwise JAX asks Kubernetes for what the variables already set.
            cluster_detection_method="deactivate" if place else None,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except ValueError as error:
        raise ConfigError(
            f"--distributed: JAX finds no launcher that it knows ({error}): set {_ADDRESS}, "
            f"{_COUNT} and {_NUMBER}, as launch/local.sh does, or leave --distributed out to train "
            "alone"
        ) from error
    # JAX has just replaced the handler in C; this sets Python's again, which requests a stop.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    _meet()


def _reach(address: str, here: bool, timeout: int) -> None:
    """Raises ConfigError if process 0 cannot listen at its port, or does not answer in time."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            if here:
                return socket.create_server(("", int(port))).close()
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, OverflowError) as error:
            if here:
                raise ConfigError(
                    f"process 0 cannot listen at {address} ({error}): give another port in "
                    f"{_ADDRESS}"
                ) from error
            if time.monotonic() > end:
                raise ConfigError(
                    f"process 0 did not answer at {address} within {timeout} s ({error}): see "
                    f"whether it was started, and whether {_ADDRESS} names its host"
                ) from error
        time.sleep(0.2)


def _meet() -> None:
    """Connects all devices now; later, one may be busy for longer than the others wait."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:  # `multihost_utils` has a less clear message
        raise ConfigError(
            f"the processes have {', '.join(str(counts[i]) for i in sorted(counts))} devices: give "
            "all as many, by JAX_LOCAL_DEVICE_IDS or by the launcher's options"
        )
    if len(counts) > 1:
        multihost_utils.sync_global_devices("fedjax_bn")


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Returns whether this is process 0, or the only one."""
    return not _several() or jax.process_index() == 0


def number() -> str:
    """Returns " (process 1 of 2)"; "" if there is only one."""
    return f" (process {jax.process_index()} of {jax.process_count()})" if _several() else ""


def by_first(act: Callable[[], Any]) -> Any:
    """Calls a function in process 0 and returns its result in all processes.

    All processes must call it, in the same order, outside of other threads.

    Args:
      act: must return a value that JSON can hold.

    Raises:
      UserError: as `act`, in all processes.
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


def require_same(what: str, value: Any) -> None:
    """Raises ConfigError in all processes if one has another value than process 0.

    All processes must call it, in the same order.

    Args:
      what: the value's name in the error.
      value: anything that JSON can hold.
    """
    if not _several():
        return
    # Digests all have the same size, which a collective needs.
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if others := [i for i, row in enumerate(digests) if (row != digests[0]).any()]:
        raise ConfigError(
            f"{what} of process {others[0]} is not that of process 0: give all the same command, "
            "and let them read the same files"
        )


def leave(status: int) -> None:
    """Ends this process after a fault if it is one of several, else does nothing.

    A normal exit would let `jax.distributed` wait for the processes that wait for this one.
    """
    if _several():
        _go_last()
        os._exit(status)


def _go_last() -> None:
    """Lets process 0 end last: as soon as its service is gone, JAX aborts the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    if first():
        time.sleep(_GRACE)
