"""Every published number has a run that makes it, or a reason; reports and tables find it again."""

import importlib.util
import json
from pathlib import Path

import pytest
import tables

from fedjax_bn.report.published import PROTOCOLS

ROOT = Path(__file__).parents[2]
# By its path: a package of PyPI has the same name.
spec = importlib.util.spec_from_file_location("of_papers", ROOT / "launch/sweeps/coverage.py")
coverage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(coverage)


@pytest.fixture(scope="module")
def covered() -> dict[tuple[str, ...], coverage.Answer]:
    every = coverage.answers(Path("runs"), {})
    return {(a.number.paper, a.number.table, a.number.dataset, a.number.setting, a.number.method,
             a.number.column): a for a in every}  # fmt: skip


def test_every_published_number_has_a_command_or_a_reason(capsys):
    assert coverage.main([]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 2037
    assert json.loads(last) == {
        "rows": 2037,
        "with_command": 2027,
        "without": {"a rival whose formula is not to be had": 10},
    }


@pytest.mark.parametrize(
    ("row", "parts", "place"),
    [
        (
            ("FedIG-A", "2", "PACS", "client-agnostic objectives", "FedIG, CACL", "Avg"),
            ("configs/pacs.py", "method=fedig", "lambda_2=0.0", "target=photo", "pretrained="),
            "summary.json: accuracy.unseen.*.running",
        ),
        (
            ("FedIG-A", "12", "VLCS", "clients inside the federation",
             "FedIG-A (global statistics)", "L"),
            ("method=fediga", "target=VOC2007", "evaluate", "--internal"),
            "evaluations/inside.json: internal.zero_shot_adapter.LabelMe",
        ),
        (
            ("FedBN", "13", "Digits-Five", "B=50, E=16", "FedAvg", "USPS"),
            ("batch_size=50", "local_epochs=16", "rounds=19", "method=fedavg"),
            "summary.json: accuracy.internal.usps",
        ),
    ],
)  # fmt: skip
def test_command_and_place_are_those_of_the_experiment(row, parts, place, covered):
    command = covered[row].command
    assert all(part in command for part in parts), command
    assert covered[row].place == place


def test_numbers_of_a_table_that_differ_are_read_from_places_that_differ(covered):
    places = {}
    for number, answer in ((a.number, a) for a in covered.values() if a.command):
        table = (number.paper, number.table, number.dataset, number.setting)
        places.setdefault((*table, answer.command, answer.place), []).append(number)
    assert [numbers for numbers in places.values() if len(numbers) > 1] == []


def test_reports_find_the_papers_numbers_by_the_protocols_of_the_sweeps():
    """`coverage.py --protocols` writes the file again where a sweep has changed."""
    file = ROOT / "fedjax_bn" / "report" / PROTOCOLS
    assert json.loads(file.read_text()) == json.loads(json.dumps(coverage.protocols()))


def test_a_table_is_made_once_and_one_without_data_waits(tmp_path, monkeypatch, capsys):
    count = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.open('a').write('x')"
    made = {
        "a/good": tables.Table(1, (f'-c "{count}" {{workdir}}/runs', "-c 'print(6 * 7)'")),
        "a/bad": tables.Table(2, ("-c 'print(1)'", "-c 'raise SystemExit(5)'")),
        "b/far": tables.Table(3, ("-c 'print(2)' {digits}",)),
    }
    monkeypatch.setattr(tables, "TABLES", made)
    arguments = ["--workdir", str(tmp_path), "--data", str(tmp_path)]
    assert tables.main([*arguments, "--dry-run"]) == 3
    assert not (tmp_path / "tables").exists()
    assert tables.main([*arguments, "--only", "b/*"]) == 3
    assert "waits for DATA/digits.npz" in capsys.readouterr().out
    for _ in range(2):
        assert tables.main(arguments) == 1
    assert (tmp_path / "runs").read_text() == "x"
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {"a-good.txt", "a-bad.part"}
    assert (tmp_path / "tables" / "a-good.txt").read_text().splitlines()[-1] == "42"
