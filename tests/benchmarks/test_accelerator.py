"""The accelerator benchmark: counting, cases and their ends, continuing, the table; on CPU."""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from fedjax_bn.models import DigitCNN, UNet

ABOUT = {
    "platform": "cuda",
    "kind": "NVIDIA H100 80GB HBM3",
    "jax": "0.7.2",
    "torch": {"version": "2.13.0", "gpu": True},
    "small": False,
    "compiled_at_once": 1,
}


@pytest.fixture
def bench():
    import accelerator

    return accelerator


@pytest.fixture
def flops():
    from on_accelerator import flops

    return flops


def test_a_pass_and_a_gradient_have_the_operations_counted_by_hand(flops, monkeypatch):
    import tasks

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # no kernels made for CPU
    model, image = DigitCNN(), jnp.zeros((1, 28, 28, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    once = flops.of_function(model.apply, variables, image)
    assert once == pytest.approx(1e9 * tasks.DIGITS.gigaflops, rel=2e-3)
    gradient = jax.grad(lambda variables, image: model.apply(variables, image).sum())
    first = 2 * 28 * 28 * 64 * 5 * 5 * 3  # nothing needs the gradient of the images
    counted = flops.of_function(gradient, variables, image)
    assert counted == pytest.approx(3 * once - first, rel=1e-3)


def test_loops_count_by_their_length_and_branches_by_the_longer(flops):
    a = jnp.ones((4, 4))

    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ a, None), x, None, length=7)[0]

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ a @ a, lambda x: x @ a, x)

    assert flops.of_function(loop, a) == 7 * 2 * 4**3
    assert flops.of_function(branch, a) == 2 * 2 * 4**3
    assert flops.of_function(jax.vmap(loop), jnp.ones((5, 4, 4))) == 5 * 7 * 2 * 4**3


@pytest.mark.parametrize(
    ("kind", "bfloat16"),
    [("NVIDIA H200", 989.4), ("NVIDIA A100-SXM4-40GB", 312.0), ("NVIDIA L40", None)],  # no L4
)
def test_the_peak_is_that_of_the_longest_name_that_fits(bench, kind, bfloat16):
    assert bench.peak_of(kind)[0] == bfloat16


COMPILING = """
import json, os, time
from on_accelerator.cases import wait_for_turn
time.sleep(os.getpid() % 2 / 2)
compiled = time.time()
wait_for_turn()
begin = time.time()
time.sleep(0.2)
print(json.dumps({'compiled': compiled, 'begin': begin, 'end': time.time()}))
"""


@pytest.mark.slow
def test_cases_that_compile_at_once_are_timed_one_after_another(bench, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$PROGRAM"\n')
    program.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(program))
    monkeypatch.setenv("PROGRAM", COMPILING)
    found = bench.perform_all(bench.cases()[:2], ABOUT, 60.0)
    found.sort(key=lambda one: one["begin"])
    assert max(one["compiled"] for one in found) <= found[0]["begin"]
    assert all(one["end"] <= after["begin"] for one, after in itertools.pairwise(found))


def timed(seconds, **more):
    times = {"round_seconds": seconds, "least_seconds": seconds, "most_seconds": seconds}
    return {"outcome": "done", "samples_per_second": 100 / seconds, **times, **more}


def test_the_table_has_fractions_of_the_peak_and_ratios_to_pytorch(bench):
    done = {
        "K=50 fedavg vmap float32": timed(0.5, teraflops=49.47, peak_megabytes=2000.0),
        "K=50 fediga vmap float32": timed(1.0, teraflops=98.94),
        "K=50 fedavg map float32": {"outcome": "out of memory", "why": "9 | bytes"},
        "K=50 PyTorch eager float32": timed(4.0, best="contiguous"),
        "K=50 PyTorch compiled float32": timed(3.0, best="channels_last"),
        "K=50 PyTorch graph mixed": timed(0.4),
        "K=50 fedbn map conv_fusion bfloat16": timed(0.2),
    }
    text = bench.markdown(ABOUT, {"digit_cnn": done})
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines()}
    ours = rows["K=50 fedavg vmap float32"]
    assert ours[4:6] == ["5.0%", "10.0%"]
    assert ours[8] == "6.00 |"
    assert rows["K=50 fediga vmap float32"][8] == " |"  # PyTorch did not do that work
    assert rows["K=50 fedavg map float32"][1] == "out of memory: 9 / bytes"
    assert "K=50 PyTorch compiled float32 (channels_last)" in rows
    assert rows["K=50 fedbn map conv_fusion bfloat16"][8] == "2.00 |"  # mixed is bfloat16 too
    assert "unknown" in bench.markdown({**ABOUT, "kind": "x"}, {})


def test_the_command_continues_its_record_and_asks_for_an_accelerator(
    bench, monkeypatch, tmp_path, capsys
):
    record, about, ran = tmp_path / "a.jsonl", {**ABOUT, "platform": "cpu"}, []
    command = ["--record", str(record), "--only", "resnet18", "--small"]
    monkeypatch.setattr(bench, "describe", lambda: about)
    with pytest.raises(SystemExit, match="no accelerator here"):
        bench.main(command[:-1])

    def perform(case, turn, about, limit):
        ran.append(case.name)
        failed = {"outcome": "failed", "why": "status 1: a fault"}
        return timed(1.0) if len(ran) > 1 else failed

    monkeypatch.setattr(bench, "perform", perform)
    bench.main([*command, "--seconds", "0"])
    assert "2 of 2 cases are left out: the same command" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # the first case failed
        bench.main(command)
    bench.main(command)  # it alone is tried again
    names = [case.name for case in bench.cases(small=True) if case.part == "resnet18"]
    assert ran == [*names, ran[0]]
    bench.main(command)
    assert len(ran) == 3
    shown = capsys.readouterr().out
    assert f"| {ran[0]} | 100 |" in shown
    assert "left out" not in shown
    about["kind"] = "NVIDIA A100-SXM4-40GB"
    with pytest.raises(SystemExit, match="--record"):
        bench.main(command)


@pytest.mark.slow
def test_a_tiny_round_is_timed_and_profiled_on_a_cpu(bench, monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    from on_accelerator import cases, jax_case, torch_case

    def perform(case, turn, about, limit):
        module = torch_case if case.method == "PyTorch" else jax_case
        why = bench.absence(case, about)
        measured = {} if why else module.measure(case, 0.0, lambda: None)
        return {"outcome": "absent" if why else "done", "why": why} | measured

    about = {**ABOUT, "platform": "cpu", "torch": {"version": "2.13.0", "gpu": False}}
    small = cases.ROUNDS["unet"]._replace(model=UNet(2, width=2, levels=1))
    monkeypatch.setitem(cases.ROUNDS, "unet", small)
    monkeypatch.setattr(bench, "describe", lambda: about)
    monkeypatch.setattr(bench, "perform", perform)
    record = tmp_path / "a.jsonl"
    bench.main(["--record", str(record), "--only", "unet", "--small"])
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert {line["case"]: line["record"]["outcome"] for line in lines} == {
        "K=2 fedbn map profile mixed": "done",
        "K=2 PyTorch eager float32": "done",
        "K=2 PyTorch compiled_graph bfloat16": "absent",
    }
    assert lines[0]["record"]["profile"]["busy_seconds"] > 0
    assert "| kernel | times | ms |" in capsys.readouterr().out


def test_every_case_has_a_round_and_options(bench):
    from on_accelerator.cases import VARIANTS, task_of

    cases = bench.cases(fastest=True)
    assert {case.variant for case in cases} == set(VARIANTS)
    assert all(task_of(case).clients == case.num_clients for case in cases)
