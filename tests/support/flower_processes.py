"""A SuperLink and SuperNodes in processes of their own: starting, killing, waiting for them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import runs

LAUNCH = runs.ROOT / "launch" / "flower"
LIMIT = 900  # seconds for a federation of two rounds
NAMES = ("superlink", "client-0", "client-1", "liar")  # in the order of `pids`, with these logs
JOINED = "SuperNode ID: "
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
# A client whose answer waits for as long as its folder has a file hold-ROUND.
CLIENT = """
import time
from pathlib import Path

from flwr.clientapp import ClientApp

from fedjax_bn.flower import client_app
from fedjax_bn.flower.messages import Order, record_in

inner = client_app(Path(__file__).parents[1])
app = ClientApp()
app.query()(inner)
app.evaluate()(inner)


@app.train()
def train(message, context):
    number = record_in(message.content, Order).round
    answer = inner(message, context)
    folder = Path(context.node_config["folder"])
    while (folder / f"hold-{number}").exists():
        (folder / f"held-{number}").touch()
        time.sleep(0.2)
    return answer
"""


class Federation(NamedTuple):
    """A started federation: its folder, its app, and the environment of its processes."""

    folder: Path
    app: Path
    environment: dict[str, str]


def free_ports(count: int) -> int:
    """The first of some ports in a row that no process listens on."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        taken = []
        for port in range(first, first + count):
            with socket.socket() as one:
                taken.append(one.connect_ex(("127.0.0.1", port)) == 0)
        if not any(taken) and first + count < 65536:
            return first


def call(federation, *arguments):
    """What `local.sh` prints; fails where it does."""
    _, app, environment = federation
    script = [str(app / "local.sh"), *arguments]
    done = subprocess.run(script, cwd=app, env=environment, timeout=LIMIT, **PIPES)
    assert done.returncode == 0, done.stdout
    return done.stdout


def start(federation, workdir, changes, **more):
    """Starts a run, and returns the process that shows its log."""
    _, app, environment = federation
    config = {"config": "config.py", "changes": changes, "workdir": str(workdir)} | more
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    command = [str(app / "local.sh"), "run", "--run-config", text]
    return subprocess.Popen(command, cwd=app, env=environment, **PIPES)


def records_in(workdir: Path) -> list[dict]:
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(moment, process=None):
    """Until `moment()` holds; fails if it does not, or if the run's process ends before."""
    end = time.monotonic() + LIMIT
    while not moment():
        assert process is None or process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.5)


def wait_for_rounds(process, workdir, rounds):
    wait_for(lambda: len(records_in(workdir)) >= rounds, process)


def wait_for_port(federation):
    """Until the SuperLink listens."""

    def listens():
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", int(federation.environment["PORT"]))) == 0

    wait_for(listens)


def pids_of(federation) -> dict[str, int]:
    """The processes of SuperLink and SuperNodes by name."""
    found = (federation.folder / "runs" / "pids").read_text().split()
    return dict(zip(NAMES, map(int, found), strict=False))


def log_of(federation, name: str) -> Path:
    return federation.folder / "runs" / "logs" / f"{name}.log"


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    children = [child for child, parent in pairs if parent == pid]
    return [one for child in children for one in (child, *descendants(child))]


def kill(*pids: int) -> None:
    """Kills processes and those that they have started, and waits for their end."""
    every = [*pids, *(child for pid in pids for child in descendants(pid))]
    for one in every:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    wait_for(lambda: all(map(ended, every)))  # until then a port is taken


def shown(pid: int) -> str:
    """The state of a process and its command; "" after its end."""
    command = ["ps", "-ww", "-o", "stat=,args=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def ended(pid: int) -> bool:
    return shown(pid)[:1] in ("", "Z")


def command_of(pid: int) -> dict:
    """How a process was started, for `begin`."""
    place = Path(f"/proc/{pid}")
    command, environment = (
        (place / name).read_text().split("\0")[:-1] for name in ("cmdline", "environ")
    )
    pairs = dict(pair.split("=", 1) for pair in environment)
    return {"args": command, "env": pairs, "cwd": os.readlink(place / "cwd")}


def begin(federation, name: str, command: dict) -> int:
    """Starts a SuperLink or a SuperNode, which `stop` ends; its lines are added to its log."""
    script = f'"$@" >>"{log_of(federation, name)}" 2>&1 & echo $!'
    given = command | {"args": ["bash", "-c", script, "bash", *command["args"]]}
    pid = int(subprocess.run(**given, stdout=subprocess.PIPE, check=True).stdout)
    known = pids_of(federation) | {name: pid}
    (federation.folder / "runs" / "pids").write_text("".join(f"{one}\n" for one in known.values()))
    return pid


def join(federation, name: str, command: dict) -> None:
    """Starts a SuperNode until the SuperLink no longer takes the killed one to be online."""
    log, end = log_of(federation, name), time.monotonic() + LIMIT
    log.touch()
    before = log.read_text().count(JOINED)
    pid = begin(federation, name, command)
    while log.read_text().count(JOINED) == before:
        assert time.monotonic() < end, log.read_text()[-4000:]
        if ended(pid):
            pid = begin(federation, name, command)
        time.sleep(0.5)


def fingerprint(key: Path) -> str:
    command = ["ssh-keygen", "-lf", key]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]
