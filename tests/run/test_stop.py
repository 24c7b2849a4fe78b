"""Ctrl-C and SIGTERM where no round is under way: the process ends at once, and says what is saved.

A hash of a minute, outside of Python, takes the part of XLA's compiler.
"""

import os
import signal
import subprocess
import sys

import pytest

import runs
from fedjax_bn.training import checkpoint, stop

COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for `&`
import hashlib, sys, threading, time
from pathlib import Path
from fedjax_bn import main
from fedjax_bn.training import stop

def compile():
    print("now", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)

class Finalizer:  # what it raises is swallowed, as much of what runs while modules are imported
    def __del__(self):
        print("now", flush=True)
        time.sleep(60)

def finalize():
    Finalizer()

def rounds():
    with stop.stop_requests() as requested:
        print("now", flush=True)
        while not requested():
            time.sleep(0.01)
        print("requested", flush=True)
        compile()

def train(arguments):
    with stop.saying(lambda: "rounds 1 to 4 are saved"):
        globals()[sys.argv[1]]()

main.COMMANDS["train"] = train
sys.argv[1:] = [sys.argv[1]]
main.command()
"""


def start(what):
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, what],
        cwd=runs.ROOT,
        env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "now\n", process.communicate()[1]
    return process


def end_of(process):
    """(exit status, standard error) of a process that ends at once."""
    try:
        errors = process.communicate(timeout=10)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail("it went on")
    return process.returncode, errors


@pytest.mark.parametrize(
    ("what", "number"), [("compile", signal.SIGTERM), ("finalize", signal.SIGINT)]
)
def test_a_signal_outside_of_rounds_ends_the_process_at_once_saying_what_is_saved(what, number):
    process = start(what)
    process.send_signal(number)
    status, errors = end_of(process)
    assert status == 128 + number
    assert errors == (
        "fedjax_bn: stopped at once; rounds 1 to 4 are saved: give the same command to continue\n"
    )


def test_a_signal_in_a_round_asks_for_its_end_and_a_second_one_acts_at_once():
    process = start("rounds")
    process.send_signal(signal.SIGTERM)
    assert [process.stdout.readline() for _ in range(2)] == ["requested\n", "now\n"]
    process.send_signal(signal.SIGTERM)
    status, errors = end_of(process)
    assert status == 143
    assert errors.strip().startswith("fedjax_bn: stopped at once")


def test_what_is_saved_is_read_from_the_names_of_the_checkpoints(tmp_path):
    assert checkpoint.saved(tmp_path) == f"no round is saved in {tmp_path} yet"
    for name in ("8", "12", "16.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / "latest" / name).mkdir(parents=True)
    assert checkpoint.saved(tmp_path) == f"rounds 1 to 12 are saved in {tmp_path}"


def test_in_a_notebook_signals_act_as_usual_outside_of_rounds():
    before = signal.getsignal(signal.SIGINT)
    with stop.stop_requests() as requested:
        signal.raise_signal(signal.SIGINT)
        assert requested()
    assert signal.getsignal(signal.SIGINT) is before
