"""Describes a paper's tables and figures as data: their runs, their tests, and their cells.

A *protocol* is a config file, with the changes that all rows of a table share, and the columns. A
*training* is the changes of one row. Together they name runs, one for each target and seed. A *row*
names the test of these runs, and the row of the paper.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # an installed fedjax_bn comes first

from fedjax_bn.report.published import PublishedNumber as Published  # noqa: E402
from fedjax_bn.report.published import published as published_cells  # noqa: E402
from fedjax_bn.run.config.file import read  # noqa: E402

UNSEEN = "unseen"  # instead of a domain: the mean over all unseen ones of a run
MEAN = "mean"  # instead of a domain: the mean over all internal clients
OWN = "own"  # instead of an adaptation: an evaluation of each internal client's own model
# A copy of the digits has one of these domains: computer-rendered fonts replace SynthDigits.
STAND_INS = {"synth_digits": "fonts", "fonts": "synth_digits"}


class Evaluation(NamedTuple):
    """A later test of a finished run, which writes WORKDIR/RUN/evaluations/NAME.json."""

    name: str
    changes: Mapping[str, Any]  # dotted key -> value of the changed keys
    flags: tuple[str, ...] = ()  # such as "--internal"
    program: tuple[str, ...] = ("-m", "fedjax_bn.main", "evaluate")  # before the flags


class Run(NamedTuple):
    """One call of fedjax_bn.main, and the tests of its model."""

    name: str  # also of its folder in the workdir, such as "digits/E1/fedbn/0"
    config: str  # the config file, relative to the repository's root
    changes: Mapping[str, Any]  # dotted key -> value, for keys that differ from the config file
    needs: Mapping[str, str]  # dotted key -> NAME of --data.NAME=PATH, which the user supplies
    tests: tuple[Evaluation, ...] = ()  # after the training
    # domain -> training samples of each of its clients, if the paper states the number; a report
    # marks runs that trained on another number
    samples: Mapping[str, int] = {}


class Cell(NamedTuple):
    """A number of a table: percent, as mean (std) over seeds."""

    # the names of runs by target, alternative and seed. The number is a mean over targets; if a
    # target has several alternatives, the one with the best validation accuracy counts
    parts: tuple[tuple[tuple[str, ...], ...], ...]
    domain: str  # the client or the unseen domain whose accuracy it is; or MEAN, or UNSEEN
    # the paper's number; if there are several, their mean is shown
    published: tuple[Published, ...] = ()
    adaptation: str = "running"  # the adaptation on an unseen domain
    test: str = ""  # the name of the evaluation that has the number; "" for the run's summary.json
    missing: str = ""  # why there are no runs

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of all its runs."""
        return tuple(name for part in self.parts for group in part for name in group)


class Table(NamedTuple):
    """A table of the paper: row label -> one cell a column (None for an empty one)."""

    name: str  # unique, such as "table1-abide"
    title: str  # starts with the paper's numbers: "Table 2, Table E.5: Digits-DG"
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell | None, ...]]
    runs: tuple[Run, ...]  # all that the cells need


class Figure(NamedTuple):
    """A figure of the paper, as `Table`."""

    name: str
    title: str
    runs: tuple[Run, ...]
    draw: Callable[[Path], bytes | None]  # workdir -> PNG, or None if none of the runs has finished


class Sweep(NamedTuple):
    """The tables and figures of a paper, in its order."""

    name: str  # of its file here, and of its folder
    paper: str  # the title in reports
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def parts(self) -> tuple[Table | Figure, ...]:
        """Tables and figures."""
        return (*self.tables, *self.figures)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all parts, each once, with the tests that any part needs."""
        merged: dict[str, Run] = {}
        for run in (run for part in self.parts for run in part.runs):
            same = merged.setdefault(run.name, run)
            # two different runs of one name would write into one folder
            assert same._replace(tests=()) == run._replace(tests=()), run.name
            tests = {test.name: test for test in (*same.tests, *run.tests)}
            merged[run.name] = same._replace(tests=tuple(tests.values()))
        return tuple(merged.values())


class Training(NamedTuple):
    """The training of a row: a folder below the protocol's, config changes, later tests."""

    folder: str
    changes: Mapping[str, Any]
    tests: tuple[Evaluation, ...] = ()


class Column(NamedTuple):
    """A column of a table: the accuracy on a domain, averaged over runs that leave out a target.

    The target "" keeps the config's own target.
    """

    targets: tuple[str, ...]
    domain: str


class Row(NamedTuple):
    """A row of a table; `adaptation` and `test` are as in `Cell`."""

    trainings: tuple[Training, ...]  # one, or several of which validation chooses one
    adaptation: str = "running"
    published: str = ""  # the method's name in the published table; empty: the row's label
    test: str = ""


class Protocol(NamedTuple):
    """What the rows of a table share; `needs` and `samples` are as in `Run`."""

    name: str  # the folder of its runs
    config: str
    columns: Mapping[str, Column]  # heading -> column
    seeds: int  # their number; they start at 0
    needs: Mapping[str, str]
    changes: Mapping[str, Any]  # of the config, which all rows share
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
        runs = []
        for training, target in product(trainings, self.targets):
            for seed, name in enumerate(self.names(target, training)):
                left_out = {"target": target} if target else {}  # "" keeps the config's own
                changes = {**self.changes, **training.changes, **left_out, "seed": seed}
                ends = (self.needs, training.tests, self.samples)
                runs.append(Run(name, self.config, changes, *ends))
        return tuple(runs)

    def cell(
        self, row: Row, column: Column, printed: Sequence[Published] = (), missing: str = ""
    ) -> Cell:
        """Returns the cell of a row and a column, beside published numbers."""
        targets = () if missing else column.targets
        parts = tuple(tuple(self.names(t, one) for one in row.trainings) for t in targets)
        return Cell(parts, column.domain, tuple(printed), row.adaptation, row.test, missing)


def training(
    method: str, folder: str = "", tests: tuple[Evaluation, ...] = (), **keys: Any
) -> Training:
    """Returns the training of a method, such as fedprox:mu=0.1, with changed keys of the config.

    data__augment is the key data.augment. The folder is the method's name unless another is given.
    """
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    return Training(folder or method.partition(":")[0], {"method": method, **changes}, tests)


def columns_of(domains: Mapping[str, str], target: str = "") -> dict[str, Column]:
    """Returns columns from heading -> domain, for clients or for domains left out as `target`."""
    return {heading: Column((target,), domain) for heading, domain in domains.items()}


def left_out(domains: Mapping[str, str]) -> dict[str, Column]:
    """Returns columns from heading -> domain, for domains that are left out one after the other.

    If a domain has a stand-in, its cell takes the one that was left out, see `domains.target_in`.
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
      rows: label -> row; or a training, tested with running statistics; or why there are no runs.
      where: the fields of the published cells, such as {"paper": "FedBN", "table": "11"}.
      average: the heading of a column with the mean over all others; "" for no such column.
    """
    printed = published_cells(**where) if where else ()
    printed = {(one.method, one.column): one for one in printed}
    columns = dict(protocol.columns)
    if average:  # over unseen domains if each column is one that was left out, else over clients
        outside = all(c.domain == UNSEEN or c.targets == (c.domain,) for c in columns.values())
        columns[average] = Column(protocol.targets, UNSEEN if outside else MEAN)
    cells: dict[str, tuple[Cell, ...]] = {}
    trainings: list[Training] = []
    for label, row in rows.items():
        missing, row = (row, Row(())) if isinstance(row, str) else ("", row)
        row = Row((row,)) if isinstance(row, Training) else row
        trainings += row.trainings
        cells[label] = tuple(
            protocol.cell(row, column, [printed[key]] if key in printed else [], missing)
            for key, column in (((row.published or label, h), c) for h, c in columns.items())
        )
    return Table(name, title, tuple(columns), cells, protocol.runs(trainings))


def stacked(name: str, title: str, parts: Sequence[tuple[str, Table]]) -> Table:
    """Returns one table from several with the same columns, each with a prefix for its labels."""
    rows = {f"{prefix}{label}": row for prefix, part in parts for label, row in part.rows.items()}
    runs = tuple(run for _, part in parts for run in part.runs)
    return Table(name, title, parts[0][1].columns, rows, runs)


def config_file(config: str) -> str:
    """Returns the path of a `Run`'s config, with the changes after its colon."""
    name, colon, inline = config.partition(":")
    return f"{ROOT / name}{colon}{inline}"


def configuration(
    config: str, changes: Mapping[str, Any] | None = None, more: Sequence[tuple[str, str]] = ()
) -> ConfigDict:
    """Returns what a `Run`'s config file gives with changes, dotted key -> value, and with more."""
    texts = [(key, text(value)) for key, value in (changes or {}).items()]
    return read(config_file(config), [*texts, *more])


def where(paper: str, number: int | str, **more: str) -> dict[str, str]:
    """Returns the fields of the published cells of a table."""
    return {"paper": paper, "table": str(number), **more}


def text(value: Any) -> str:
    """Returns a value as the command line takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def finished(workdir: Path, name: str) -> bool:
    """Returns whether a run has finished."""
    return (workdir / name / "summary.json").exists()


def by_folder(names: Iterable[str]) -> str:
    """Returns names of runs with their last parts in braces: a/{0,1}, b/{0}."""
    found: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        found.setdefault(folder, []).append(last)
    return ", ".join(f"{folder}/{{{','.join(last)}}}" for folder, last in found.items())
