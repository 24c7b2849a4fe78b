"""A paper's runs, tables and figures as data, which the files of the papers fill in."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))


class Run(NamedTuple):
    """One call of fedjax_bn.main.

    Attributes:
      name: also its folder in the workdir, such as "digits/E1/fedbn/0".
      config: the config file, from the repository's root.
      changes: dotted key -> value, what differs from the config file.
      data: which --data.NAME=PATH it needs; empty where the data are generated.
    """

    name: str
    config: str
    changes: dict[str, Any]
    data: str = ""


class Cell(NamedTuple):
    """A number of a table: an accuracy in percent, as mean (std) over runs.

    Attributes:
      runs: names, usually one a seed.
      domain: the client, or the unseen domain, that the accuracy is of; "mean" for that of all
        clients, "unseen" for that of all unseen domains, of which every run may have its own.
      published: mean and std as printed in the paper, None where it prints none.
      adaptation: that of an unseen domain.
    """

    runs: tuple[str, ...]
    domain: str
    published: tuple[float, float | None] | None = None
    adaptation: str = "running"


class Table(NamedTuple):
    """A table of the paper: row label -> one cell a column (None for an empty one)."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell | None, ...]]


class Figure(NamedTuple):
    """A figure of the paper.

    Attributes:
      name, title: as of a table.
      runs: names of the runs that it shows.
      draw: the workdir -> PNG bytes; None where none of its runs has finished.
    """

    name: str
    title: str
    runs: tuple[str, ...]
    draw: Callable[[Path], bytes | None]


class Sweep(NamedTuple):
    """All runs of a paper, and what they are for; the latter are functions, made only if asked."""

    paper: str
    runs: tuple[Run, ...]
    tables: Callable[[], Sequence[Table]]
    figures: Callable[[], Sequence[Figure]]


def seeds(count: int, name: str, config: str, changes: dict[str, Any], data: str) -> list[Run]:
    """The same run with seeds 0 to count - 1, named NAME/SEED."""
    return [Run(f"{name}/{s}", config, changes | {"seed": s}, data) for s in range(count)]


def finished(workdir: Path, name: str) -> bool:
    """Whether a run has ended."""
    return (workdir / name / "summary.json").exists()


def runs_of(part: Table | Figure) -> list[str]:
    """The names of the runs that a table or figure needs, each once."""
    if isinstance(part, Figure):
        return list(dict.fromkeys(part.runs))
    cells = [cell for row in part.rows.values() for cell in row if cell]
    return list(dict.fromkeys(name for cell in cells for name in cell.runs))
