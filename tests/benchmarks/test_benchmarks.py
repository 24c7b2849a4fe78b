"""Benchmarks are run by hand; here that they still fit the library, and how they measure."""

import functools
import json
import runpy
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_bn.models import MLP
from fedjax_bn.normalization import BatchNorm
from method_table import METHODS

FOLDER = Path(__file__).parents[2] / "benchmarks"
HELPERS = ("in_torch", "interleave", "machine", "tasks")
FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem not in HELPERS)


@pytest.fixture
def measure():
    import interleave

    return interleave


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_imports_only_what_is_there(file):
    if file.stem == "digits_in_torch":
        pytest.importorskip("torch")
    assert "main" in runpy.run_path(str(file), run_name="benchmark")


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


@pytest.mark.parametrize("count", [5, 40])
def test_a_ratio_has_the_interval_of_a_paired_bootstrap(measure, count):
    random = np.random.default_rng(count)
    base, factors = random.uniform(1, 9, count), random.uniform(1.2, 1.6, count)
    wall = base * factors
    ratio = measure.paired_ratio(samples_of(measure, wall), samples_of(measure, base))

    def of_medians(wall, base, axis):
        return np.median(wall, axis) / np.median(base, axis)

    options = {"method": "percentile", "n_resamples": 50_000, "random_state": 1}
    expected = stats.bootstrap((wall, base), of_medians, paired=True, **options).confidence_interval
    medians_and_least = (of_medians(wall, base, 0), wall.min() / base.min())
    assert (ratio.of_medians, ratio.of_least) == pytest.approx(medians_and_least, rel=1e-12)
    np.testing.assert_allclose((ratio.low, ratio.high), expected, rtol=0.02)


def test_one_repetition_has_a_ratio_without_an_interval(measure, capsys):
    taken = {"slow": samples_of(measure, [3.0]), "ours": samples_of(measure, [2.0])}
    measure.show(taken, "ours")
    assert "1.500 (one piece: no interval)" in capsys.readouterr().out
    assert measure.paired_ratio(*taken.values()) == (1.5, None, None, 1.5, 1)


def test_of_rivals_only_the_near_ones_go_on_and_the_noise_is_said(measure):
    seconds = {"fast": 0.01, "near": 0.01, "slow": 0.2, "ours": 0.01}
    runs = {name: lambda name=name: time.sleep(seconds[name]) for name in seconds}
    taken = measure.interleave(runs, 3, seconds=1.0, rivals=[["fast", "near", "slow"]])
    pieces = {name: len(samples.wall) for name, samples in taken.items()}
    assert pieces["slow"] == 1
    assert pieces["ours"] == max(pieces["fast"], pieces["near"]) > 3  # until the time is spent
    noise = measure.noise({"a": samples_of(measure, [1, 2, 3, 4, 5])})
    assert (noise["quartile_range"], noise["median_over_least"]) == pytest.approx((2 / 3, 3))


def test_the_command_gives_all_ratios_and_says_which_program_failed(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    import in_torch
    import round_time

    class Network(torch.nn.Linear):
        def forward(self, images):
            return None, super().forward(images.mean((2, 3)))

    tiny = round_time.DIGITS._replace(model=MLP(hidden=(2,)), samples=4, batch=2)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests need them
    monkeypatch.setattr(round_time, "REST", 0.0)
    monkeypatch.setattr(in_torch, "network", lambda task: Network(3, 10))
    # here, because what a test replaces is not in new processes
    monkeypatch.setattr(round_time, "apart", lambda cores, devices, run, *given: run(*given))
    monkeypatch.setattr(round_time, "beside", lambda make, *given: nullcontext(make(*given)))
    monkeypatch.setattr(round_time, "PARTS", dict.fromkeys(round_time.PARTS, tiny))

    def run(*only):
        command = ["round_time.py", "--repeats", "2", "--seconds", "0", "--json", "--only", *only]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            round_time.main()
        return int(ended.value.code), json.loads(capsys.readouterr().out.splitlines()[-1])

    status, printed = run("digits", "evaluation")
    assert (status, printed["failures"]) == (0, [])
    assert [row["part"] for row in printed["results"]] == ["digits", "evaluation"]
    for row in printed["results"]:
        assert 0 < row["ratio"]["low"] <= row["ratio"]["of_medians"] <= row["ratio"]["high"]
        assert row["ratio_of_pytorch_in_turn"]["of_medians"] >= row["ratio"]["of_medians"]
    monkeypatch.setattr(in_torch, "evaluations", lambda task, images, settings: 1 / 0)
    status, printed = run("memory", "evaluation")
    assert (status, [row["part"] for row in printed["results"]]) == (1, ["memory"])
    assert "division by zero" in printed["failures"][0]


BATCH = (2, 2, 16)


class Deep(nn.Module):
    """Equal layers, whose products are nearly all that is counted."""

    def setup(self):
        self.head = nn.Dense(2)

    @nn.compact
    def features(self, x):
        for _ in range(4):
            x = nn.relu(BatchNorm()(nn.Dense(64)(x)))
        return x.mean((1, 2))

    def classify(self, features):
        return self.head(features)

    def __call__(self, x):
        return self.classify(self.features(x))


@pytest.fixture
def benchmark(folder):
    return runpy.run_path(str(folder / "method_costs.py"), run_name="benchmark")


@functools.cache
def products(name, **options):
    """Operations of matrix products in a round."""
    from on_accelerator.flops import of_function

    method, key = METHODS[name](Deep(), optax.sgd(0.1), **options), jax.random.key(0)
    batches = {
        "image": jnp.zeros((*BATCH, 6, 6, 3)),
        "label": jnp.zeros(BATCH, jnp.int32),
        "valid": jnp.ones(BATCH, bool),
    }
    variables = jax.eval_shape(Deep().init, key, batches["image"][0, 0])
    state = jax.eval_shape(lambda v: method.init(key, v, BATCH[0]), variables)
    return of_function(method.round, state, batches, key)


def test_every_method_has_its_passes(benchmark):
    assert {*benchmark["PASSES"]} == {*METHODS}


TRACED = (
    *("apfl", "ditto", "fedala", "fedcd", "feddg", "fedig", "fediga", "fedrep", "fedsam"),
    *("gperxan", "hbn", "l2d", "moon", "perfedavg", "randconv", "scaffold"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_a_round_is_traced_to_the_passes_that_predict_its_time(benchmark, name):
    options = benchmark["OPTIONS"].get(name, {})
    found = products(name, **options) / products("fedavg")
    assert found == pytest.approx(benchmark["predicted_of"](name), rel=0.07)
