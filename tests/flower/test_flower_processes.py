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

import jax
import numpy as np
import pytest

import runs

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower.host import open_host
from fedjax_bn.flower.server import _facts_of
from fedjax_bn.flower.settings import config_of, run_of
from fedjax_bn.run.files import checkpoint
from flower_apps import CONFIG, assert_same, simulated

pytestmark = pytest.mark.slow
LAUNCH = runs.ROOT / "launch" / "flower"
METHODS = ("fedbn", "scaffold", "fedcd")
LIMIT = 900  # seconds for a federation of two rounds
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


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


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A started federation of two clients: its folder, its app, and the environment."""
    folder = tmp_path_factory.mktemp("federation")
    app = folder / "app"
    shutil.copytree(LAUNCH, app)
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
        "PORT": str(free_ports(4)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(paths),
        "FLWR_TELEMETRY_ENABLED": "0",  # what calls home waits for an answer at the end
        "JAX_ENABLE_X64": "true",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    call(app, environment, "start", "-n", "2", 'report="sizes,losses"')
    yield folder, app, environment
    call(app, environment, "stop")


def call(app, environment, *arguments):
    """What `local.sh` prints; fails where it does."""
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


def rounds_in(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(process, workdir, rounds):
    """Until the workdir has so many rounds; fails with the log where that never happens."""
    end = time.monotonic() + LIMIT
    while rounds_in(workdir) < rounds:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < end, "the rounds never came"
        time.sleep(0.5)


def behind(federation, workdir, changes):
    """What the server has kept in its workdir, and the federation's name."""
    _, app, _ = federation
    config = config_of("config.py", changes, app)
    run = run_of({"config": "config.py", "changes": changes, "clients": 2})
    order, form = _facts_of(workdir, run, config.method)
    like = jax.eval_shape(open_host(config, run, order, form).start)
    latest = any((workdir / "checkpoints" / "latest").iterdir())
    kind = "latest" if latest else "selected"  # which was the last round too
    with checkpoint.open_folder(workdir / "checkpoints" / kind, keep=2) as manager:
        return checkpoint.restore(manager, like), order.federation


@pytest.mark.parametrize("method", METHODS)
def test_over_processes_the_numbers_are_those_of_the_simulation(x64, federation, method):
    folder, app, _ = federation
    workdir, changes = folder / f"server-{method}", f"method={method}"
    process = start(federation, workdir, changes)
    wait_for(process, workdir, 2)
    process.communicate(timeout=LIMIT)
    with jax.numpy_dtype_promotion("standard"):
        kept, name = behind(federation, workdir, changes)
        state, _ = simulated(app, changes)
    assert_same(folder / "runs", kept, name, state)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    children = [child for child, parent in pairs if parent == pid]
    return [one for child in children for one in (child, *descendants(child))]


def test_after_a_power_cut_in_the_middle_the_same_command_ends_with_the_same_numbers(
    x64, federation
):
    """SuperLink, SuperNodes, ServerApp and ClientApps are all killed after the first round."""
    folder, app, environment = federation
    workdir, changes = folder / "server-killed", "method=scaffold,share=all_but_batch_norm,rounds=3"
    process = start(federation, workdir, changes)
    wait_for(process, workdir, 1)
    pids = [int(pid) for pid in (folder / "runs" / "pids").read_text().split()]
    pids += [process.pid]
    for one in [*pids, *(child for pid in pids for child in descendants(pid))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.communicate()
    before = rounds_in(workdir)
    call(app, environment, "stop")
    call(app, environment, "start", "-n", "2", 'report="sizes,losses"')
    process = start(federation, workdir, changes)
    wait_for(process, workdir, 3)
    process.communicate(timeout=LIMIT)
    assert 1 <= before < 3
    with jax.numpy_dtype_promotion("standard"):
        kept, name = behind(federation, workdir, changes)
        state, _ = simulated(app, changes)
    assert_same(folder / "runs", kept, name, state)


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
    folder, app, environment = federation
    made = {"right": folder / "runs" / "certificates", "strange": tmp_path / "strange"}
    subprocess.run(
        [app / "certificates.sh", made["strange"], "127.0.0.1", "--nodes", "1"], check=True
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
