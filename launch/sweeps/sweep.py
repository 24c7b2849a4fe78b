"""What the sweeps share: the commands that list, run and report the runs of a paper.

    python launch/sweeps/PAPER.py list   --workdir DIR [--only GLOB] [--data.NAME=PATH ...]
    python launch/sweeps/PAPER.py run    --workdir DIR [--only GLOB] [--data.NAME=PATH ...]
    python launch/sweeps/PAPER.py report --workdir DIR

`list` prints the commands. `run` executes those that are not finished, one after another; a run
that was stopped goes on where it was. `report` writes report.md and figures from what has finished.
--only takes globs of run names ("digits/E1/*") or names of tables and figures ("table11"), several
behind commas. --config.KEY=VALUE changes a key of every selected run, as for fedjax_bn.main.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from plan import ROOT, Run, Sweep, finished, runs_of
from report import write_report


def command(
    run: Run, workdir: Path, data: dict[str, str], changes: Iterable[str] = ()
) -> list[str]:
    """The arguments of Python that make a run; an unknown path is written PATH_OF_NAME."""
    path = {"data.path": data.get(run.data, f"PATH_OF_{run.data}")} if run.data else {}
    settings = [f"--config.{key}={_text(value)}" for key, value in (run.changes | path).items()]
    config = os.path.relpath(ROOT / run.config)
    parts = ["-m", "fedjax_bn.main", "--config", config, *settings, *changes]
    return [*parts, "--workdir", str(workdir / run.name)]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def select(sweep: Sweep, only: str) -> list[Run]:
    """The runs whose name fits a glob of `only`, or that a table or figure of that name needs.

    Raises:
      SystemExit: none does.
    """
    if not only:
        return list(sweep.runs)
    patterns = only.split(",")
    names = {run.name for run in sweep.runs if any(fnmatch(run.name, p) for p in patterns)}
    if not all(any(fnmatch(run.name, p) for run in sweep.runs) for p in patterns):
        for part in (*sweep.tables(), *sweep.figures()):
            if any(fnmatch(part.name, p) for p in patterns):
                names |= set(runs_of(part))
    chosen = [run for run in sweep.runs if run.name in names]
    if not chosen:
        raise SystemExit(f"--only={only} fits no run, table or figure; see `list` for all names")
    return chosen


def execute(chosen: list[Run], workdir: Path, data: dict[str, str], changes: list[str]) -> int:
    """Runs what is not finished; returns how many runs failed. Ctrl-C stops all."""
    missing = sorted({run.data for run in chosen if run.data and run.data not in data})
    ready = [run for run in chosen if run.data not in missing]
    for name in missing:
        count = sum(run.data == name for run in chosen)
        print(f"{count} runs wait for --data.{name}=PATH", file=sys.stderr)
    failed = []
    for number, run in enumerate(ready, start=1):
        if finished(workdir, run.name):
            continue
        print(f"[{number}/{len(ready)}] {run.name}", file=sys.stderr, flush=True)
        status = subprocess.run([sys.executable, *command(run, workdir, data, changes)]).returncode
        if status == 130:
            raise SystemExit(status)
        if status:
            failed.append(run.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def main(sweep: Sweep, arguments: list[str] | None = None) -> int:
    """The command line of a sweep; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=f"The runs behind {sweep.paper}.",
        epilog="--data.NAME=PATH and --config.KEY=VALUE may be given any number of times",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("list", "run", "report"))
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--only", default="", help="globs of run names, or names of tables")
    options, rest = parser.parse_known_args(arguments)
    data, changes = {}, []
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not equals or not name.startswith(("--data.", "--config.")):
            parser.error(
                f"unknown argument {argument}: write --data.NAME=PATH or --config.KEY=VALUE"
            )
        if name.startswith("--data."):
            data[name.removeprefix("--data.")] = value
        else:
            changes.append(argument)
    unknown = set(data) - {run.data for run in sweep.runs}
    if unknown:
        known = sorted({run.data for run in sweep.runs} - {""})
        parser.error(f"there is no --data.{min(unknown)}: valid are {', '.join(known)}")
    if options.action == "report":
        print(write_report(sweep, options.workdir))
        return 0
    chosen = select(sweep, options.only)
    if options.action == "list":
        for run in chosen:
            print(shlex.join(["python", *command(run, options.workdir, data, changes)]))
        return 0
    return min(execute(chosen, options.workdir, data, changes), 1)
