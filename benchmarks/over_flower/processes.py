"""Runs a federation of processes over loopback, with TLS and registered keys (Linux).

It uses launch/flower/local.sh. CPU seconds are those of all processes below this one, Flower's
included, read when the server has written a round's line; so a round's share excludes the start.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from machine import cpu_seconds, megabytes, tree
from over_flower import write_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch" / "flower"
SUBREAPER = 36  # prctl's option to become the parent of descendants whose own parent has ended
# So many clients' processes train at once, so that 32 of them fit into memory. The others wait
# after importing Flower, whose heartbeat continues.
AT_ONCE = 4
IN_TURN = """
import fcntl, itertools, time
from pathlib import Path
while True:
    for number in range({count}):
        turn = open(Path("{folder}") / f"turn-{{number}}", "w")
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            turn.close()
    else:
        time.sleep(0.05)
        continue
    break
"""


class Measured(NamedTuple):
    """Figures of a round after the first, means over rounds."""

    seconds: float  # of the clock, from record to record
    cpu: float  # CPU seconds of all processes
    memory: float  # GB of all processes after the last round, shared pages counted once


def federate(clients: int, rounds: int, changes: str, echo: Path | None = None) -> Measured:
    """Runs one federation of `clients` SuperNodes, for at least 2 rounds, from start to end.

    `changes` are changes of the configuration; `echo` is an .npz of arrays that clients send back
    instead of training.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _make_app(folder, clients, echo)
        config = {"clients": clients, "minimum": clients, "time-limit": 900.0}
        config["config"] = str(echo) if echo else "config.py"
        config["changes"] = f"rounds={rounds}" + (f",{changes}" if changes and not echo else "")
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        script, environment = folder / "app" / "local.sh", _environment(folder)
        quiet = {"env": environment, "stdout": subprocess.DEVNULL}
        start = [script, "start", "-n", str(clients), 'report="sizes,losses"']
        subprocess.run(start, check=True, **quiet)
        run = subprocess.Popen([script, "run", "--run-config", text], **quiet)
        log, marks = folder / "runs" / "server" / "metrics.jsonl", []
        try:
            for number in range(1, rounds + 1):  # (seconds, CPU seconds) as each is recorded
                while not log.exists() or log.read_bytes().count(b"\n") < number:
                    if run.poll() is not None:
                        raise SystemExit(f"the run ended before round {number}: see the log above")
                    time.sleep(0.2)
                ended = os.times()  # of processes that have ended
                below = sum(map(sum, map(cpu_seconds, tree(os.getpid())[1:])))
                cpu = ended.children_user + ended.children_system + below
                marks.append((time.perf_counter(), cpu))
            memory = sum(map(megabytes, tree(os.getpid())[1:])) / 1e3
            run.wait()
        finally:
            run.kill()
            subprocess.run([script, "stop"], check=True, **quiet)
            with suppress(ChildProcessError):  # raised where no process below this one is left
                while True:
                    os.wait()
    first, last = np.array(marks[0]), np.array(marks[-1])
    return Measured(*(last - first) / (rounds - 1), memory)


def _make_app(folder: Path, clients: int, echo: Path | None) -> None:
    """Writes the app of launch/flower with the measured config, or with the echo in its modules."""
    shutil.copytree(LAUNCH, folder / "app")
    write_config(folder / "app", clients)
    for name in ("client", "server"):
        module = folder / "app" / "hospitals" / f"{name}.py"
        if echo:
            shutil.copyfile(Path(__file__).with_name(f"echo_{name}.py"), module)
        if name == "client":
            turns = IN_TURN.format(count=AT_ONCE, folder=folder)
            module.write_text(f"{turns}\n{module.read_text()}")


def _environment(folder: Path) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ports above are those of the SuperNodes; if one is taken, its SuperNode reports it and ends.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    runs = {"FEDERATION": str(folder / "runs"), "PORT": str(min(port, 60000))}
    return os.environ | runs | {"PATH": path, "PYTHONPATH": str(ROOT)}


@contextmanager
def arrays_of(clients: int, changes: str) -> Iterator[Path]:
    """Yields an .npz of the arrays that the measured federation broadcasts."""
    import jax

    from fedjax_bn.engine.named_arrays import to_named
    from fedjax_bn.federation import broadcast_of
    from fedjax_bn.run.experiment.build import prepare
    from over_flower import configured

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_config(folder, clients)
        _, _, start = prepare(configured(folder, changes))
        np.savez(folder / "arrays.npz", **to_named(jax.device_get(broadcast_of(start()))))
        yield folder / "arrays.npz"
