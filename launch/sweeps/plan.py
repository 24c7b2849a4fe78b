"""A paper's tables and figures as data: which runs and tests they need, and which cell holds what.

The files of the papers make them from the protocols and rows of `rows`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from fedjax_bn.report.published import Cell as Published  # noqa: E402

UNSEEN = "unseen"  # in place of a domain: the mean over all unseen ones of a run
MEAN = "mean"  # in place of a domain: the mean over all internal clients
OWN = "own"  # in place of an adaptation: each internal client's own model, of an evaluation
# A copy of the digits has one of these domains: computer-rendered fonts stand in for SynthDigits.
STAND_INS = {"synth_digits": "fonts", "fonts": "synth_digits"}


class Evaluation(NamedTuple):
    """A finished run tested once more, which writes WORKDIR/RUN/evaluations/NAME.json.

    Attributes:
      name: of that file.
      changes: dotted key -> value.
      flags: such as "--internal".
      program: the arguments of Python in front of them.
    """

    name: str
    changes: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-m", "fedjax_bn.main", "evaluate")


class Run(NamedTuple):
    """One call of fedjax_bn.main, and perhaps tests of what it trained.

    Attributes:
      name: also its folder in the workdir, such as "digits/E1/fedbn/0".
      config: the config file, from the repository's root.
      changes: dotted key -> value, what differs from the config file.
      needs: dotted key -> NAME of --data.NAME=PATH, what the user must supply.
      tests: that follow.
      samples: domain -> training samples of each of its clients, where the paper gives the number;
        a report marks runs that trained on others.
    """

    name: str
    config: str
    changes: Mapping[str, Any]
    needs: Mapping[str, str]
    tests: tuple[Evaluation, ...] = ()
    samples: Mapping[str, int] = {}


class Cell(NamedTuple):
    """A number of a table: percent, as mean (std) over seeds.

    Attributes:
      parts: names of runs by target, alternative and seed: the mean is over targets; of several
        alternatives the one with the best validation accuracy counts, chosen by target.
      domain: the client, or the unseen domain, that the accuracy is of; or MEAN, or UNSEEN.
      published: what the paper prints; of several numbers their mean is shown.
      adaptation: that of an unseen domain.
      test: the evaluation that it is read from; empty: the run's summary.json.
      missing: why there are no runs.
    """

    parts: tuple[tuple[tuple[str, ...], ...], ...]
    domain: str
    published: tuple[Published, ...] = ()
    adaptation: str = "running"
    test: str = ""
    missing: str = ""

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of all its runs."""
        return tuple(name for part in self.parts for group in part for name in group)


class Table(NamedTuple):
    """A table of the paper: row label -> one cell a column (None for an empty one).

    Attributes:
      name: unique, such as "table1-abide".
      title: its numbers in the paper in front of a colon: "Table 2, Table E.5: Digits-DG".
      columns: their headings.
      rows: the cells.
      runs: all that they need.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell | None, ...]]
    runs: tuple[Run, ...]


class Figure(NamedTuple):
    """A figure of the paper.

    Attributes:
      name, title: as of a table.
      runs: those that it shows.
      draw: the workdir -> PNG bytes; None where none of its runs has finished.
    """

    name: str
    title: str
    runs: tuple[Run, ...]
    draw: Callable[[Path], bytes | None]


class Sweep(NamedTuple):
    """A paper.

    Attributes:
      name: of its file here, and of its folder.
      paper: its title in reports.
      tables, figures: in the paper's order.
    """

    name: str
    paper: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def parts(self) -> tuple[Table | Figure, ...]:
        """Tables and figures."""
        return (*self.tables, *self.figures)


def all_runs(parts: Iterable[Table | Figure]) -> tuple[Run, ...]:
    """The runs of tables and figures, each once, with the tests that any of them wants.

    Raises:
      ValueError: two different runs have one name.
    """
    found: dict[str, Run] = {}
    for run in (run for part in parts for run in part.runs):
        known = found.setdefault(run.name, run)
        if known[1:4] + known[5:] != run[1:4] + run[5:]:
            raise ValueError(f"two different runs are named {run.name}: give them other folders")
        tests = {test.name: test for test in (*known.tests, *run.tests)}
        found[run.name] = known._replace(tests=tuple(tests.values()))
    return tuple(found.values())


def target_in(path: str, target: str) -> str:
    """Returns the domain to leave out: `target`, or its stand-in where the data have that one.

    Args:
      path: of the digits, a folder of the originals or a `.npz`.
      target: the domain that the plan leaves out.
    """
    other = STAND_INS.get(target)
    if not other or not Path(path).exists():
        return target
    if Path(path).is_dir():
        return "synth_digits"
    from fedjax_bn.data.sets.arrays import names_in_npz

    try:
        domains = {name.partition("__")[0] for name in names_in_npz(Path(path))}
    except ValueError:  # which the run itself explains
        return target
    return other if target not in domains and other in domains else target


def finished(workdir: Path, name: str) -> bool:
    """Whether a run has ended."""
    return (workdir / name / "summary.json").exists()


def by_folder(names: Iterable[str]) -> str:
    """Names of runs with what differs last in braces: a/{0,1}, b/{0}."""
    found: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        found.setdefault(folder, []).append(last)
    return ", ".join(f"{folder}/{{{','.join(last)}}}" for folder, last in found.items())
