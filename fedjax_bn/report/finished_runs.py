"""Finished runs read for a report."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedjax_bn.run.config.defaults import base
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.evaluation.answers import Answered, read_answers
from fedjax_bn.run.files.forms import CLAIM, DATA, SUMMARY
from fedjax_bn.run.files.workdir import read_json, read_lines
from fedjax_bn.run.training.records import Record


class Run(NamedTuple):
    """A finished run as its workdir has it.

    Attributes:
      folder: the workdir.
      about: config.json.
      summary: summary.json.
      records: of all rounds, in order.
      data: data.json, see `data_facts`; empty of a run by a version that wrote none.
      answers: (client, "") or (unseen domain, adaptation) -> what is known of the answers, see
        `run.evaluation.answers`; empty of such a run, and of a detector's.
    """

    folder: Path
    about: Record
    summary: Record
    records: list[Record]
    data: Record
    answers: Mapping[tuple[str, str], Answered]

    @property
    def config(self) -> Record:
        """Dotted key -> value; of keys that came later the default."""
        return defaults() | self.about["config"]

    @property
    def target(self) -> str:
        """The domains that were left out; empty for none."""
        return str(self.config["target"])

    @property
    def score(self) -> str:
        """What the percentages are: accuracy, or mAP50 of a detector."""
        return self.summary.get("score", "accuracy")

    def tested(self, name: str, adaptation: str = "") -> int:
        """Samples that a client or an unseen domain was tested on; 0 where nobody recorded it."""
        if (name, adaptation) in self.answers:
            return len(self.answers[name, adaptation].right)
        known = self.data.get("unseen" if adaptation else "clients", {}).get(name)
        return known["test"]["samples"] if known else 0


def read_run(folder: Path) -> Run:
    """A finished run.

    Raises:
      WorkdirError: the folder holds none, or a damaged one.
    """
    summary = read_json(folder / "summary.json", SUMMARY)
    records = read_lines(folder / "metrics.jsonl", summary["rounds"])
    about = read_json(folder / "config.json", CLAIM)
    data = read_json(folder / "data.json", DATA) if (folder / "data.json").exists() else {}
    return Run(folder, about, summary, records, data, read_answers(folder))


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The finished runs in folders, at any depth, and sentences on what was left out.

    Raises:
      WorkdirError: there is no finished run, or a damaged one.
    """
    folders = [Path(folder) for folder in folders]
    found, notes = [], []
    for folder in folders:
        if not folder.is_dir():
            raise WorkdirError(f"{folder} is no folder: give workdirs of finished runs")
        for place in _workdirs(folder):
            if (place / "summary.json").exists():
                found.append(read_run(place))
            else:
                notes.append(f"{place} holds a run that has not finished: it is left out.")
    if not found:
        named = ", ".join(map(str, folders))
        raise WorkdirError(f"no finished run (a summary.json) in {named}: give other folders")
    return found, notes


def _workdirs(folder: Path) -> Iterator[Path]:
    """The folders of runs in a folder, the method itself before its baselines."""
    if (folder / "config.json").exists() or (folder / "summary.json").exists():
        yield folder
        children = folder.glob("baselines/*")
    else:
        children = folder.iterdir()
    try:
        children = sorted(children)
    except OSError as error:
        raise WorkdirError(f"cannot read {folder} ({error.strerror}): leave it out") from error
    for child in children:
        if child.is_dir() and not child.name.startswith("."):
            yield from _workdirs(child)


@cache
def defaults() -> Record:
    """Dotted key -> default, as JSON has it."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in flatten(base())
    }
