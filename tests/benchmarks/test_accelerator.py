"""The accelerator benchmark: counting, jobs and their ends, resuming, the table; small, on CPU."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fedjax_bn.models import DigitCNN, SmallCNN

FOLDER = Path(__file__).parents[2] / "benchmarks"
ABOUT = {
    "platform": "cuda",
    "kind": "NVIDIA H100 80GB HBM3",
    "versions": {"jax": "0.7.2"},
    "torch": {"version": "2.13.0", "gpu": True},
    "cpu": "16 cores",
    "sizes": {"small": False},
}
OPTIONS = argparse.Namespace(
    out=Path("runs"), shared=None, pacs=Path("PACS"), rounds=10, steps=100, small=False
)


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Python puts a script's own folder first."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])


@pytest.fixture
def bench():
    """The benchmark's modules."""
    import accelerator
    from on_accelerator import flops, jobs, parts, peaks, records, table, work

    modules = (accelerator, flops, jobs, parts, peaks, records, table, work)
    return argparse.Namespace(**{module.__name__.split(".")[-1]: module for module in modules})


def network(model):
    """A forward pass as a function, its variables and one image."""
    image = jnp.zeros((1, 28, 28, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    return lambda variables, image: model.apply(variables, image), variables, image


def test_a_pass_of_digit_cnn_has_the_operations_counted_by_hand(bench, monkeypatch):
    import tasks

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # no kernels made for CPU
    forward, variables, image = network(DigitCNN())
    counted = bench.flops.of_function(forward, variables, image)
    assert counted == pytest.approx(1e9 * tasks.DIGITS.gigaflops, rel=2e-3)


def test_a_gradient_has_three_times_a_passs_operations_less_the_first_layers_input(
    bench, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    forward, variables, image = network(DigitCNN())
    once = bench.flops.of_function(forward, variables, image)
    gradient = jax.grad(lambda v, x: forward(v, x).sum())
    first = 2 * 28 * 28 * 64 * 5 * 5 * 3
    counted = bench.flops.of_function(gradient, variables, image)
    assert counted == pytest.approx(3 * once - first, rel=1e-3)


def test_loops_count_by_their_length_and_branches_by_the_longer(bench):
    a = jnp.ones((4, 4))

    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ a, None), x, None, length=7)[0]

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ a @ a, lambda x: x @ a, x)

    assert bench.flops.of_function(loop, a) == 7 * 2 * 4**3
    assert bench.flops.of_function(branch, a) == 2 * 2 * 4**3
    assert bench.flops.of_function(jax.vmap(loop), jnp.ones((5, 4, 4))) == 5 * 7 * 2 * 4**3


@pytest.mark.parametrize(
    ("kind", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", None),  # no H200
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", None),  # no L4
        ("TPU v5 lite", 197.0),
        ("TPU v5p", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_the_longest_name_that_fits(bench, kind, bfloat16):
    assert bench.peaks.peak_of(kind).bfloat16 == bfloat16


def job(bench, name, program, **fields):
    """A job that runs a line of Python whose last line of output is JSON."""
    fields = {"seconds": 30.0, "read": lambda said: json.loads(said.splitlines()[-1]), **fields}
    return bench.jobs.Job(name, ["-S", "-c", program], **fields)


ENDS = {
    "done": "print('{\"x\": 1}')",
    "out of memory": "raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes')",
    "failed": "raise ValueError('another fault')",
    "too long": "import time; time.sleep(60)",
    "absent": "",
}


def test_every_end_is_written_down_and_ends_nothing_else(bench, tmp_path):
    path = tmp_path / "results.json"
    fields = {"too long": {"seconds": 0.3}, "absent": {"absent": "not installed"}}
    jobs = [job(bench, name, text, **fields.get(name, {})) for name, text in ENDS.items()]
    before = f"print(open({str(path)!r}).read().replace(chr(10), ''))"
    jobs.append(job(bench, "reads what is written", before))
    records = bench.records.open_file(path, ABOUT)
    bench.records.do_part(path, records, "part", jobs, 60, lambda text: None)
    done = json.loads(path.read_text())["parts"]["part"]
    assert {name: done[name]["outcome"] for name in ENDS} == {name: name for name in ENDS}
    assert done["done"]["x"] == 1
    assert "Out of memory allocating 9 bytes" in done["out of memory"]["why"]
    assert "another fault" in done["failed"]["why"]
    # Each record lies in the file before the next job begins.
    assert set(done["reads what is written"]["parts"]["part"]) == set(ENDS)


def test_what_failed_or_was_left_out_is_tried_again_and_nothing_else(bench, tmp_path):
    path, said = tmp_path / "results.json", []
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); print('{{}}')"
    jobs = [
        job(bench, "first", count),
        job(bench, "second", ENDS["failed"]),
        job(bench, "third", count, absent="no data"),
    ]
    records = bench.records.open_file(path, ABOUT)
    bench.records.do_part(path, records, "part", jobs, 60, said.append)
    assert not bench.records.finished(records, "part", jobs)
    jobs[1:] = job(bench, "second", count), job(bench, "third", count)  # mended, and there
    records = bench.records.open_file(path, {**ABOUT, "cpu": "another host"})
    bench.records.do_part(path, records, "part", jobs, 60, said.append)
    assert (tmp_path / "runs").read_text() == "xxx"
    bench.records.do_part(path, records, "part", jobs, 60, said.append)
    assert (tmp_path / "runs").read_text() == "xxx"
    assert said[-1] == "part: finished before, nothing to do"


def test_when_the_parts_time_is_over_the_rest_is_left_out(bench, tmp_path):
    path, records = tmp_path / "results.json", {"about": ABOUT, "parts": {}}
    jobs = [job(bench, "long", ENDS["too long"]), job(bench, "next", ENDS["done"])]
    bench.records.do_part(path, records, "part", jobs, 0.4, lambda text: None)
    done = records["parts"]["part"]
    assert [done[name]["outcome"] for name in ("long", "next")] == ["left out"] * 2


def test_results_of_another_device_are_not_added_to(bench, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"about": ABOUT, "parts": {}}))
    with pytest.raises(SystemExit, match="written with another kind: give another --out"):
        bench.records.open_file(path, {**ABOUT, "kind": "NVIDIA A100-SXM4-40GB"})


def test_all_is_timed_and_half_an_hour_is_enough(bench):
    seconds = [part.seconds for part in bench.parts.PARTS.values()]
    assert sum(seconds) <= 30 * 60
    assert max(seconds) <= 8 * 60
    for part, counts in {"digit_cnn": (5, 50), "resnet18": (3, 30)}.items():
        cases = bench.work.cases(part)
        for dtype in ("float32", "bfloat16"):
            for method in ("fedavg", "fedbn", "fediga"):
                for k in counts:
                    some = [c.clients for c in cases if c[1:3] + c[4:5] == (k, method, dtype)]
                    assert sorted(one.split(":")[0] for one in some) == ["map", "vmap", "vmap"]
        names = [one.name for one in bench.parts.PARTS[part].jobs(OPTIONS, ABOUT)]
        assert len(set(names)) == len(names) == 36 + 4
        # PyTorch's times come while there is time: right behind FedAvg's.
        assert names[6:8] == [f"K={k} PyTorch float32" for k in counts]
    pacs = bench.parts.pacs(OPTIONS, ABOUT)
    assert len(pacs) == 4 * 3


@pytest.mark.parametrize(
    ("torch", "why"),
    [(None, "not installed"), ({"version": "2.13.0+cpu", "gpu": False}, "no device of this kind")],
)
def test_without_its_own_device_pytorch_is_absent(bench, torch, why):
    jobs = bench.parts.digit_cnn(OPTIONS, {**ABOUT, "torch": torch})
    absent = [one for one in jobs if one.absent]
    assert [one.name.split()[1] for one in absent] == ["PyTorch"] * 4
    assert all(why in one.absent for one in absent)


def test_no_job_may_fall_back_to_the_cpu(bench):
    for name, part in bench.parts.PARTS.items():
        for one in part.jobs(OPTIONS, ABOUT):
            ours = "torch_case" not in " ".join(one.command)
            assert dict(one.environment).get("JAX_PLATFORMS") == ("cuda,cpu" if ours else None), (
                name
            )


@pytest.mark.parametrize(
    ("inside", "outcome", "shown"),
    [
        ("", "done", "2 passed, 0 skipped"),
        ("<failure message='1 is not 2'/>", "failed", "1 passed, 0 skipped"),
    ],
)
def test_a_failing_parity_test_fails_its_job(bench, tmp_path, inside, outcome, shown):
    report = tmp_path / "report.xml"
    report.write_text(f"<s><testcase name='a'/><testcase name='b'>{inside}</testcase></s>")
    found = {"outcome": "done", **bench.parts._tests(report)}
    assert (found["outcome"], found["shown"]) == (outcome, shown)


def test_skipped_tests_are_no_parity(bench, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text("<s><testcase name='a'><skipped message='no data'/></testcase></s>")
    assert "no test was run: ['a: no data']" in bench.parts._tests(report)["why"]


def test_without_pytest_parity_has_failed_with_pythons_words(bench, tmp_path):
    options = argparse.Namespace(**{**vars(OPTIONS), "out": tmp_path})
    first = bench.parts.parity(options, ABOUT)[0]
    record = bench.jobs.perform(first._replace(command=["-S", *first.command]), 30)
    assert record["outcome"] == "failed"
    assert record["why"].endswith("No module named pytest")


def timed(seconds, **more):
    times = {"round_seconds": seconds, "least_seconds": seconds, "most_seconds": seconds}
    return {"outcome": "done", "samples_per_second": 100 / seconds, "seconds": 1.0, **times, **more}


def test_the_table_has_fractions_of_the_peak_and_ratios_to_pytorch(bench):
    done = {
        "K=50 fedavg vmap float32": timed(0.5, teraflops=49.47, peak_megabytes=2000.0),
        "K=50 fediga vmap float32": timed(1.0, teraflops=98.94),
        "K=50 fedavg map float32": {"outcome": "out of memory", "why": "9 | bytes"},
        "K=50 PyTorch float32": timed(3.0, best="compiled, channels_last"),
    }
    text = bench.table.markdown({"about": ABOUT, "parts": {"digit_cnn": done}})
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines()}
    ours = rows["K=50 fedavg vmap float32"]
    assert ours[4:6] == ["5.0%", "10.0%"]
    assert ours[8] == "6.00 |"
    assert rows["K=50 fediga vmap float32"][8] == " |"  # PyTorch did not do that work
    assert rows["K=50 fedavg map float32"][1] == "out of memory: 9 / bytes"
    assert "K=50 PyTorch float32 (compiled, channels_last)" in rows
    assert "unknown" in bench.table.markdown({"about": {**ABOUT, "kind": "x"}, "parts": {}})


def test_a_case_says_what_a_round_took(bench, monkeypatch):
    import tasks
    from on_accelerator import jax_case

    tiny = tasks.Task("SmallCNN", SmallCNN(), 8, clients=2, samples=3, batch=2, gigaflops=0)
    monkeypatch.setattr(jax_case, "task_of", lambda case: tiny)
    # A round that did not stay in bfloat16 could not be repeated.
    found = jax_case.measure(bench.work.Case("digit_cnn", 2, "fedbn", "vmap", "bfloat16"), 0.0)
    assert found["rounds"] == 3
    assert found["samples_per_second"] * found["round_seconds"] == pytest.approx(2 * 3)
    assert found["least_seconds"] <= found["round_seconds"] <= found["most_seconds"]
    assert found["teraflops"] * found["round_seconds"] > 0
    assert found["planned_megabytes"] > 0
    assert 0 < found["loss"] < 10
    json.dumps(found)


def test_the_command_asks_for_an_accelerator_and_skips_what_is_finished(
    bench, monkeypatch, tmp_path, capsys
):
    main = bench.accelerator
    about = {**ABOUT, "platform": "cpu"}
    monkeypatch.setattr(main, "describe", lambda options: about)
    with pytest.raises(SystemExit, match="no accelerator here"):
        main.main(["--out", str(tmp_path)])
    part = bench.parts.Part(lambda options, about: [job(bench, "one", ENDS["done"])], 60)
    monkeypatch.setattr(main, "PARTS", {"parity": part, "pacs": part})
    for _ in range(2):
        main.main(["--out", str(tmp_path), "--small", "--part", "parity"])
    assert "parity: finished before" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "accelerator.json").read_text())["parts"]) == {"parity"}
    assert "| one | done |" in (tmp_path / "accelerator.md").read_text()
    with pytest.raises(SystemExit):
        main.parse(["--out", "x", "--part", "resnet"])


@pytest.mark.slow
def test_the_whole_runs_in_small_on_cpu(tmp_path):
    pytest.importorskip("torch")
    from fedjax_bn.data.sets import image_folders
    from trees import write_tree

    published = image_folders.IMAGE_FOLDERS["pacs"]
    pacs = write_tree(tmp_path / "pacs", tuple(published.domains), tuple(published.classes), 3)
    command = [sys.executable, str(FOLDER / "accelerator.py"), "--small", "--pacs", str(pacs)]
    subprocess.run([*command, "--out", str(tmp_path / "out")], check=True, cwd=tmp_path)
    parts = json.loads((tmp_path / "out" / "accelerator.json").read_text())["parts"]
    outcomes = {one["outcome"] for part in parts.values() for one in part.values()}
    assert set(parts) == {"parity", "quickstart", "digit_cnn", "resnet18", "pacs"}
    assert outcomes == {"done"}
