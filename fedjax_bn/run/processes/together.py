"""Several processes as one run: how they find each other, what process 0 does for all, the end.

The flag --distributed says that this process is one of several. JAX itself finds the others on
SLURM (a task each GPU), under Open MPI and on Cloud TPUs; elsewhere three variables name them.

All compute; process 0 alone writes to the workdir and prints. The others learn from it what only
it can know, such as what the workdir holds (`by_first`), and its errors too. They talk through
collectives of their devices (`multihost_utils`). A process that fails ends at once; where one is
lost, a collective fails in the others, or JAX ends them after `_HEARTBEAT`. The same command
continues from the last checkpoint.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_bn.run import errors
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.processes import stop

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# What a launcher sets to how many tasks it started, srun and mpirun.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_HEARTBEAT = 60  # seconds of silence after which JAX takes a process for lost
_GRACE = 4.0  # seconds that the others have to end before process 0 does


def join(wanted: bool | None, timeout: int = 300) -> None:
    """Connects this process with the others of its run, before anything else is asked of JAX.

    Args:
      wanted: the flag; True: connect. False: train alone, whatever the launcher says. None: train
        alone, but refuse to where a launcher has started several processes.
      timeout: seconds to wait for the others.

    Raises:
      ConfigError: the variables do not fit together, none of the launchers that JAX knows is
        there, or the others cannot be reached.
    """
    if wanted:
        _connect(read_place(os.environ), timeout)
    elif wanted is None:
        _refuse_many(os.environ)


def read_place(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """The coordinator's address, the number of processes and this one's, from the variables.

    Returns:
      None where none of the variables is set.

    Raises:
      ConfigError: one is missing or not in its range.
    """
    given = {name: environment[name] for name in (ADDRESS, COUNT, NUMBER) if environment.get(name)}
    if not given:
        return None
    missing = [name for name in (ADDRESS, COUNT, NUMBER) if name not in given]
    if missing:
        raise ConfigError(
            f"{' and '.join(given)} is set, but not {' and '.join(missing)}: set all three, "
            f"{ADDRESS} to HOST:PORT of process 0, or none where JAX knows the launcher"
        )
    address = given[ADDRESS]
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"{ADDRESS}={address!r} must be HOST:PORT of process 0")
    count, number = (_whole(name, given[name]) for name in (COUNT, NUMBER))
    if not 0 <= number < count:
        raise ConfigError(
            f"{NUMBER}={number} must be at least 0 and below {COUNT}={count}: count from 0"
        )
    return address, count, number


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number")
    return int(text)


def _connect(place: tuple[str, int, int] | None, timeout: int) -> None:
    """Calls `jax.distributed.initialize`; what it answers by ending the process is asked before.

    Raises:
      ConfigError: as `join`.
    """
    address, count, number = place or (None, None, None)
    if place:
        (_check_free if number == 0 else _wait_for)(place[0], timeout)
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            # Else JAX asks Kubernetes for what the variables already say.
            cluster_detection_method="deactivate" if place else None,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except ValueError as error:
        raise ConfigError(
            f"--distributed: JAX finds no launcher that it knows ({error}): set {ADDRESS}, {COUNT} "
            f"and {NUMBER}, as launch/local.sh does, or leave --distributed out to train alone"
        ) from error
    # JAX has just taken the signal for a service of its own; the program stops by it.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    _meet()


def _meet() -> None:
    """Connects the devices of all, while all processes are here: they wait a minute for each other.

    Raises:
      ConfigError: one has other devices than the others, which `multihost_utils` does not take.
    """
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"the processes have {', '.join(str(counts[i]) for i in sorted(counts))} devices: give "
            "all as many, by JAX_LOCAL_DEVICE_IDS or by how the launcher shares them out"
        )
    if _several():
        multihost_utils.sync_global_devices("fedjax_bn")


def _check_free(address: str, timeout: int) -> None:
    """Raises ConfigError if this host has no such port to give."""
    del timeout
    port = int(address.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"process 0 cannot listen at {address} ({error}): give another port in {ADDRESS}"
        ) from error


def _wait_for(address: str, timeout: int) -> None:
    """Raises ConfigError if process 0 does not listen there in time."""
    end = time.monotonic() + timeout
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"process 0 did not answer at {address} within {timeout} s ({error}): see "
                    f"whether it was started, and whether {ADDRESS} names its host"
                ) from error
        time.sleep(0.2)


def _refuse_many(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where processes that know nothing of each other would share a workdir."""
    found = [f"{name}={environment[name]}" for name in _TASKS if environment.get(name, "1") != "1"]
    found += [
        f"{name}={environment[name]}" for name in (ADDRESS, COUNT, NUMBER) if name in environment
    ]
    if found:
        raise ConfigError(
            f"this is one of several processes ({', '.join(found)}): give --distributed to train "
            "together, or --nodistributed where each has a workdir of its own"
        )


def first() -> bool:
    """Returns whether this is process 0, perhaps the only one."""
    return not _several() or jax.process_index() == 0


def number() -> str:
    """Returns " (process 1 of 2)", or nothing where there is one."""
    return f" (process {jax.process_index()} of {jax.process_count()})" if _several() else ""


def by_first(act: Callable[[], Any]) -> Any:
    """Calls a function in process 0 and returns its result in all processes.

    All processes must call it, in the same order, outside of other threads.

    Args:
      act: returns what JSON can write.

    Raises:
      UserError: as `act`, in all processes.
    """
    if not _several():
        return act()
    result: dict[str, Any] = {}
    if first():
        try:
            result = {"value": act()}
        except errors.UserError as error:
            result = {"error": type(error).__name__, "text": str(error)}
    result = json.loads(_of_first(json.dumps(result).encode()))
    if "error" in result:
        raise getattr(errors, result["error"])(result["text"])
    return result["value"]


def _of_first(content: bytes) -> bytes:
    """The bytes that process 0 has."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    # A few sizes only, for each of which a program is compiled.
    row = np.zeros(max(256, 1 << (size - 1).bit_length()), np.uint8)
    if first():
        row[:size] = np.frombuffer(content, np.uint8)
    return multihost_utils.broadcast_one_to_all(row)[:size].tobytes()


@contextmanager
def held_by_first(context: AbstractContextManager[None]) -> Iterator[None]:
    """A context that process 0 alone enters, and in which all are once it has."""
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(context))
        yield


def any_asked(stop: bool) -> bool:
    """Returns whether any process was asked to stop; `stop`: whether this one was."""
    return bool(multihost_utils.process_allgather(np.asarray(stop)).any()) if _several() else stop


def require_same(what: str, value: Any) -> None:
    """Raises ConfigError in all processes where one has another value than process 0.

    All processes must call it, in the same order.

    Args:
      what: the value's name in the error.
      value: anything that JSON can hold.
    """
    if not _several():
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if others := [i for i, row in enumerate(digests) if (row != digests[0]).any()]:
        raise ConfigError(
            f"{what} of process {others[0]} is not that of process 0: give all the same command, "
            "and let them read the same files"
        )


@contextmanager
def together() -> Iterator[None]:
    """A context in which an error ends this process at once, so that none waits for it."""
    try:
        yield
    except errors.UserError:
        raise  # `main.fail` says it, and leaves
    except Exception:
        if not _several():
            raise
        traceback.print_exc()
        _go_last()
        stop.end(f"this process failed, or one that it waited for is lost{number()}", 1)


def leave(status: int) -> None:
    """Ends this process for a fault; alone it does nothing.

    The way out of `jax.distributed` would wait for those that wait for this one.
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


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1
