"""How several processes find each other: whether `jax.distributed` is asked, and for what.

The flag --distributed says that this process is one of several. JAX itself finds the others on
SLURM (a task each GPU), under Open MPI and on Cloud TPUs; elsewhere three variables name them.
"""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping

import jax
from jax.experimental import multihost_utils

from fedjax_bn.run.errors import ConfigError

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# What a launcher sets to how many tasks it started, srun and mpirun.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_HEARTBEAT = 60  # seconds of silence after which JAX takes a process for lost, and ends the others


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
    """Reads the coordinator's address, the number of processes and this one's from the variables.

    Returns:
      None where none of the variables is set.

    Raises:
      ConfigError: one is missing or not in its range.
    """
    given = {name: environment[name] for name in (ADDRESS, COUNT, NUMBER) if environment.get(name)}
    if not given:
        return None
    if missing := [name for name in (ADDRESS, COUNT, NUMBER) if name not in given]:
        raise ConfigError(
            f"{' and '.join(given)} is set, but not {' and '.join(missing)}: set all three, "
            f"{ADDRESS} to HOST:PORT of process 0, or none where JAX knows the launcher"
        )
    host, _, port = given[ADDRESS].rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{ADDRESS}={given[ADDRESS]!r} must be HOST:PORT of process 0")
    for name in (COUNT, NUMBER):
        if not given[name].isdecimal():
            raise ConfigError(f"{name}={given[name]!r} must be a whole number")
    count, number = int(given[COUNT]), int(given[NUMBER])
    if number >= count:
        raise ConfigError(
            f"{NUMBER}={number} must be at least 0 and below {COUNT}={count}: count from 0"
        )
    return given[ADDRESS], count, number


def _connect(place: tuple[str, int, int] | None, timeout: int) -> None:
    """Calls `jax.distributed.initialize`, after what it would answer by ending the process.

    Raises:
      ConfigError: as `join`.
    """
    address, count, number = place or (None, None, None)
    if address:
        _check_free(address) if number == 0 else _wait_for(address, timeout)
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


def _check_free(address: str) -> None:
    """Raises ConfigError if process 0 cannot listen at this port of its host."""
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
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
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"process 0 did not answer at {address} within {timeout} s ({error}): see "
                    f"whether it was started, and whether {ADDRESS} names its host"
                ) from error
        time.sleep(0.2)


def _meet() -> None:
    """Connects the devices of all now: later, one may be busy longer than the others wait for it.

    Raises:
      ConfigError: the processes have unequal numbers of devices, which `multihost_utils` refuses.
    """
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"the processes have {', '.join(str(counts[i]) for i in sorted(counts))} devices: give "
            "all as many, by JAX_LOCAL_DEVICE_IDS or by how the launcher shares them out"
        )
    if len(counts) > 1:
        multihost_utils.sync_global_devices("fedjax_bn")


def _refuse_many(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where processes without a connection would share a workdir."""
    found = [f"{name}={environment[name]}" for name in _TASKS if environment.get(name, "1") != "1"]
    names = (ADDRESS, COUNT, NUMBER)
    found += [f"{name}={environment[name]}" for name in names if name in environment]
    if found:
        raise ConfigError(
            f"this is one of several processes ({', '.join(found)}): give --distributed to train "
            "together, or --nodistributed where each has a workdir of its own"
        )
