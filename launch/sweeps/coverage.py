"""Prints the command of each of the papers' 2,037 published accuracies, or why it has no command.

    python launch/sweeps/coverage.py [--workdir DIR] [--data FOLDER]
    python launch/sweeps/coverage.py --protocols

Each number has a line: paper, table, data set, setting, method, column, value, and after a tab the
command of the first run that makes it. After a `#` follow the number's place in a file of the run's
folder and, if there are several runs, the command of all. Two numbers of one command have two
places. The last line is a JSON object: `rows`, `with_command`, and `without`, reason -> count. All
of it comes from the tables of the papers' sweeps.

`--protocols` writes fedjax_bn/report/paper_protocols.json, by which a report finds published
numbers for its runs: for each published table the config, the changes and the test of each row.

Some results of the papers are not accuracies or mAP50 and have no line here. `--only "Fig. 3"` of a
paper's sweep makes figures without numbers, FedBN's Fig. 6 among them; benchmarks/fedig_costs.py
measures FedIG's Table 4, parameters and times; launch/pictures.py makes FedBN's Table 10 and the
pictures of samples (TsmoBN's E.1, E.2 and E.6, UniFed's Fig. 4).
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fedbn
import fedcd
import fedig
import tsmobn
import unifed
from plan import MEAN, ROOT, UNSEEN, Cell, Published, Run, Sweep, configuration
from sweep import commands, locate

from fedjax_bn.report.published import PROTOCOLS, UNSTATED, cells
from fedjax_bn.training.workdir import write_atomically

SWEEPS = {
    "FedBN": fedbn.SWEEP,
    "FedIG-A": fedig.SWEEP,
    "TsmoBN": tsmobn.SWEEP,
    "UniFed": unifed.SWEEP,
    "FedCD": fedcd.SWEEP,
}
NO_TABLE = "in no table of a sweep"
KEPT_APART = ("seed", "target", "baselines", "adaptations")  # changes that a protocol leaves out


class Answer(NamedTuple):
    """How a published number is reproduced."""

    number: Published  # the number
    command: str  # the command of one run, and of its test if there is one; "" if there is no run
    place: str  # the number's place in a file of the run's folder
    every: str  # the command of all runs if there are several
    reason: str  # why there is no command


def answers(workdir: Path, data: Mapping[str, str]) -> Iterator[Answer]:
    """Yields an answer for each published number, in the papers' order."""
    by_paper = {
        paper: (placed(sweep), {run.name: run for run in sweep.runs})
        for paper, sweep in SWEEPS.items()
    }
    for number in cells():
        places, runs = by_paper[number.paper]
        cell = places.get(number)
        if cell is None or not cell.runs:
            yield Answer(number, "", "", "", cell.missing if cell else NO_TABLE)
            continue
        run, name = runs[cell.runs[0]], SWEEPS[number.paper].name
        tests = tuple(test for test in run.tests if test.name == cell.test)
        made = commands(run._replace(tests=tests), workdir / name, data)
        command = " && ".join(shlex.join(["python", *one]) for one in made)
        folders = dict.fromkeys(f"{name.rpartition('/')[0]}/*" for name in cell.runs)
        only = shlex.quote(",".join(folders))
        every = f"python launch/sweeps/{name}.py --only {only}" if len(cell.runs) > 1 else ""
        yield Answer(number, command, place_of(cell, run), every, "")


def placed(sweep: Sweep) -> dict[Published, Cell]:
    """Returns published number -> the cell of the sweep that reproduces it."""
    return {
        cell.published[0]: cell
        for table in sweep.tables
        for row in table.rows.values()
        for cell in row
        if cell and len(cell.published) == 1
    }


def place_of(cell: Cell, run: Run) -> str:
    """Returns a number's place in a run's files: `summary.json: accuracy.unseen.fog.tsmobn`."""
    (test,) = [test for test in run.tests if test.name == cell.test] or [None]
    file, top = (f"evaluations/{test.name}.json", "") if test else ("summary.json", "accuracy.")
    domain = {MEAN: "mean", UNSEEN: "*"}.get(cell.domain, cell.domain)
    if test and "--internal" in test.flags:
        return f"{file}: internal.{cell.adaptation}.{domain}"
    if not _is_unseen(cell, run):
        return f"{file}: {top}internal.{domain}"
    return f"{file}: {top}unseen.{domain}.{cell.adaptation}"


def _is_unseen(cell: Cell, run: Run) -> bool:
    """Returns whether a cell's domain has no client in the run."""
    target = run.changes.get("target", _read(run.config).target)
    pooled = run.changes.get("data.partition") == "pooled"  # one client, tested on each domain
    return pooled or (bool(target) and cell.domain != MEAN)


_read = cache(configuration)  # reading a config file takes 50 ms


@cache
def _settings(paper: str, table: str, dataset: str) -> set[str]:
    """Returns the settings of a published table."""
    return {number.setting for number in cells() if number[:3] == (paper, table, dataset)}


def protocols() -> list[dict[str, Any]]:
    """Returns the content of paper_protocols.json: the tables whose runs a report may show.

    A report does not show later tests of finished runs. Tests on other corruptions count here as
    runs that leave these corruptions out too.
    """
    tables: dict[str, dict[str, Any]] = {}
    for sweep in SWEEPS.values():
        runs = {run.name: run for run in sweep.runs}
        for number, cell in placed(sweep).items():
            every = [runs[name] for name in cell.runs]
            tests = [test for run in every for test in run.tests if test.name == cell.test]
            # no report shows a test with flags, such as --internal
            if every and not any(test.flags for test in tests):
                _add(tables, number, cell, every, tests[0].changes if tests else {})
    for table in tables.values():
        # changes that all rows share are written once
        rows = [changes for row in table["rows"].values() for changes in row["changes"]]
        table["changes"] = {k: v for k, v in rows[0].items() if all(r.get(k) == v for r in rows)}
        for changes in rows:
            for key in table["changes"]:
                del changes[key]
        left_out = table.pop("targets")
        table["target"] = left_out[0] if len(left_out) == 1 else None
    return list(tables.values())


def _add(
    tables: dict[str, Any],
    number: Published,
    cell: Cell,
    runs: Sequence[Run],
    tested: Mapping[str, Any],
) -> None:
    """Adds a number and its runs to the table to which they belong."""
    first, unseen = runs[0], _is_unseen(cell, runs[0])
    start = "weights of ImageNet" if "pretrained" in first.needs else ""
    shared = {
        "where": number[:4],
        "name": f"{number.paper}, Table {number.table}"
        + (f" ({number.setting})" if len(_settings(*number[:3])) > 1 else ""),
        "kind": "unseen" if unseen else "internal",
        "metric": number.metric.removesuffix("_percent"),
        "config": first.config.removeprefix("configs/").replace(".py", ""),
        "dataset": first.changes.get("data.name", _read(first.config).data.name),
        # FedCD names no initial weights; its sweep takes ImageNet's
        "start": UNSTATED if number.paper == "FedCD" else start,
        "samples": dict(first.samples),
    }
    table = tables.setdefault(
        json.dumps(shared), {**shared, "columns": {}, "targets": [], "rows": {}}
    )
    domain = "mean" if cell.domain in (MEAN, UNSEEN) else cell.domain
    table["columns"][domain] = number.column
    adaptation = cell.adaptation if unseen else ""
    row = table["rows"].setdefault(number.method, {"adaptation": adaptation, "changes": []})
    for run in runs:
        target = run.changes.get("target", _read(run.config).target)
        target = ",".join(filter(None, (target, tested.get("target"))))
        if target not in table["targets"]:
            table["targets"].append(target)
        changes = {k: v for k, v in run.changes.items() if k not in KEPT_APART}
        changes |= {"data.domains": ()} if "data.domains" in tested else {}
        changes = json.loads(json.dumps(changes))  # tuples become lists, as in the file
        if changes not in row["changes"]:
            row["changes"].append(changes)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="The command of each published accuracy.")
    parser.add_argument("--workdir", type=Path, default=Path("runs"))
    parser.add_argument("--data", type=Path, help="folder with the data sets by their names")
    parser.add_argument("--protocols", action="store_true", help=f"write {PROTOCOLS}")
    options = parser.parse_args(arguments)
    if options.protocols:
        lines = ",\n".join(json.dumps(table) for table in protocols())
        write_atomically(ROOT / "fedjax_bn" / "report" / PROTOCOLS, f"[\n{lines}\n]\n")
        return 0
    names = {n for s in SWEEPS.values() for r in s.runs for n in r.needs.values()}
    data = locate(options.data, names) if options.data else {}
    without: Counter[str] = Counter()
    rows = with_command = 0
    for answer in answers(options.workdir, data):
        number, rows = answer.number, rows + 1
        where = (number.paper, number.table, number.dataset, number.setting, number.method)
        after = answer.command and f"{answer.command}  # {answer.place}"
        after += f", of {answer.every}" if answer.every else ""
        print(*where, number.column, number.mean, sep=" | ", end="\t")
        print(after or f"none: {answer.reason}")
        if answer.command:
            with_command += 1
        else:
            without[answer.reason] += 1
    result = {"rows": rows, "with_command": with_command, "without": dict(without)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
