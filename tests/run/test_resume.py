"""A workdir: what continues a run in it, and who may use it meanwhile."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from fedjax_bn import main
from fedjax_bn.arguments.errors import ConfigError, WorkdirError
from fedjax_bn.federation import global_variables
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run import train
from fedjax_bn.run.config import flatten
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.method import follows_rounds
from fedjax_bn.run.files import ownership
from fedjax_bn.run.files.ownership import claim
from fedjax_bn.training import workdir
from fedjax_bn.training.callbacks.progress import Progress
from fedjax_bn.training.callbacks.tensorboard import TensorBoard

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


@pytest.fixture
def straight(tmp_path) -> Path:
    return runs.finished(tmp_path / "straight")


def assert_same_end(folder: Path, straight: Path, config) -> None:
    """Same bits of all checkpointed leaves, same records, same summary but for the clock."""
    like, ends = jax.eval_shape(train.prepare(config)[2]), []
    for place in (folder, straight):
        records = [*runs.lines(place), workdir.read_json(place / "summary.json")]
        steps = [runs.steps(place, kind) for kind in ("latest", "selected")]
        ends.append((steps, [*map(runs.without_times, records)]))
    assert ends[0] == ends[1]
    assert [record["round"] for record in records[:-1]] == list(range(1, config.rounds + 1))
    assert steps[1] == [records[-1]["selected_round"]]
    for kind in ("latest", "selected"):
        states = [runs.saved(place, like, kind) for place in (folder, straight)]
        jax.tree.map(np.testing.assert_array_equal, *states)


CONFIG = """
from fedjax_bn.run.config import base

def get_config():
    config = base()
    config.model, config.target, config.mesh.clients = "MLP", "fax", 1
    config.rounds, config.eval_every, config.checkpoint_every = 12, 3, 2
    config.batch_size, config.local_epochs = 8, 40  # rounds long enough to be killed within
    return config
"""


def stop_at(number: signal.Signals, moment: Callable[[], bool], process: subprocess.Popen) -> None:
    """Stops a run with a signal as soon as `moment()` holds."""
    while not moment():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.0005)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "give the same command to continue" in errors
        assert "Traceback" not in errors


@pytest.mark.slow  # kills at every write, in this process, are in test_power_cut.py
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stopped_at_several_moments_a_run_ends_with_the_bits_of_a_straight_run(tmp_path):
    file, folder, straight = (tmp_path / name for name in ("tiny.py", "stopped", "straight"))
    file.write_text(CONFIG)
    command = [sys.executable, "-m", "fedjax_bn.main", f"--config={file}"]
    # Compiling leaves the time in which the run is stopped.
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    options = {"cwd": runs.ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}

    def started(place: Path) -> subprocess.Popen:
        return subprocess.Popen([*command, f"--workdir={place}"], **options)

    def rounds() -> int:
        return len(runs.lines_written(folder))

    other = started(straight)
    for number, moment in [
        (signal.SIGKILL, (folder / "config.json").exists),  # before compilation
        (signal.SIGINT, lambda: rounds() >= 1),
        (signal.SIGKILL, lambda: any(folder.glob("checkpoints/latest/*tmp*"))),
        (signal.SIGTERM, lambda: rounds() >= 10),
        (signal.SIGKILL, lambda: rounds() == 12),  # after the last round
    ]:
        stop_at(number, moment, started(folder))
        assert not (folder / "summary.json").exists()
    assert runs.command(f"--config={file}", f"--workdir={folder}") == 0
    errors = other.communicate(timeout=120)[1]
    assert other.returncode == 0, errors
    assert_same_end(folder, straight, read(str(file)))
    assert runs.scalars(folder) == runs.expected_scalars(folder)


def test_a_stop_request_saves_the_round_exits_with_130_and_says_how_to_go_on(
    tmp_path, straight, monkeypatch, capsys
):
    monkeypatch.setattr(main, "read", lambda source, changes: runs.config())
    arguments = ("--config", "quickstart", "--workdir", str(tmp_path / "stopped"))
    real = TensorBoard.on_round_end

    def raising(events, round, *rest):
        real(events, round, *rest)
        if round == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(TensorBoard, "on_round_end", raising)
        assert runs.command(*arguments) == 130
    assert "stopped after round 3 of 6" in capsys.readouterr().err
    assert max(runs.steps(tmp_path / "stopped")) == 3
    assert runs.command(*arguments) == 0
    assert_same_end(tmp_path / "stopped", straight, runs.config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.learning_rate": 0.02}, r"optimizer\.learning_rate \(0.01 there, 0.02 now\)"),
        ({"rounds": 5}, "has made 6 rounds already"),
        ({"rounds": 7, "optimizer.schedule": "cosine"}, r"optimizer\.schedule"),
    ],
)
def test_a_workdir_of_another_configuration_is_refused_naming_the_keys(straight, changes, message):
    before = runs.files(straight)
    with pytest.raises(WorkdirError, match=message):
        runs.run(straight, **changes)
    assert runs.files(straight) == before


def test_a_run_with_other_random_numbers_of_jax_is_refused_naming_the_option(straight):
    about = workdir.read_json(straight / "config.json")
    about["machine"]["options"]["threefry_partitionable"] = False
    with pytest.raises(WorkdirError, match="JAX_THREEFRY_PARTITIONABLE "):
        claim(straight, dict(flatten(runs.config(rounds=99))), about, write=False)


def test_what_bits_depend_on_is_recorded_and_what_has_changed_is_said(straight):
    about = workdir.read_json(straight / "config.json")
    machine, cores = about["machine"], len(os.sched_getaffinity(0))
    expected = {"backend": jax.default_backend(), "cores": cores, "cpu": machine["cpu"] or None}
    assert machine | expected | {"device_kind": jax.devices()[0].device_kind} == machine
    assert machine["environment"]["XLA_FLAGS"] == os.environ.get("XLA_FLAGS", "")
    assert machine["options"]["enable_x64"] is False

    machine |= {"cores": 96, "environment": {"XLA_FLAGS": "--fast", "NPROC": ""}}
    (straight / "config.json").write_text(json.dumps(about))
    (straight / "summary.json").unlink()
    said = []
    train.run(runs.config(), straight, say=said.append)
    (sentence,) = (text for text in said if "cores (96" in text)
    assert f"cores (96 there, {cores} now)" in sentence
    assert "environment.XLA_FLAGS ('--fast' there, " in sentence


@pytest.mark.parametrize("position", [0, 3])
def test_other_data_are_refused_be_they_of_a_client_or_the_unseen_one(
    straight, monkeypatch, position
):
    data = runs.dataset()
    data.domains[position].test.labels[:] = 0
    monkeypatch.undo()
    runs.install(monkeypatch, data)
    with pytest.raises(WorkdirError, match="the data themselves"):
        runs.run(straight)


NAMES = ("ditto", "apfl", "fedala", "fedawa", "fedbabu", "feddyn", "fedrep", "fedrod", "gperxan")
OTHERS = [{"method": name} for name in NAMES]
OTHERS += [
    {"method": "fedavg", "model": "MLP:norm=group", "share": rule}
    for rule in ("all_but_norms", "all_but_head", "only_head")
]
OTHERS += [{"frozen": "dense1,norm1"}, {"privacy": "server:clip=0.5:noise=2.0"}]


@pytest.mark.parametrize("changes", [{}, *(pytest.param(c, marks=SLOW) for c in OTHERS)])
def test_a_run_that_is_given_more_rounds_ends_with_the_bits_of_a_straight_one(tmp_path, changes):
    if "privacy" in changes:
        pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    runs.run(tmp_path / "straight", rounds=4, **changes)
    for rounds in (2, 4):
        runs.run(tmp_path / "further", rounds=rounds, **changes)
    config = runs.config(rounds=4, **changes)
    assert_same_end(tmp_path / "further", tmp_path / "straight", config)


@pytest.mark.parametrize(
    "plan", [{"optimizer.schedule": "cosine"}, {"weigh": "generalization_adjustment"}]
)
def test_a_plan_that_follows_from_the_number_of_rounds_is_not_taken_further(tmp_path, plan):
    ((key, value),) = plan.items()
    flat = dict(flatten(runs.config(rounds=3, **plan)))
    claim(tmp_path, flat, {"data": "x"})
    follows = follows_rounds(runs.config(rounds=4, **plan))
    with pytest.raises(WorkdirError, match=key):
        claim(tmp_path, flat | {"rounds": 4}, {"data": "x"}, follows)
    assert not follows_rounds(runs.config(**{key: f"{value}:rounds=3"}))


@pytest.mark.slow
def test_a_run_starts_from_the_model_of_a_finished_one(straight, tmp_path):
    state = runs.saved(straight, jax.eval_shape(train.prepare(runs.config())[2]), "selected")
    changes = {"start_from": str(straight), "method": "fedprox"}
    start = train.prepare(runs.config(**changes))[2]()
    expected = global_variables(jax.tree.map(jnp.asarray, state))
    jax.tree.map(np.testing.assert_array_equal, global_variables(start), expected)
    runs.run(tmp_path / "new", rounds=1, **changes)
    about = workdir.read_json(tmp_path / "new" / "config.json")
    assert about["config"]["start_from"] == str(straight)
    assert about["start_from"]["round"] == runs.steps(straight, "selected")[-1]
    (tmp_path / "new" / "summary.json").unlink()
    runs.run(tmp_path / "new", rounds=1, **changes)  # of the same model
    with pytest.raises(ConfigError, match="start_from"):
        train.prepare(runs.config(start_from=str(tmp_path / "nothing")))


OWNER = f"process {os.getpid()} on {socket.gethostname()}"

HOLD = """
import sys, time
from pathlib import Path
from fedjax_bn.run.files.ownership import owned
with owned(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_second_run_of_a_workdir_is_refused_naming_the_owner_and_changes_nothing(
    tmp_path, monkeypatch
):
    folder, refused = tmp_path / "run", []
    real = Progress.on_round_end

    def meanwhile(progress, round, *rest):
        if round == 2 and not refused:
            refused.append("")
            before = runs.lines_written(folder)
            with pytest.raises(WorkdirError) as error:
                runs.run(folder)
            refused[:] = [str(error.value)]
            assert runs.lines_written(folder) == before
        return real(progress, round, *rest)

    monkeypatch.setattr(Progress, "on_round_end", meanwhile)
    runs.run(folder)
    assert [line["round"] for line in runs.lines(folder)] == [1, 2, 3, 4, 5, 6]
    assert OWNER in refused[0]
    assert str(folder) in refused[0]


def test_a_kill_releases_the_workdir(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=runs.ROOT, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"mine\n"
        by_it = pytest.raises(WorkdirError, match=f"process {holder.pid} on ")
        with by_it, ownership.owned(tmp_path):
            pytest.fail("two own it")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with ownership.owned(tmp_path):
        assert json.loads((tmp_path / ownership.OWNER).read_text())["pid"] == os.getpid()
    assert not (tmp_path / ownership.OWNER).exists()


def test_an_evaluation_and_a_report_wait_for_the_workdir_and_are_refused_when_it_is_held(
    tmp_path, monkeypatch
):
    finished = runs.finished(tmp_path / "finished")
    monkeypatch.setattr(ownership, "PATIENCE", 0.0)
    with ownership.owned(finished):
        with pytest.raises(WorkdirError, match=OWNER):
            train.train_all(runs.config(), finished, write_report)
        with pytest.raises(WorkdirError, match=OWNER):
            evaluate_finished.run(finished, evaluate_finished.Request(), say=str)
    assert not (finished / "evaluations").exists()
