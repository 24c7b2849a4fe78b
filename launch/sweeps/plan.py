"""A paper's tables and figures as data: which runs and tests they need, and which cell holds what.

A *protocol* is a config file with what all rows of a table share, and its columns. A *training* is
what one row changes. Together they name runs, one for each target and seed. A *row* names the test
of these runs, and the row of the paper.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # an installed fedjax_bn comes first

from fedjax_bn.report.published import Cell as Published  # noqa: E402
from fedjax_bn.report.published import published as published_cells  # noqa: E402

UNSEEN = "unseen"  # instead of a domain: the mean over all unseen ones of a run
MEAN = "mean"  # instead of a domain: the mean over all internal clients
OWN = "own"  # instead of an adaptation: each internal client's own model, of an evaluation
# A copy of the digits has one of these domains: computer-rendered fonts replace SynthDigits.
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
    """One call of fedjax_bn.main, and tests of what it trained.

    Attributes:
      name: also its folder in the workdir, such as "digits/E1/fedbn/0".
      config: the config file, from the repository's root.
      changes: dotted key -> value, what differs from the config file.
      needs: dotted key -> NAME of --data.NAME=PATH, what the user must supply.
      tests: that follow.
      samples: domain -> training samples of each of its clients, if the paper gives the number; a
        report marks runs that trained on others.
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
      parts: names of runs by target, alternative and seed: the mean is over targets; if there are
        several alternatives, the one with the best validation accuracy counts, chosen by target.
      domain: the client or the unseen domain whose accuracy it is; or MEAN, or UNSEEN.
      published: what the paper prints; if there are several numbers, their mean is shown.
      adaptation: that of an unseen domain.
      test: the evaluation from which it is read; empty: the run's summary.json.
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
      draw: the workdir -> PNG bytes; None if none of its runs has finished.
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

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all parts, each once, with the tests that any part wants.

        Raises:
          ValueError: two different runs have one name.
        """
        found: dict[str, Run] = {}
        for run in (run for part in self.parts for run in part.runs):
            known = found.setdefault(run.name, run)
            if known._replace(tests=()) != run._replace(tests=()):
                raise ValueError(
                    f"two different runs are named {run.name}: give them other folders"
                )
            tests = {test.name: test for test in (*known.tests, *run.tests)}
            found[run.name] = known._replace(tests=tuple(tests.values()))
        return tuple(found.values())


class Training(NamedTuple):
    """What a row trains: a folder below its protocol's, changes of the config, later tests."""

    folder: str
    changes: Mapping[str, Any]
    tests: tuple[Evaluation, ...] = ()


class Column(NamedTuple):
    """A column of a table: the accuracy on a domain in the runs that leave out each of `targets`.

    A target "" changes nothing: the config's own, such as none.
    """

    targets: tuple[str, ...]
    domain: str


class Row(NamedTuple):
    """A row of a table.

    Attributes:
      trainings: one, or several from which validation chooses one.
      adaptation, test: see `Cell`.
      published: the method's name in the published table; empty: the row's label.
    """

    trainings: tuple[Training, ...]
    adaptation: str = "running"
    published: str = ""
    test: str = ""


class Protocol(NamedTuple):
    """What the rows of a table share.

    Attributes:
      name: the folder of its runs.
      config: the config file.
      columns: heading -> column.
      seeds: how many, from 0 on.
      needs: see `Run`.
      changes: of the config, by all rows.
      samples: see `Run`.
    """

    name: str
    config: str
    columns: Mapping[str, Column]
    seeds: int
    needs: Mapping[str, str]
    changes: Mapping[str, Any]
    samples: Mapping[str, int] = {}

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of all columns."""
        return tuple(dict.fromkeys(t for column in self.columns.values() for t in column.targets))

    def names(self, target: str, training: Training) -> tuple[str, ...]:
        """Returns the names of the runs of a target and a training, one a seed."""
        folder = "/".join(filter(None, (self.name, target.replace(" ", "_"), training.folder)))
        return tuple(f"{folder}/{seed}" for seed in range(self.seeds))

    def runs(self, trainings: Iterable[Training]) -> tuple[Run, ...]:
        """Returns a run for each training, target and seed."""
        found = []
        for training in trainings:
            for target in self.targets:
                for seed, name in enumerate(self.names(target, training)):
                    # "" keeps the config's own target
                    given = {"target": target} if target else {}
                    changes = {**self.changes, **training.changes, **given, "seed": seed}
                    ends = (self.needs, training.tests, self.samples)
                    found.append(Run(name, self.config, changes, *ends))
        return tuple(found)

    def cell(self, row: Row, column: Column, printed: Sequence[Published] = ()) -> Cell:
        """Returns the cell of a row and a column, beside published numbers."""
        parts = tuple(tuple(self.names(t, one) for one in row.trainings) for t in column.targets)
        return Cell(parts, column.domain, tuple(printed), row.adaptation, row.test)


def training(
    method: str, folder: str = "", tests: tuple[Evaluation, ...] = (), **keys: Any
) -> Training:
    """Returns the training of a method with keys of the config, fedsr__cmi for fedsr.cmi.

    Its folder is the method's name unless another is given.
    """
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    return Training(folder or method, {"method": method, **changes}, tests)


def columns_of(domains: Mapping[str, str], target: str = "") -> dict[str, Column]:
    """Returns columns from heading -> domain: clients, or domains left out together as `target`."""
    return {heading: Column((target,), domain) for heading, domain in domains.items()}


def left_out(domains: Mapping[str, str]) -> dict[str, Column]:
    """Returns columns of domains that are left out one after the other, from heading -> domain.

    The cell of a domain with a stand-in takes whichever was left out, see `domains.target_in`.
    """
    return {
        heading: Column((domain,), UNSEEN if domain in STAND_INS else domain)
        for heading, domain in domains.items()
    }


def table(
    name: str,
    title: str,
    protocol: Protocol,
    rows: Mapping[str, Row | Training | str],
    where: Mapping[str, str] | None = None,
    average: str = "",
) -> Table:
    """Returns a table whose rows share a protocol, beside the published numbers.

    Args:
      name, title: see `Table`.
      protocol: see there.
      rows: label -> row; a training alone, tested with running statistics; or why it has no runs.
      where: fields of the published cells beside it, such as {"paper": "FedBN", "table": "11"}.
      average: heading of a column of the mean over all others; empty for none.
    """
    printed = published_cells(**where) if where else ()
    printed = {(one.method, one.column): one for one in printed}
    columns = dict(protocol.columns)
    if average:  # over unseen domains where each column is of the domain left out, else clients
        outside = all(c.domain == UNSEEN or c.targets == (c.domain,) for c in columns.values())
        columns[average] = Column(protocol.targets, UNSEEN if outside else MEAN)
    found: dict[str, tuple[Cell, ...]] = {}
    trainings: list[Training] = []
    for label, row in rows.items():
        row = Row((row,)) if isinstance(row, Training) else row
        method = row.published or label if isinstance(row, Row) else label
        theirs = {h: tuple(printed[k] for k in [(method, h)] if k in printed) for h in columns}
        if isinstance(row, Row):
            trainings += row.trainings
            found[label] = tuple(protocol.cell(row, c, theirs[h]) for h, c in columns.items())
        else:
            cells = (Cell((), c.domain, theirs[h], missing=row) for h, c in columns.items())
            found[label] = tuple(cells)
    return Table(name, title, tuple(columns), found, protocol.runs(trainings))


def stacked(name: str, title: str, parts: Sequence[tuple[str, Table]]) -> Table:
    """Returns tables of the same columns below each other, each with a prefix for its labels."""
    rows = {f"{prefix}{label}": row for prefix, part in parts for label, row in part.rows.items()}
    runs = tuple(run for _, part in parts for run in part.runs)
    return Table(name, title, parts[0][1].columns, rows, runs)


def config_file(config: str) -> str:
    """Returns the path of a `Run`'s config, with the changes after its colon."""
    name, colon, inline = config.partition(":")
    return f"{ROOT / name}{colon}{inline}"


def text(value: Any) -> str:
    """Returns a value as the command line writes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def finished(workdir: Path, name: str) -> bool:
    """Returns whether a run has ended."""
    return (workdir / name / "summary.json").exists()


def by_folder(names: Iterable[str]) -> str:
    """Returns names of runs with what differs last in braces: a/{0,1}, b/{0}."""
    found: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        found.setdefault(folder, []).append(last)
    return ", ".join(f"{folder}/{{{','.join(last)}}}" for folder, last in found.items())
