"""The sweep over unseen clients: its runs, its tables, the mean over targets by seed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "launch" / "sweeps"))

import report  # noqa: E402
import sweep  # noqa: E402
import unseen  # noqa: E402

from fedjax_bn.run.config import assign, base, check  # noqa: E402


def fabricate(workdir, run, unseen_accuracy) -> None:
    """A finished run whose unseen domain has these accuracies."""
    folder = workdir / run.name
    folder.mkdir(parents=True)
    scores = {"internal": {"mean": 50.0}, "unseen": {run.changes["target"]: unseen_accuracy}}
    summary = {"rounds": 10, "accuracy": scores}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_runs_have_names_of_their_own_config_files_and_valid_changes():
    assert len({run.name for run in unseen.RUNS}) == len(unseen.RUNS)
    for run in unseen.RUNS:
        assert (ROOT / run.config).is_file()
        config = base()
        for key, value in run.changes.items():
            assign(config, key, sweep._text(value))
        check(config)


def test_every_run_serves_a_table_and_every_row_has_its_adaptation():
    needed = {name for table in unseen.tables() for name in sweep.runs_of(table)}
    assert needed == {run.name for run in unseen.RUNS}
    adaptations = {run.name: run.changes["adaptations"] for run in unseen.RUNS}
    for table in unseen.tables():
        for cells in table.rows.values():
            assert len(cells) == len(table.columns)
            assert all(cell.adaptation in adaptations[n] for cell in cells for n in cell.runs)


def test_published_numbers_stand_beside_what_they_are_of():
    digits, pacs = unseen.tables()[:2]
    row = dict(zip(digits.columns, digits.rows["FedBN + TsmoBN"], strict=True))
    assert row["SVHN"].published == (76.85, 0.25)
    assert row["USPS"].published is None
    row = dict(zip(pacs.columns, pacs.rows["FedIG-A"], strict=True))
    assert row["S"].published == (83.79, 0.49)


def test_the_mean_over_targets_is_taken_by_seed_and_only_of_whole_seeds(tmp_path):
    chosen = [run for run in unseen.RUNS if "/fedavg/" in run.name and run.data == "digits"]
    random = np.random.default_rng(0)
    values = {run.name: float(random.uniform(20, 80)) for run in chosen}
    missing = chosen[0].name  # one target of seed 0
    for run in chosen:
        if run.name != missing:
            fabricate(tmp_path, run, {"running": values[run.name], "tsmobn": 0.0})
    report.write_report(unseen.SWEEP, tmp_path)
    done = {n: report.read_summary(tmp_path, n) for n in values if n != missing}
    cell = unseen.tables()[0].rows["FedAvg"][-1]
    means = [
        np.mean([value for name, value in values.items() if name.endswith(f"/{seed}")])
        for seed in (1, 2)
    ]
    ours = report.measured(cell, done)
    assert ours == pytest.approx((np.mean(means), np.std(means, ddof=1)))
    assert (tmp_path / "figures" / "digits-bars.png").exists()
