"""Several processes as one program: whether `jax.distributed` is asked, and what it is told.

The flag --distributed says that this process is one of several. JAX itself finds the others on
SLURM (a task each GPU), under Open MPI and on Cloud TPUs; elsewhere three variables name them.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping

import jax

from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.processes.coordinator import reach
from fedjax_bn.run.processes.together import watch

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# What a launcher sets to how many tasks it started, srun and mpirun.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_HEARTBEAT = 100  # seconds of silence; `processes` says sooner and better who is lost


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
    watch()


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
    while True:
        try:
            reach(address)
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
