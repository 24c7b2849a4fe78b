"""For each of the papers' 2,037 published numbers the command that makes it, or why there is none.

    python launch/sweeps/coverage.py [--workdir DIR] [--data FOLDER]

A line a number: paper, table, data set, setting, method, column, value, and behind a tab the
command of the first run that it comes from, with the command of all of them behind a `#` where
there are several. The last line is a JSON object: `rows`, `with_command`, and `without`, reason ->
count. All of it is read from the tables of the papers' sweeps. The papers' figures without printed
numbers are no rows; `--only "Fig. 3"` of a paper's sweep makes those.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import fedbn
import fedcd
import fedig
import tsmobn
import unifed
from plan import Cell, Published, Run, Sweep, all_runs
from sweep import commands, locate

from fedjax_bn.run.report.published import cells

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
      command: of one run, and its test where there is one; empty: there is none.
      every: the command of all runs, where there are several.
      reason: why there is none.
    """

    number: Published
    command: str
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
            yield Answer(number, "", "", cell.missing if cell else NO_TABLE)
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
    if len(cell.runs) == 1:
        return Answer(number, command, "", "")
    folders = dict.fromkeys(f"{name.rpartition('/')[0]}/*" for name in cell.runs)
    only = shlex.quote(",".join(folders))
    every = f"python launch/sweeps/{sweep.name}.py --only {only}"
    return Answer(number, command, every, "")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="The command behind each published number.")
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
        behind = f"{answer.command}  # of {answer.every}" if answer.every else answer.command
        print(*where, number.column, number.mean, sep=" | ", end="\t")
        print(behind or f"none: {answer.reason}")
        if answer.command:
            with_command += 1
        else:
            without[answer.reason] += 1
    result = {"rows": rows, "with_command": with_command, "without": dict(without)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
