"""Runs of a sweep at a time: real processes that do what a test wants."""

import os
import shlex
import signal
import threading
import time
from pathlib import Path

import execute
import fedbn
import pytest
import sweep

from fedjax_bn.run.files.ownership import owned

ROOT = Path(__file__).parents[2]
ONLY = ("--only", "synthetic/*")
NAMES = [run.name for run in sweep.select(fedbn.SWEEP, ONLY[1])]
# A run: notes that it started, does what the test wants, and then has finished.
RUN = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
with (folder / ".starts").open("a") as file:
    file.write(f"{os.getpid()} {len(os.sched_getaffinity(0))}\\n")
tries = len((folder / ".starts").read_text().splitlines())
print("this is", folder.name)
"""
FINISH = "\n(folder / 'summary.json').write_text('{}')\n"


@pytest.fixture
def running(monkeypatch):
    """`running(code)`: what a run also does."""

    def doing(code=""):
        monkeypatch.setattr(
            sweep,
            "train_command",
            lambda run, workdir, *_: ["-c", RUN + code + FINISH, str(workdir / run.name)],
        )

    return doing


def give(folder, *arguments):
    return sweep.main(fedbn.SWEEP, ["--workdir", str(folder), *ONLY, *arguments])


def starts(folder, name):
    path = folder / name / ".starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def counts(text):
    """The table of a sweep as state -> number of runs."""
    rows = [line.rsplit(maxsplit=1) for line in text.splitlines() if line[0] != " "]
    return {state.strip(): int(number) for state, number in rows}


def test_two_at_a_time_share_the_cores_and_write_files_of_their_own(tmp_path, running, capsys):
    """Each waits until another one is there too, which one after another never would be."""
    running("while len(list(folder.parents[1].glob('*/*/.starts'))) < 2: time.sleep(0.01)\n")
    assert give(tmp_path, "--jobs", "2") == 0
    assert counts(capsys.readouterr().out) == {"done": len(NAMES)}
    cores = len(os.sched_getaffinity(0))
    for name in NAMES:
        [[_, given]] = starts(tmp_path, name)
        assert int(given) in {max(cores // 2, 1), cores - cores // 2}
        assert (tmp_path / "logs" / f"{name}.txt").read_text() == f"this is {Path(name).name}\n"


def test_a_run_that_fails_is_tried_again_as_often_as_is_said(tmp_path, running, capsys):
    """The first run fails twice, the second as often as it can, the third by a user's mistake."""
    first, second, third, *_ = NAMES
    fails = {first: (2, 1), second: (9, 5), third: (9, 2)}
    given = {str(tmp_path / name): how for name, how in fails.items()}
    running(
        f"most, status = {given}.get(str(folder), (0, 0))\nif tries <= most: sys.exit(status)\n"
    )
    assert give(tmp_path, "--retries", "2") == 1
    said = capsys.readouterr().out
    assert counts(said) == {"done": len(NAMES) - 2, "failed": 2}
    assert "status 5" in said
    assert "status 2" in said
    assert [len(starts(tmp_path, name)) for name in (first, second, third)] == [3, 3, 1]


def test_a_run_that_another_process_has_is_left_to_it(tmp_path, running, capsys):
    running()
    with owned(tmp_path / NAMES[0]):
        assert give(tmp_path) == 3
    said = capsys.readouterr().out
    assert counts(said) == {"done": len(NAMES) - 1, "in use": 1}
    assert f"by process {os.getpid()} on " in said
    assert give(tmp_path) == 0


def test_a_stop_reaches_every_run_once_and_nothing_else_starts(tmp_path, running, capsys, request):
    """And the same command does the rest. The runs take it as a real one does: save, and end."""
    running(
        "import signal\n"
        "def stopped(*_):\n    (folder / '.saved').touch(); sys.exit(130)\n"
        "if tries == 1:\n    signal.signal(signal.SIGTERM, stopped)\n"
        "    (folder / '.ready').touch(); time.sleep(60)\n"
    )

    # After `&` or nohup the signal is ignored, and sweeps leave it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def stop_two():
        while len(list(tmp_path.glob("*/*/*/.ready"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop_two).start()
    assert give(tmp_path, "--jobs", "2", "--retries", "3") == 130
    assert counts(capsys.readouterr().out) == {"stopped": len(NAMES)}
    saved = [name for name in NAMES if (tmp_path / name / ".saved").exists()]
    assert saved == [name for name in NAMES if starts(tmp_path, name)]
    assert len(saved) == 2
    running()
    assert give(tmp_path, "--jobs", "2") == 0
    assert counts(capsys.readouterr().out) == {"done": len(NAMES)}
    assert all(len(starts(tmp_path, name)) == 1 + (name in saved) for name in NAMES)


@pytest.mark.parametrize(
    ("number", "step", "sent"), [("SIGTERM", "", 1), ("SIGTERM", "0", 0), ("SIGINT", "0", 1)]
)
def test_a_stop_that_slurm_sends_to_every_process_is_not_sent_twice(
    number, step, sent, monkeypatch
):
    """A second one would end a run at once, before its state is saved."""
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    if step:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    processes, got = execute.Processes(), []
    process = type("Process", (), {"send_signal": lambda self, number: got.append(number)})
    processes.running.add(process())
    processes.stop(signal.Signals[number])
    assert got == [signal.SIGTERM] * sent
    assert processes.call(["/bin/false"]) == execute.MISTAKE  # and nothing else starts


@pytest.mark.parametrize(("cores", "at_once"), [(4, 2), (5, 3), (1, 1), (64, 7), (2, 4), (1, 3)])
def test_cores_are_shared_out(cores, at_once):
    given = [execute.share(range(cores), number, at_once) for number in range(at_once)]
    sizes = [len(part) for part in given]
    assert max(sizes) - min(sizes) <= 1 <= min(sizes)
    assert {core for part in given for core in part} == set(range(cores))
    assert sum(sizes) == max(cores, at_once)


def test_a_line_of_an_array_is_one_run_of_the_sweep(tmp_path, running, capsys):
    """launch/slurm.sbatch takes the line of its task; a run that has finished has none."""
    running()
    assert give(tmp_path, "--only", NAMES[0]) == 0
    capsys.readouterr()
    assert give(tmp_path, "commands", "--retries", "2", "--config.rounds=3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES) - 1
    program, script, *arguments = shlex.split(lines[1])
    assert (program, Path(script).resolve()) == ("python", ROOT / "launch/sweeps/fedbn.py")
    assert {"--retries=2", "--config.rounds=3"} <= set(arguments)
    assert sweep.main(fedbn.SWEEP, arguments) == 0
    assert [name for name in NAMES if starts(tmp_path, name)] == [NAMES[0], NAMES[2]]
