"""Lists, executes and reports the runs of a paper: the command line that all sweeps share.

    python launch/sweeps/PAPER.py [run] [--only WHAT] [--data FOLDER] [--workdir DIR] [--dry-run]
                                        [--jobs N] [--retries N]
    python launch/sweeps/PAPER.py list        the same as --dry-run
    python launch/sweeps/PAPER.py commands    a line a run, for an array of launch/slurm.sbatch
    python launch/sweeps/PAPER.py report      [--workdir DIR]

`run` executes the unfinished runs, N at a time, each on its share of the cores; if N is above 1,
their output is in DIR/logs. A run that was stopped continues, a run that another process trains is
left to that process, and a run that fails is tried again as often as --retries allows. The last
lines list the outcomes; the exit status is 0 if every run has finished, 1 if one failed, 3 if one
is in use or waits for data, 130 after Ctrl-C. With --dry-run all commands are printed instead.
`report` writes report.md and figures from finished runs.

--only takes globs of run names ("digits/E1/*") or tables and figures as the paper numbers them
("Table 3", "Fig. 4"), separated by commas. FOLDER has the data sets and weights by their NAMEs,
which the paper's file lists (FOLDER/pacs, or FOLDER/pacs.npz and so on); --data.NAME=PATH gives one
of them. A copy of the digits holds SynthDigits or the fonts that replace it: a run that leaves one
of them out takes the one that the copy has. --config.KEY=VALUE changes a key of every selected run,
as for fedjax_bn.main; the report lists such differences for every number.
"""

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from domains import target_in
from execute import WAITS, Job, Outcome, execute, exit_status, table
from plan import ROOT, Figure, Run, Sweep, Table, finished, text
from report import write_report


def train_command(
    run: Run, workdir: Path, data: Mapping[str, str], changes: Iterable[str] = ()
) -> list[str]:
    """Returns the arguments of Python that train a run; an unknown path becomes PATH_OF_NAME."""
    given = {key: data.get(name, f"PATH_OF_{name}") for key, name in run.needs.items()}
    planned = {**run.changes, **given}
    if "target" in planned:  # PATH may have the target's stand-in
        path = _changed(changes).get("data.path", planned.get("data.path", ""))
        planned["target"] = target_in(path, planned["target"])
    settings = [f"--config.{key}={text(value)}" for key, value in planned.items()]
    config = os.path.relpath(ROOT / run.config)
    parts = ["-m", "fedjax_bn.main", "--config", config, *settings, *changes]
    return [*parts, "--workdir", str(workdir / run.name)]


def _changed(changes: Iterable[str]) -> dict[str, str]:
    """Returns key -> text, from arguments `--config.KEY=TEXT`."""
    return dict(change.removeprefix("--config.").split("=", 1) for change in changes)


def commands(
    run: Run,
    workdir: Path,
    data: Mapping[str, str],
    changes: Iterable[str] = (),
    left: bool = False,
) -> list[list[str]]:
    """Returns the commands of a run, as Python's arguments: its training, then its tests.

    Args:
      data: NAME -> path.
      changes: arguments --config.KEY=VALUE of the training.
      left: whether finished parts are left out.
    """
    folder, made = workdir / run.name, []
    if not (left and finished(workdir, run.name)):
        made.append(train_command(run, workdir, data, changes))
    for test in run.tests:
        if not (left and (folder / "evaluations" / f"{test.name}.json").exists()):
            program = [os.path.relpath(ROOT / p) if p.endswith(".py") else p for p in test.program]
            given = ["--workdir", str(folder), f"--name={test.name}", *test.flags]
            settings = [f"--config.{key}={text(value)}" for key, value in test.changes.items()]
            made.append([*program, *given, *settings])
    return made


def select(sweep: Sweep, only: str) -> tuple[Run, ...]:
    """Returns the runs that match a glob of `only`, or that a table or figure of it needs."""
    chosen: set[str] = set()
    for pattern in map(str.strip, (only or "*").split(",")):
        parts = [p for p in sweep.parts if any(fnmatch(x, _plain(pattern)) for x in labels(p))]
        fitting = {run.name for run in sweep.runs if fnmatch(run.name, pattern)}
        fitting |= {run.name for part in parts for run in part.runs}
        if not fitting:
            titles = dict.fromkeys(p.title.partition(":")[0] for p in sweep.parts if p.runs)
            raise SystemExit(
                f"--only={pattern} fits no run of this sweep: give a glob of the names that `list` "
                f"prints, or one of {', '.join(titles)}"
            )
        chosen |= fitting
    return tuple(run for run in sweep.runs if run.name in chosen)


def labels(part: Table | Figure) -> set[str]:
    """Returns a part's labels: its name, and its numbers in the paper with and without letter."""
    numbers = [part.name, *part.title.partition(":")[0].split(",")]
    return {_plain(form) for n in numbers for form in (n, re.sub(r"(?<=\d)[a-z]$", "", n.strip()))}


def _plain(label: str) -> str:
    return re.sub(r"[\s._-]", "", label.lower())


def locate(folder: Path, needed: Iterable[str]) -> dict[str, str]:
    """Returns name -> path, for names that a folder has as NAME or as a single NAME.SUFFIX."""
    found = {}
    for name in needed:
        fitting = [folder / name] if (folder / name).exists() else sorted(folder.glob(f"{name}.*"))
        if len(fitting) == 1:
            found[name] = str(fitting[0])
    return found


def execute_all(
    chosen: Sequence[Run], options: argparse.Namespace, data: Mapping[str, str], changes: list[str]
) -> int:
    """Executes the unfinished runs and prints the outcomes; returns the exit status."""
    jobs, outcomes = [], []
    for run in chosen:
        # a finished run does not need its data
        lacks = sorted(set(run.needs.values()) - data.keys())
        if lacks and commands(run, options.workdir, data, left=True):
            paths = " ".join(f"--data.{name}=PATH" for name in lacks)
            outcomes.append(Outcome(run.name, WAITS, f"for {paths}"))
        else:
            todo = partial(commands, run, options.workdir, data, changes, left=True)
            jobs.append(Job(run.name, options.workdir / run.name, todo))
    logs = options.workdir / "logs" if options.jobs > 1 else None
    outcomes += execute(jobs, options.jobs, options.retries, logs)
    print(table(outcomes))
    return exit_status(outcomes)


def main(sweep: Sweep, arguments: list[str] | None = None) -> int:
    """Runs the command line of a sweep; returns the exit status."""
    needed = sorted({name for run in sweep.runs for name in run.needs.values()})
    parser = argparse.ArgumentParser(
        description=f"The runs of {sweep.paper}.",
        epilog="--data.NAME=PATH and --config.KEY=VALUE may be given any number of times; NAMEs: "
        + (", ".join(needed) or "none"),
        allow_abbrev=False,
    )
    actions = ("run", "list", "commands", "report")
    parser.add_argument("action", choices=actions, nargs="?", default="run")
    parser.add_argument("--workdir", type=Path, default=Path("runs") / sweep.name)
    parser.add_argument("--only", default="", help="tables, figures, or globs of run names")
    parser.add_argument("--data", type=Path, help="folder with the data sets by their NAMEs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of `run`")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--retries", type=int, default=0, help="of a run that fails")
    # argparse cannot declare --data.NAME and --config.KEY, whose names are open
    options, rest = parser.parse_known_args(arguments)
    data = locate(options.data, needed) if options.data else {}
    changes = []
    for argument in rest:
        name, equals, value = argument.partition("=")
        if equals and name.startswith("--config."):
            changes.append(argument)
        elif equals and name.removeprefix("--data.") in needed:
            data[name.removeprefix("--data.")] = value
        else:
            parser.error(f"unknown argument {argument}")  # the usage names the valid ones
    if options.action == "report":
        print(write_report(sweep, options.workdir))
        return 0
    given = _changed(changes)  # a run does not wait for data that --config.KEY=VALUE gives
    chosen = [
        run._replace(needs={key: name for key, name in run.needs.items() if key not in given})
        for run in select(sweep, options.only)
    ]
    if options.dry_run or options.action == "list":
        for run in chosen:
            for command in commands(run, options.workdir, data, changes):
                print(shlex.join(["python", *command]))
        return 0
    if options.action == "commands":
        # each line executes one run, with the data and the changes of this call
        script = os.path.relpath(ROOT / "launch" / "sweeps" / f"{sweep.name}.py")
        again = ["--workdir", str(options.workdir), f"--retries={options.retries}"]
        again += ["--data", str(options.data)] if options.data else []
        for run in chosen:
            if commands(run, options.workdir, {}, left=True):
                print(shlex.join(["python", script, "run", "--only", run.name, *again, *rest]))
        return 0
    return execute_all(chosen, options, data, changes)
