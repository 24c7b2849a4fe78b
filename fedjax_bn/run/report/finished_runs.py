"""Finished runs read for a report, and which of them are seeds of one variant of a method."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_bn.run.answers_file import Answered, read_answers
from fedjax_bn.run.config import flatten
from fedjax_bn.run.configured_method import KEYS_OF, METHODS
from fedjax_bn.run.defaults import base
from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.forms import CLAIM, DATA, SUMMARY
from fedjax_bn.run.records import Record
from fedjax_bn.run.workdir import read_json, read_lines

# What no number depends on, and what a report puts side by side by itself: seeds, targets, tests.
APART = frozenset(
    (
        *("seed", "target", "baselines", "adaptations", "adapt_batch_size", "compilation_cache"),
        *("data.path", "data.cache", "data.device_megabytes", "data.max_megapixels"),
        *("mesh", "clients", "population", "checkpoint_every", "clients_named", "predictions"),
        *("eval_batch_size", "eval_train_loss", "eval_unseen", "method"),
    )
)


class Run(NamedTuple):
    """A finished run as its workdir has it.

    Attributes:
      folder: the workdir.
      about: config.json.
      summary: summary.json.
      records: of all rounds, in order.
      data: data.json, see `data_facts`; empty of a run by a version that wrote none.
      answers: (client, "") or (unseen domain, adaptation) -> what is known of the answers, see
        `run.answers_file`; empty of such a run, and of a detector's.
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
        return _defaults() | self.about["config"]

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


class Variant(NamedTuple):
    """Runs that differ in nothing but their seeds and the domains left out.

    Attributes:
      label: the method, with the keys that tell it from other variants of the same method.
      runs: in the order in which they were given.
      keys: those that the label names.
    """

    label: str
    runs: tuple[Run, ...]
    keys: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """Of its runs."""
        return self.runs[0].summary["method"]


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


def variants_of(runs: Sequence[Run]) -> tuple[list[Variant], list[str]]:
    """Runs by variant, and sentences on runs that are there twice.

    Args:
      runs: of one data set.
    """
    grouped: dict[tuple, list[Run]] = {}
    notes = []
    for run in runs:
        mine = grouped.setdefault(_identity(run), [])
        one = {(other.summary["seed"], other.target): other for other in mine}
        if other := one.get((run.summary["seed"], run.target)):
            notes.append(
                f"{run.folder} repeats {other.folder} (method, keys, seed and target): it is left "
                "out."
            )
        else:
            mine.append(run)
    keys = differing_keys(grouped.values())
    made = [
        Variant(_label(group[0], own), tuple(group), tuple(own))
        for group in grouped.values()
        for own in [keys[group[0].summary["method"]]]
    ]
    return made, notes


def differing_keys(groups: Iterable[Sequence[Run]]) -> dict[str, list[str]]:
    """Method -> the keys in which its variants differ."""
    by_method: dict[str, list[Record]] = {}
    for group in groups:
        by_method.setdefault(group[0].summary["method"], []).append(relevant(group[0]))
    return {
        method: [key for key in configs[0] if any(c[key] != configs[0][key] for c in configs)]
        for method, configs in by_method.items()
    }


def relevant(run: Run) -> Record:
    """The keys of a run on which its numbers depend, those of other methods left out."""
    name = str(run.config["method"]).partition(":")[0]
    others = set(METHODS) - {KEYS_OF.get(name, name)}
    return {
        key: value
        for key, value in run.config.items()
        if key not in APART and key.partition(".")[0] not in others
    }


def changed_keys(run: Run) -> Record:
    """The keys whose values are not the defaults."""
    defaults = _defaults()
    return {key: value for key, value in run.config.items() if defaults.get(key) != value}


def _identity(run: Run) -> tuple:
    return run.summary["method"], tuple(sorted((k, str(v)) for k, v in relevant(run).items()))


def _label(run: Run, keys: Sequence[str]) -> str:
    method = run.summary["method"]
    told = [f"{key}={spell(run.config[key])}" for key in keys]
    return f"{method} ({', '.join(told)})" if told else method


def spell(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "empty" if value in ("", None) else str(value)


@cache
def _defaults() -> Record:
    """Dotted key -> default, as JSON has it."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in flatten(base())
    }
