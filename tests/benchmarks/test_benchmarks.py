"""Benchmarks are run by hand; here that they still fit the library, and how they measure."""

import math
import runpy
import stat
import sys
import time
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
HELPERS = ("in_torch", "interleave", "machine", "tasks")
FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem not in HELPERS)


@pytest.fixture
def measure():
    import interleave

    return interleave


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_imports_only_what_is_there(file):
    assert "main" in runpy.run_path(str(file), run_name="benchmark")


def test_pytorchs_side_has_every_setting_of_a_round_and_of_evaluation(monkeypatch):
    pytest.importorskip("torch")
    # as outside the tests, whose folders pytest puts on the path
    ours = Path(__file__).parents[1]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if ours not in Path(p).parents])
    for name in ("in_torch", "torch_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import in_torch
    import machine
    import tasks

    tiny = tasks.DIGITS._replace(clients=1, samples=2, batch=2)
    network = in_torch.network(tiny)  # drawing its 14 million numbers takes a second each time
    monkeypatch.setattr(in_torch, "network", lambda task: network)
    settings = len({1, machine.CORES}) * 2
    assert len(in_torch.rounds(tiny)) == settings
    by_batch = in_torch.evaluations(tiny, 4, (2, 4))
    assert [len(runs) for runs in by_batch.values()] == [settings, settings]


def test_interleaving_runs_every_program_once_a_repetition_in_changing_orders(measure):
    names, ran, prepared = "abcd", [], []
    runs = {name: lambda name=name: ran.append(name) for name in names}
    taken = measure.interleave(runs, 20, before=prepared.append)
    repetitions = [tuple(ran[i : i + 4]) for i in range(0, len(ran), 4)]
    assert len(repetitions) == 20 + 1  # the first is a warm-up
    assert all(sorted(block) == list(names) for block in repetitions)
    assert len(set(repetitions)) > 10
    assert prepared == ran
    assert {name: len(samples.wall) for name, samples in taken.items()} == dict.fromkeys(names, 20)


def samples_of(measure, wall):
    wall = np.asarray(wall, float)
    return measure.Samples(wall, wall, np.zeros_like(wall))


@pytest.mark.parametrize("count", [6, 20, 41])
def test_the_interval_lies_between_the_order_statistics_of_the_sign_test(measure, count):
    random = np.random.default_rng(count)
    base, ratios = random.uniform(1, 9, count), random.uniform(1, 1.05, count)
    ratio = measure.paired_ratio(samples_of(measure, base * ratios), samples_of(measure, base))
    # The j-th least and greatest hold the median but for 2 P(fewer than j of n coins are heads).
    coins = [math.comb(count, k) / 2**count for k in range(count)]
    j = max(j for j in range(1, count) if 2 * sum(coins[:j]) <= 0.05)
    np.testing.assert_allclose(
        (ratio.median, ratio.low, ratio.high),
        (np.median(ratios), np.sort(ratios)[j - 1], np.sort(ratios)[-j]),
        rtol=1e-12,
    )
    assert ratio.of_minima == pytest.approx((base * ratios).min() / base.min(), rel=1e-12)


def test_a_ratio_with_a_wide_interval_is_refused_everywhere(measure, capsys):
    wide = np.linspace(1.23, 1.67, 12)
    taken = {"slow": samples_of(measure, wide), "ours": samples_of(measure, np.ones(12))}
    ratio = measure.paired_ratio(taken["slow"], taken["ours"])
    low, high = np.sort(wide)[[2, 9]]  # 2 P(at most 2 of 12) = 0.039
    width = (high - low) / np.median(wide)
    assert 0.1 < width == pytest.approx(ratio.width)
    assert f"about --repeats {math.ceil(12 * (width / 0.1) ** 2)}" in ratio.refusal
    measure.show(taken, "ours")
    measure.conclude("slow / ours", ratio)
    printed = capsys.readouterr().out
    assert printed.count("not measured") == 2
    assert "wide, more than 10%: a quieter machine" in printed
    assert f"{ratio.median:.3f}" not in printed
    shown = measure.figures(taken, "ours")["slow"]["ratio to ours"]
    assert shown == {"not_measured": ratio.refusal}


def start(tmp_path, program: str):
    """A peer whose interpreter runs `program`, whatever its arguments are."""
    from peer_programs.process import Peer

    (tmp_path / "program.py").write_text(program)
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} -S {tmp_path}/program.py\n")
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    return Peer(str(interpreter), "any", "DigitCNN", tmp_path / "task", tmp_path / "log")


SERVING = """
import os, subprocess, sys, time
print('a library greets')
print('PEER "ready"', flush=True)
child = subprocess.Popen([sys.executable, "-S", "-c", '''
import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    print(flush=True)
sys.stdin.read()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for number, line in enumerate(sys.stdin):
    child.stdin.write(line); child.stdin.flush(); child.stdout.readline()
    print(f'noise\\nPEER [{number}.5, 2.0]', flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_peer_answers_round_by_round_and_its_children_count(tmp_path):
    import machine

    peer = start(tmp_path, SERVING)
    for _ in range(2):
        peer.a_round()
    peer.weigh()
    everyone = machine.tree(peer._process.pid)
    assert len(everyone) == 2
    assert peer.losses == [[0.5, 2.0], [1.5, 2.0]]
    assert all(0.18 <= sum(cpu) <= 0.5 for cpu in peer.cpu)
    assert peer.megabytes > 1
    peer._process.kill()  # it would wait for its patience to end
    peer.end()
    time.sleep(0.1)
    assert not any(Path(f"/proc/{one}/exe").exists() for one in everyone[:1])
