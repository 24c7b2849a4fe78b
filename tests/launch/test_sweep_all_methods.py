"""The comparison of all methods: its rows, its runs, its intervals, a table from start to end."""

import json

import all_methods
import compared
import entries
import numpy as np
import plan
import pytest

import runs
from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.run import train
from fedjax_bn.run.config import check
from fedjax_bn.run.experiment.datasets import DATASETS
from method_table import METHODS

TINY = ("--dataset", "tiny", "--path", "none", "--target", "dog", "--config.compilation_cache=")
TWO = ("--only", "fedavg,fedbn", "--config.model=MLP", "--config.rounds=1")


def measured(unseen, seconds=1.0):
    unseen = dict(enumerate(unseen))
    return compared.Measured(0.1, unseen, unseen, {}, seconds, {"down": 2000, "up": 1000})


def test_every_method_of_the_library_has_a_row():
    compared_with = {
        entry.changes["method"].partition(":")[0] for entry in entries.ENTRIES.values()
    }
    assert compared_with == {*METHODS} - {"fedig"}  # fediga without its adapter
    folders = {}
    for entry in entries.ENTRIES.values():
        folders.setdefault(entry.folder, set()).add((str(entry.changes), entry.norm))
    assert all(len(kinds) == 1 for kinds in folders.values())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "pacs")) for n in all_methods.BENCHES]
)
def test_every_run_has_a_valid_configuration(name):
    options, _ = all_methods.parse(["--dataset", name])
    bench = all_methods.bench_of(options)
    for entry in entries.ENTRIES.values():
        run = all_methods.runs_of(options, bench, entry, 0.1, 1)[-1]
        check(plan.configuration(run.config, run.changes))


def test_an_interval_is_students_and_a_difference_is_of_the_same_seeds():
    found = compared.difference({0: 5.0, 1: 7.0, 3: 9.0}, {0: 4.0, 1: 5.0, 2: 0.0})
    half = 12.7062047 * np.sqrt(0.5 / 2)  # of 1 and 2
    np.testing.assert_allclose(found, (1.5, 1.5 - half, 1.5 + half), rtol=1e-6)
    assert not compared.difference({0: 5.0}, {0: 4.0}).known


def test_a_row_helps_where_the_interval_of_its_difference_is_above_0():
    rows = {"FedAvg": measured([10, 20, 30]), "better": measured([12, 22, 32.5]),
            "alike": measured([20, 20, 20]), "worse": measured([9, 19.2, 29])}  # fmt: skip
    above, below, neither = compared.verdicts(rows)
    assert above.endswith("above 0): better.")
    assert below.endswith("below 0): worse.")
    assert neither.endswith(": alike.")
    shown = compared.table(rows, {"broken": "it diverged"})
    first = shown.splitlines()[2]
    assert first.startswith(
        "| better | 0.1 | 3 | 22.2 ± 25.5 | 22.2 ± 25.5 | +2.2 ± 0.7 | - | 1.00"
    )
    assert shown.endswith("broken: it diverged")


@pytest.fixture
def trained(monkeypatch):
    """Runs are made up, better with a greater seed, and diverge with the rate 0.01."""
    made = []

    def run(config, folder, say):
        made.append((config.method, config.optimizer.learning_rate, config.seed))
        if config.optimizer.learning_rate == 0.01:
            raise NotFiniteError("it is not finite")
        folder.mkdir(parents=True)
        scores = {"internal": {"mean": 50.0}, "unseen": {"dog": {"running": 60.0 + config.seed}}}
        sent = {"down": 2000, "up": 1000}
        summary = {"accuracy": scores, "selected_round": 1, "seconds_per_round": 1, "traffic": sent}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text(json.dumps({"validation": {"mean": 40.0}}))

    runs.install(monkeypatch)
    monkeypatch.setattr(train, "run", run)
    return made


def test_the_first_seed_tries_every_rate_and_the_others_take_the_best(tmp_path, trained, capsys):
    arguments = [*TINY, "--rates", "0.01,0.1", *TWO, "--seeds", "2", "--workdir", str(tmp_path)]
    assert all_methods.main(arguments) == 0
    tried = [(0.01, 0), (0.1, 0), (0.1, 1)]
    assert trained == [(method, *one) for method in ("fedavg", "fedbn") for one in tried]
    failure = tmp_path / "failed/tiny/fedbn/rate-0.01/dog/0.txt"
    assert failure.read_text() == "it is not finite\n"
    shown = capsys.readouterr().out
    assert "| FedBN | 0.1 | 2 | 50.0 ± 0.0 | 60.5 ± 6.4 | +0.0 ± 0.0 | - |" in shown
    assert all_methods.main(arguments) == 0
    assert len(trained) == 6  # nothing is made twice


def test_data_without_validation_samples_are_refused_before_any_run_but_may_hold_some_out(
    tmp_path, trained, monkeypatch, capsys
):
    monkeypatch.setitem(DATASETS, "tiny", lambda config: runs.dataset(validation=False))
    arguments = [*TINY, *TWO, "--seeds", "1", "--workdir", str(tmp_path)]
    with pytest.raises(SystemExit, match="'ant'"):
        all_methods.main(arguments)
    with pytest.raises(SystemExit, match=r"target 'cat'"):
        all_methods.main([*arguments, "--target", "cat"])
    assert trained == []
    assert all_methods.main([*arguments, "--config.data.split=official"]) == 0
    assert len(trained) == 4
    assert "dog left out: data.name=tiny, rounds=1, " in capsys.readouterr().out
