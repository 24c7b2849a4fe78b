"""One process owns a workdir while it writes there."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run import train
from fedjax_bn.run.files import ownership
from fedjax_bn.training.callbacks.progress import Progress

OWNER = f"process {os.getpid()} on {socket.gethostname()}"

HOLD = """
import sys, time
from pathlib import Path
from fedjax_bn.run.files.ownership import owned
with owned(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


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
