"""The small sweeps: tables of unseen clients, and what explains channels on the beach."""

import fedcd_small
import numpy as np
import pytest
import report
import unseen
from test_sweep import fabricate

RUNS = unseen.SWEEP.runs


def test_published_numbers_stand_beside_what_they_are_of():
    digits, pacs = unseen.TABLES[:2]
    row = dict(zip(digits.columns, digits.rows["FedBN + TsmoBN"], strict=True))
    assert report.printed(row["SVHN"]) == (76.85, 0.25)
    assert report.printed(row["USPS"]) is None
    row = dict(zip(pacs.columns, pacs.rows["FedIG-A"], strict=True))
    assert report.printed(row["S"]) == (83.79, 0.49)


def test_the_mean_over_targets_is_taken_by_seed_and_only_of_whole_seeds(tmp_path):
    chosen = [run for run in RUNS if "/fedavg/" in run.name and run.name.startswith("digits/")]
    random = np.random.default_rng(0)
    values = {run.name: float(random.uniform(20, 80)) for run in chosen}
    missing = chosen[0].name  # one target of seed 0
    for run in chosen:
        if run.name != missing:
            row = {"running": values[run.name], "tsmobn": 0.0}
            fabricate(tmp_path, run.name, {"a": 50.0}, unseen={run.changes["target"]: row})
    report.write_report(unseen.SWEEP, tmp_path)
    done = {r.name: report.read_results(tmp_path, r) for r in chosen if r.name != missing}
    cell = unseen.TABLES[0].rows["FedAvg"][-1]
    means = [
        np.mean([value for name, value in values.items() if name.endswith(f"/{seed}")])
        for seed in (1, 2)
    ]
    ours = report.measured(cell, done)
    assert ours == pytest.approx((np.mean(means), np.std(means, ddof=1)))
    assert (tmp_path / "figures" / "digits-bars.png").exists()


def test_the_share_that_groups_explain_is_between_none_and_all():
    random = np.random.default_rng(0)
    groups = np.arange(400) % 4
    noise = random.normal(size=400)
    features = np.stack([groups, noise, groups + np.sqrt(1.25) * noise, np.ones(400)], 1)
    shares = fedcd_small.explained(features, groups)
    np.testing.assert_allclose(shares[[0, 3]], [1, 0])
    assert shares[1] < 0.05
    assert abs(shares[2] - 0.5) < 0.1
