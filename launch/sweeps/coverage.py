"""For each of the papers' 2,037 published accuracies the command that makes it, or why none does.

    python launch/sweeps/coverage.py [--workdir DIR] [--data FOLDER]

A line a number: paper, table, data set, setting, method, column, value, and after a tab the
command of the first run from which it comes. After a `#` stand the place of the number in a file of
the run's folder, and the command of all runs where there are several: two numbers of one command
have two places. The last line is a JSON object: `rows`, `with_command`, and `without`, reason ->
count. All of it is read from the tables of the papers' sweeps.

The papers print more than accuracies and mAP50, which has no rows: figures without numbers, which
`--only "Fig. 3"` of a paper's sweep makes; FedIG's Table 4, parameters and times, which
benchmarks/fedig_costs.py measures; FedBN's Table 10 and the pictures of samples (FedBN's Fig. 6 is
in its sweep; TsmoBN's E.1, E.2 and E.6, UniFed's Fig. 4), which launch/pictures.py makes.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import fedbn
import fedcd
import fedig
import tsmobn
import unifed
from plan import MEAN, UNSEEN, Cell, Published, Run, Sweep, all_runs, config_file
from sweep import commands, locate

from fedjax_bn.report.published import cells
from fedjax_bn.run.config.file import read

SWEEPS = {
    "FedBN": fedbn.SWEEP,
    "FedIG-A": fedig.SWEEP,
    "TsmoBN": tsmobn.SWEEP,
    "UniFed": unifed.SWEEP,
    "FedCD": fedcd.SWEEP,
}
NO_TABLE = "in no table of a sweep"


class Answer(NamedTuple):
    """What makes a published number.

    Attributes:
      number: the number.
      command: of one run, and its test where there is one; empty for none.
      place: of the number, in a file in the run's folder.
      every: the command of all runs, where there are several.
      reason: why there is no command.
    """

    number: Published
    command: str
    place: str
    every: str
    reason: str


def answers(workdir: Path, data: Mapping[str, str]) -> Iterator[Answer]:
    """One for each published number, in the papers' order."""
    by_paper = {
        paper: (placed(sweep), {run.name: run for run in all_runs(sweep.parts)})
        for paper, sweep in SWEEPS.items()
    }
    for number in cells():
        places, runs = by_paper[number.paper]
        cell = places.get(number)
        if cell is None or not cell.runs:
            yield Answer(number, "", "", "", cell.missing if cell else NO_TABLE)
        else:
            folder = workdir / SWEEPS[number.paper].name
            yield _answer(number, cell, runs, SWEEPS[number.paper], folder, data)


def placed(sweep: Sweep) -> dict[Published, Cell]:
    """Published number -> the cell that stands beside it."""
    return {
        cell.published[0]: cell
        for table in sweep.tables
        for row in table.rows.values()
        for cell in row
        if cell and len(cell.published) == 1
    }


def _answer(
    number: Published,
    cell: Cell,
    runs: Mapping[str, Run],
    sweep: Sweep,
    workdir: Path,
    data: Mapping[str, str],
) -> Answer:
    run = runs[cell.runs[0]]
    tests = tuple(test for test in run.tests if test.name == cell.test)
    made = commands(run._replace(tests=tests), workdir, data)
    command = " && ".join(shlex.join(["python", *one]) for one in made)
    place = place_of(cell, run)
    if len(cell.runs) == 1:
        return Answer(number, command, place, "", "")
    folders = dict.fromkeys(f"{name.rpartition('/')[0]}/*" for name in cell.runs)
    only = shlex.quote(",".join(folders))
    every = f"python launch/sweeps/{sweep.name}.py --only {only}"
    return Answer(number, command, place, every, "")


def place_of(cell: Cell, run: Run) -> str:
    """Where a run's file has the number, as `summary.json: accuracy.unseen.fog.tsmobn`."""
    (test,) = [test for test in run.tests if test.name == cell.test] or [None]
    file, top = (f"evaluations/{test.name}.json", "") if test else ("summary.json", "accuracy.")
    domain = {MEAN: "mean", UNSEEN: "*"}.get(cell.domain, cell.domain)
    if test and "--internal" in test.flags:
        return f"{file}: internal.{cell.adaptation}.{domain}"
    target = {**run.changes, **(test.changes if test else {})}.get("target", _target(run.config))
    if not target or cell.domain == MEAN:
        return f"{file}: {top}internal.{domain}"
    return f"{file}: {top}unseen.{domain}.{cell.adaptation}"


@cache
def _target(config: str) -> str:
    """That of a config file."""
    return read(config_file(config)).target


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="The command of each published accuracy.")
    parser.add_argument("--workdir", type=Path, default=Path("runs"))
    parser.add_argument("--data", type=Path, help="folder with the data sets by their names")
    options = parser.parse_args(arguments)
    names = {n for s in SWEEPS.values() for r in all_runs(s.parts) for n in r.needs.values()}
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
