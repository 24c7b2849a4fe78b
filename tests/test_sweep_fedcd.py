"""FedCD's sweep: its runs, its tables, and how channels are told apart."""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "launch" / "sweeps"))

import fedcd  # noqa: E402
import suppression  # noqa: E402
import sweep  # noqa: E402

from fedjax_bn.run.config import assign, base  # noqa: E402
from fedjax_bn.run.report.published import published  # noqa: E402


def test_runs_have_names_of_their_own_valid_keys_and_config_files_that_exist():
    names = [run.name for run in fedcd.RUNS]
    assert len(names) == len(set(names))
    config = base()
    for run in fedcd.RUNS:
        assert (ROOT / run.config.partition(":")[0]).is_file()
        for key, value in run.changes.items():
            assign(config, key, sweep._text(value))


def test_every_cell_has_its_runs_and_table_1_the_published_numbers():
    names = {run.name for run in fedcd.RUNS}
    for table in fedcd.tables():
        for row in table.rows.values():
            assert len(row) == len(table.columns)
            assert all(cell.runs and names >= set(cell.runs) for cell in row)
    for figure in fedcd.all_figures():
        assert figure.runs
        assert names >= set(figure.runs)
    cells = {(c.method, c.column): c.mean for c in published(paper="FedCD", table="1")}
    rows = fedcd.tables()[0].rows
    for method in ("FedAvg", "FedProx", "FedCD-SCI", "FedCD-SCI + REA"):
        for column, cell in zip("PACS", rows[method], strict=True):
            assert cell.published[0] == cells[method, column]


def test_the_ablations_are_table_1s_rows_and_the_papers_settings():
    changes = {run.name: run.changes for run in fedcd.RUNS}
    assert changes["beach/fedcd-sci/0"]["weigh"] == "by_size"
    assert changes["beach/fedcd-sci-rea/0"]["weigh"].startswith("risk_extrapolation")
    assert changes["beach/rea/0"]["method"] == "fedavg"
    assert {changes[f"beach/lambda{v}/0"]["fedcd.lambda_sci"] for v in fedcd.LAMBDAS} == {
        *(0.5, 0.7, 0.8, 0.9, 1.0)
    }
    etas = {changes[f"beach/eta{v}/0"]["weigh"] for v in fedcd.ETAS}
    assert etas == {f"risk_extrapolation:eta={v}" for v in (0.3, 0.5, 0.8)}


def test_the_share_that_groups_explain_is_between_none_and_all():
    random = np.random.default_rng(0)
    groups = np.arange(400) % 4
    noise = random.normal(size=400)
    features = np.stack([groups, noise, groups + np.sqrt(1.25) * noise, np.ones(400)], 1)
    shares = suppression.explained(features, groups)
    np.testing.assert_allclose(shares[[0, 3]], [1, 0])
    assert shares[1] < 0.05
    assert abs(shares[2] - 0.5) < 0.1
