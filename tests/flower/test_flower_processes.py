"""A SuperLink and SuperNodes in processes of their own, over TLS with registered keys."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import runs

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.host import Host
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.settings import config_of
from fedjax_bn.training import checkpoint
from flower_apps import CONFIG, assert_same, simulated

pytestmark = pytest.mark.slow
on_linux = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="/proc shows how a process was started"
)
SCAFFOLD = "method=scaffold,share=all_but_batch_norm"
START = ("start", "-n", "2", 'report="sizes,losses"')
LATE = 60.0  # seconds for which a round waits for a client that is slow or dead
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
        if first + count < 65536 and not any(map(listens, range(first, first + count))):
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


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
    """Starts a SuperNode, and starts it again until the SuperLink accepts it.

    For up to a minute the SuperLink takes a SuperNode that was killed to be online.
    """
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


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A started federation of two clients."""
    folder = tmp_path_factory.mktemp("federation")
    app = folder / "app"
    shutil.copytree(LAUNCH, app)
    (app / "hospitals" / "client.py").write_text(CLIENT)
    certificates = folder / "runs" / "certificates"
    keys = [LAUNCH / "certificates.sh", certificates, "127.0.0.1", "--nodes", "3"]
    subprocess.run(keys, check=True)  # one more than clients, for a liar
    data = {
        f"{d.name}__{part}_{kind}": getattr(getattr(d, part), kind)
        for d in runs.DATA.domains[:2]
        for part in ("train", "validation", "test")
        for kind in ("images", "labels")
    }
    np.savez(folder / "tiny.npz", **data)
    text = CONFIG.replace('"tiny", "none", "cow,dog"', f'"npz", "{folder / "tiny.npz"}", ""')
    (app / "config.py").write_text(text)
    paths = [str(runs.ROOT), str(runs.ROOT / "tests" / "support")]
    environment = os.environ | {
        "FEDERATION": str(folder / "runs"),
        "PORT": str(free_ports(5)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(paths),
        "FLWR_TELEMETRY_ENABLED": "0",  # what calls home waits for an answer at the end
        "JAX_ENABLE_X64": "true",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    made = Federation(folder, app, environment)
    call(made, *START)
    yield made
    call(made, "stop")


def checkpoint_of(workdir: Path, number: int) -> Path:
    """The last thing that the server writes of a round; a kill before it makes it play it again."""
    return workdir / "checkpoints" / "latest" / str(number)


def behind(federation, workdir, changes):
    """What the server has kept in its workdir, and the federation's name."""
    config = config_of("config.py", changes, federation.app)
    about = json.loads((workdir / "config.json").read_text())
    order = Order(about["data"], config.method, 0, 2, about["sizes"]["longest"], False)
    like = jax.eval_shape(Host(config, order, about["samples"]).start)
    latest = any((workdir / "checkpoints" / "latest").iterdir())
    kind = "latest" if latest else "selected"  # which was the last round too
    with checkpoint.open_folder(workdir / "checkpoints" / kind, keep=2) as manager:
        return checkpoint.restore(manager, like), order.federation


def assert_simulated(federation, workdir, changes, more=""):
    """The server and the clients have kept the end of the simulation with `changes + more`."""
    with jax.numpy_dtype_promotion("standard"):
        kept, name = behind(federation, workdir, changes)
        state, _ = simulated(federation.app, changes + more)
    assert_same(federation.folder / "runs", kept, name, state)


@pytest.mark.parametrize("method", ["fedbn", "fedcd"])
def test_over_processes_the_numbers_are_those_of_the_simulation(x64, federation, method):
    workdir, changes = federation.folder / f"server-{method}", f"method={method}"
    process = start(federation, workdir, changes)
    wait_for_rounds(process, workdir, 2)
    process.communicate(timeout=LIMIT)
    assert_simulated(federation, workdir, changes)


def test_after_a_power_cut_in_the_middle_the_same_command_ends_with_the_same_numbers(
    x64, federation
):
    """SuperLink, SuperNodes, ServerApp and ClientApps are all killed after the first round."""
    workdir, changes = federation.folder / "server-killed", f"{SCAFFOLD},rounds=2"
    process = start(federation, workdir, changes)
    wait_for_rounds(process, workdir, 1)
    kill(process.pid, *pids_of(federation).values())
    process.communicate()
    before = len(records_in(workdir))
    call(federation, "stop")
    call(federation, *START)
    process = start(federation, workdir, changes)
    wait_for_rounds(process, workdir, 2)
    process.communicate(timeout=LIMIT)
    assert before == 1
    assert_simulated(federation, workdir, changes)


@on_linux
def test_after_the_superlink_alone_is_killed_the_same_commands_end_with_the_same_numbers(
    x64, federation
):
    """The SuperNodes stay, and find the SuperLink again; their keys stay registered."""
    workdir, changes = federation.folder / "server-superlink", f"{SCAFFOLD},rounds=2"
    process = start(federation, workdir, changes)
    wait_for(checkpoint_of(workdir, 1).exists, process)
    pids = pids_of(federation)
    command = command_of(pids["superlink"])
    kill(process.pid, pids["superlink"])
    process.communicate()
    before = records_in(workdir)
    begin(federation, "superlink", command)
    wait_for(lambda: listens(int(federation.environment["PORT"])))
    process = start(federation, workdir, changes)
    wait_for_rounds(process, workdir, 2)
    process.communicate(timeout=LIMIT)
    assert records_in(workdir)[:1] == before
    assert not any(ended(pids[name]) for name in ("client-0", "client-1"))
    assert not any("left_out" in record for record in records_in(workdir))
    assert_simulated(federation, workdir, changes)


@on_linux
def test_who_is_slow_or_dies_misses_its_round_and_the_numbers_are_those_of_a_simulation_without_it(
    x64, federation, tmp_path
):
    """Client 1 answers round 1 too late; client 0 is killed in round 2 and returns with its key."""
    folder = federation.folder
    workdir, changes = folder / "server-held", f"{SCAFFOLD},rounds=4"
    places = [folder / "runs" / f"client-{k}" for k in range(2)]
    holds = [places[1] / "hold-1", places[0] / "hold-2", places[1] / "hold-3"]
    for hold in holds:
        hold.parent.mkdir(exist_ok=True)
        hold.touch()
    process = start(federation, workdir, changes, **{"minimum": 1, "time-limit": LATE})
    wait_for_rounds(process, workdir, 1)
    holds[0].unlink()
    wait_for((places[0] / "held-2").exists, process)  # it has trained, and not answered
    pid = pids_of(federation)["client-0"]
    command = command_of(pid)
    kill(pid)
    wait_for_rounds(process, workdir, 2)
    join(federation, "client-0", command)
    for hold in holds[1:]:  # client 1 waits in round 3, so that there is another
        hold.unlink()
    wait_for_rounds(process, workdir, 4)
    process.communicate(timeout=LIMIT)

    records = records_in(workdir)
    left_out = [record.get("left_out", {}) for record in records]
    assert left_out[0] == {"client-1": "it did not answer in time"}
    assert list(left_out[1]) == ["client-0"]
    assert list(left_out[2]) in ([], ["client-0"])
    assert left_out[3] == {}
    assert records[0]["seconds"] > LATE
    # One attempt each, or two on a machine so busy that a task takes a minute.
    assert max(record["seconds"] for record in records[:2]) < 3 * LATE
    assert not any("refused" in record for record in records)
    clients = json.loads((workdir / "clients.json").read_text())
    keys = [fingerprint(folder / "runs" / "certificates" / f"node-{k}.pub") for k in range(2)]
    assert [clients[str(k)]["key"] for k in range(2)] == keys
    names = ("client-0", "client-1")
    there = [[str(k) for k, name in enumerate(names) if name not in out] for out in left_out]
    (tmp_path / "trace.txt").write_text("".join(f"{','.join(row)}\n" for row in there))
    assert_simulated(
        federation, workdir, changes, f",participation=uniform:trace={tmp_path / 'trace.txt'}"
    )


@pytest.mark.parametrize(
    ("authority", "key", "why"),
    [
        ("right", "strange", "Failed to activate SuperNode"),
        ("strange", "right", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_client_without_a_registered_key_or_with_a_wrong_certificate_is_refused(
    federation, tmp_path, authority, key, why
):
    folder, environment = federation.folder, federation.environment
    made = {"right": folder / "runs" / "certificates", "strange": tmp_path / "strange"}
    subprocess.run(
        [LAUNCH / "certificates.sh", made["strange"], "127.0.0.1", "--nodes", "1"], check=True
    )
    address = f"127.0.0.1:{environment['PORT']}"
    own = str(free_ports(1))
    command = ["flower-supernode", "--superlink", address, "--host", "127.0.0.1", "--port", own]
    command += ["--root-certificates", str(made[authority] / "ca.crt"), "--max-retries", "1"]
    command += ["--auth-supernode-private-key", str(made[key] / "node-0")]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    log = tmp_path / "log"  # no pipe, which its own children would hold open
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment | {"PATH": path}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            assert process.wait(timeout=LIMIT) != 0
        finally:
            process.kill()
    assert why in log.read_text()
