"""How a paper's tables are made: protocols, trainings and rows name runs and cells.

A *protocol* is a config file with what all rows of a table share, and what its columns are. A
*training* is what one row changes. Together they name runs, one a target and seed; a *row* says how
these are tested, and which row of the paper it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from plan import MEAN, STAND_INS, UNSEEN, Cell, Evaluation, Published, Run, Table

from fedjax_bn.report.published import published


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


class Row(NamedTuple):
    """A row of a table.

    Attributes:
      trainings: one, or several of which validation chooses one.
      adaptation, test: see `Cell`.
      published: the method's name in the published table; empty: the row's label.
    """

    trainings: tuple[Training, ...]
    adaptation: str = "running"
    published: str = ""
    test: str = ""


def internal(domains: Mapping[str, str]) -> dict[str, Column]:
    """Columns of clients that train: heading -> client."""
    return {heading: Column(("",), domain) for heading, domain in domains.items()}


def left_out(domains: Mapping[str, str]) -> dict[str, Column]:
    """Columns of domains that are left out one after the other: heading -> domain.

    Of a domain with a stand-in the cell takes whichever was left out, see `plan.target_in`.
    """
    return {
        heading: Column((domain,), UNSEEN if domain in STAND_INS else domain)
        for heading, domain in domains.items()
    }


def outside(domains: Mapping[str, str], target: str) -> dict[str, Column]:
    """Columns of domains that are left out together as `target`."""
    return {heading: Column((target,), domain) for heading, domain in domains.items()}


def targets(protocol: Protocol) -> tuple[str, ...]:
    """All targets of a protocol's columns."""
    return tuple(dict.fromkeys(t for column in protocol.columns.values() for t in column.targets))


def names(protocol: Protocol, target: str, training: Training) -> tuple[str, ...]:
    """The names of the runs of a target and a training, one a seed."""
    folder = "/".join(filter(None, (protocol.name, target.replace(" ", "_"), training.folder)))
    return tuple(f"{folder}/{seed}" for seed in range(protocol.seeds))


def runs_of(protocol: Protocol, trainings: Iterable[Training]) -> tuple[Run, ...]:
    """A run a training, target and seed."""
    return tuple(
        Run(
            name,
            protocol.config,
            {
                **protocol.changes,
                **training.changes,
                **({"target": target} if target else {}),
                "seed": seed,
            },
            protocol.needs,
            training.tests,
            protocol.samples,
        )
        for training in trainings
        for target in targets(protocol)
        for seed, name in enumerate(names(protocol, target, training))
    )


def cell(protocol: Protocol, row: Row, column: Column, printed: Sequence[Published] = ()) -> Cell:
    """The cell of a row and a column."""
    parts = tuple(tuple(names(protocol, t, one) for one in row.trainings) for t in column.targets)
    return Cell(parts, column.domain, tuple(printed), row.adaptation, row.test)


def table(
    name: str,
    title: str,
    protocol: Protocol,
    rows: Mapping[str, Row | str],
    where: Mapping[str, str] | None = None,
    average: str = "",
) -> Table:
    """A table whose rows share a protocol, beside the published numbers.

    Args:
      name, title: see `Table`.
      protocol: see there.
      rows: label -> row, or why there is none.
      where: fields of the published cells beside it, such as {"paper": "FedBN", "table": "11"}.
      average: heading of a column of the mean over all others; empty: there is none.
    """
    printed = {(c.method, c.column): c for c in published(**where)} if where else {}
    columns = dict(protocol.columns)
    if average:
        outside = all(c.domain == UNSEEN or c.targets == (c.domain,) for c in columns.values())
        domain = UNSEEN if outside else MEAN
        columns[average] = Column(targets(protocol), domain)

    def cells(label: str, row: Row | str) -> Iterable[Cell]:
        method = label if isinstance(row, str) else row.published or label
        for heading, column in columns.items():
            found = [printed[key] for key in [(method, heading)] if key in printed]
            if isinstance(row, str):
                yield Cell((), column.domain, tuple(found), missing=row)
            else:
                yield cell(protocol, row, column, found)

    made = [one for row in rows.values() if isinstance(row, Row) for one in row.trainings]
    return Table(
        name,
        title,
        tuple(columns),
        {label: tuple(cells(label, row)) for label, row in rows.items()},
        runs_of(protocol, made),
    )


def stacked(name: str, title: str, parts: Sequence[tuple[str, Table]]) -> Table:
    """Tables of the same columns below each other, their labels behind a text of each."""
    rows = {f"{prefix}{label}": row for prefix, part in parts for label, row in part.rows.items()}
    runs = tuple(run for _, part in parts for run in part.runs)
    return Table(name, title, parts[0][1].columns, rows, runs)
