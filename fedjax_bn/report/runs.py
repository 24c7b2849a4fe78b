"""Reads finished runs for a report, and groups those that are seeds of one variant of a method."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.run.config import flatten
from fedjax_bn.run.config.defaults import base
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.method import name_of, option_values, own_rules
from fedjax_bn.training.evaluation.answers import Answered, AnsweredMasks, read_answers
from fedjax_bn.training.records import Record
from fedjax_bn.training.score_tables import part_tested
from fedjax_bn.training.workdir import CLAIM, DATA, SUMMARY, read_json, read_lines

# Keys on which no number depends, and keys that a report puts side by side: seeds, targets, tests.
APART = {
    *("seed", "target", "baselines", "adaptations", "adapt_batch_size", "compilation_cache"),
    *("data.path", "data.cache", "data.device_megabytes", "population"),
    *("mesh.clients", "mesh.batch", "clients", "checkpoint_every", "clients_named"),
    *("predictions", "profile", "eval_batch_size", "eval_also", "method"),
}
EQUALS_FEDAVG = (
    "All clients of FedNova's runs make equally many steps, so that it equals FedAvg up to "
    "rounding: its numbers here can only be FedAvg's"
)


class Run(NamedTuple):
    """A finished run, read from its workdir."""

    folder: Path
    about: Record  # the content of config.json
    summary: Record  # the content of summary.json
    records: list[Record]  # of all rounds, in order
    data: Record  # the content of data.json; empty if there is no such file
    # (client, "") or (unseen domain, adaptation) -> which samples were answered rightly; empty for
    # other tasks and runs that wrote none
    answers: Mapping[tuple[str, str], Answered]
    masks: Mapping[tuple[str, str], AnsweredMasks]  # likewise: Dice, and some pictures
    config: Record  # dotted key -> value; keys that the run's version lacked have their defaults
    method: str  # its name, without options
    seed: int
    target: str  # the domains that were left out of training; "" if none were
    score: str  # what the percentages are: accuracy, mAP50 of a detector, or Dice of masks

    @property
    def size(self) -> str:
        """The size of the masks of which Dice was taken, "H x W pixels"; "" without masks."""
        form = self.about.get("form", {})
        if self.score != "Dice" or "shape" not in form:
            return ""
        tiles = ", in tiles" if self.config["data.large"] == "tiles" else ""
        return f"{form['shape'][0]} x {form['shape'][1]} pixels{tiles}"

    def part(self, whom: str = "internal") -> str:
        """Returns which samples of "internal" clients or "unseen" domains the scores are of."""
        return part_tested(self.summary, whom)

    def tested(self, name: str, adaptation: str = "") -> int:
        """Returns how many samples a client's or unseen domain's score is of; 0 if unknown."""
        if (name, adaptation) in self.answers:
            return len(self.answers[name, adaptation].right)
        parts = self.data.get("unseen" if adaptation else "clients", {}).get(name)
        # Without test samples the validation samples are tested.
        return parts.get("test", parts.get("validation"))["samples"] if parts else 0


class Variant(NamedTuple):
    """Runs that differ only in their seeds and the domains left out."""

    # the method, with the keys in which it differs from other variants of the method, except its
    # own rules and values that more than half of the variants have
    label: str
    runs: tuple[Run, ...]  # in the order in which they were given
    keys: tuple[str, ...] = ()  # in which the variants of this method differ

    @property
    def method(self) -> str:
        """The method of its runs."""
        return self.runs[0].method


def samples_scored(variants: Sequence[Variant]) -> str:
    """Returns which samples scores are of, such as "test samples", and the size of masks."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    inside, outside = (part_of_all(run.part(w) for _, run in runs) for w in ("internal", "unseen"))
    samples = f"{inside} samples"
    if inside != outside and any(run.summary["accuracy"]["unseen"] for _, run in runs):
        samples += f" of clients and {outside} samples of unseen domains"
    labels: dict[str, dict[str, None]] = {}
    for label, run in runs:
        if run.size:
            labels.setdefault(run.size, {})[label] = None
    if len(labels) > 1:
        sizes = " and ".join(f"{size} ({', '.join(names)})" for size, names in labels.items())
        return f"{samples}; Dice is taken at {sizes}: scores at different sizes do not compare"
    return samples + "".join(f"; Dice is taken at {size}" for size in labels)


def samples_of(variants: Sequence[Variant], whom: str) -> str:
    """Returns "internal clients" or "unseen domains", and their samples if not test samples."""
    part = part_of_all(run.part(whom) for variant in variants for run in variant.runs)
    name = {"internal": "internal clients", "unseen": "unseen domains"}[whom]
    return name if part == "test" else f"{name} ({part} samples)"


@cache  # reading a config file takes 50 ms
def packaged(name: str = "") -> Record:
    """Returns dotted key -> value of a packaged config, or the defaults, as JSON stores them."""
    config = read(name) if name else base()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flatten(config)}


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Returns the finished runs in folders, at any depth, and notes on runs that were left out.

    A missing folder, no finished run, and a damaged one are WorkdirErrors.
    """
    folders, runs, notes = list(folders), [], []
    for place in chain(*map(_workdirs, map(Path, folders))):
        if (place / "summary.json").exists():
            runs.append(_read_run(place))
        else:
            notes.append(f"{place} holds a run that has not finished: it is left out.")
    if not runs or not all(map(Path.is_dir, folders)):
        named = ", ".join(map(str, folders))
        raise WorkdirError(f"no finished run (a summary.json) in {named}: give other folders")
    return runs, notes


def _read_run(place: Path) -> Run:
    summary = read_json(place / "summary.json", SUMMARY)
    records = read_lines(place / "metrics.jsonl", summary["rounds"])
    about = read_json(place / "config.json", CLAIM)
    data = read_json(place / "data.json", DATA) if (place / "data.json").exists() else {}
    kinds: dict[type, dict] = {Answered: {}, AnsweredMasks: {}}
    for key, entry in read_answers(place).items():
        kinds[type(entry)][key] = entry
    config = packaged() | about["config"]
    method, target = name_of(summary["method"]), str(config["target"])
    facts = config, method, summary["seed"], target, summary.get("score", "accuracy")
    return Run(place, about, summary, records, data, *kinds.values(), *facts)


def _workdirs(folder: Path) -> Iterator[Path]:
    """Yields the workdirs in a folder, a run before its baselines."""
    is_workdir = (folder / "config.json").exists() or (folder / "summary.json").exists()
    if is_workdir:
        yield folder
    # the other folders of a workdir hold many files and no runs
    for child in sorted(folder.glob("baselines/*" if is_workdir else "*")):
        if child.is_dir() and not child.name.startswith("."):
            yield from _workdirs(child)


def relevant(run: Run) -> Record:
    """Returns the keys of a run on which its numbers depend.

    Those of the method's options are such as "fedprox:mu". If `share` or `weigh` is empty, it is
    replaced with the name of the method's own rule.
    """
    config, options = run.config, option_values(run.config["method"])
    rules = own_rules(config["method"], private=bool(config["privacy"]))
    values = config | {f"{run.method}:{key}": value for key, value in options.items()}
    values |= {key: rule for key, rule in rules.items() if not config[key]}
    return {key: value for key, value in values.items() if key not in APART}


def other_samples(data: Record, planned: Mapping[str, int]) -> dict[str, int]:
    """Returns domain -> training samples of a client, for domains that differ from the plan."""
    differing: dict[str, int] = {}
    for client, parts in data.get("clients", {}).items():
        domain, count = client.partition("/")[0], parts["train"]["samples"]
        expected = planned.get(domain, count)
        if abs(count - expected) > max(1, expected // 500):  # else it is rounding
            differing[domain] = count
    return differing


def has_equal_steps(config: Record, data: Record) -> bool:
    """Returns whether all clients are known to make equally many steps in each round."""
    clients = data.get("clients", {}).values()
    if not clients or data.get("number", len(clients)) > len(clients):
        return False
    batches = {-(-parts["train"]["samples"] // config["batch_size"]) for parts in clients}
    epochs = set(config.get("client_epochs") or [config["local_epochs"]])
    return bool(config.get("local_steps")) or len(batches) == len(epochs) == 1


def spell(value: Any) -> str:
    """Returns a value as text: a list with commas, or "none"; "empty" for "" and None."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "empty" if value in ("", None) else str(value)


def variants_of(runs: Sequence[Run]) -> tuple[list[Variant], list[str]]:
    """Returns the variants of runs on one data set, and notes on repeated runs, now left out."""
    groups: dict[tuple[str, str], dict[tuple[int, str], Run]] = {}
    notes = []
    for run in runs:
        # as text, because lists cannot be hashed
        group = groups.setdefault((run.method, str(sorted(relevant(run).items()))), {})
        if (twin := group.setdefault((run.seed, run.target), run)) is not run:
            same = "method, keys, seed and target"
            notes.append(f"{run.folder} repeats {twin.folder} ({same}): it is left out.")
    configs = [(key[0], relevant(next(iter(group.values())))) for key, group in groups.items()]
    variants = []
    for (method, config), group in zip(configs, groups.values(), strict=True):
        siblings = [entry for name, entry in configs if name == method]
        differ = tuple(k for k in config if any(s.get(k) != config[k] for s in siblings))
        shown = []
        for key in differ:
            values = [spell(sibling.get(key)) for sibling in siblings]
            # a label leaves out the method's own rule, or else the value of more than half
            rule = own_rules(method).get(key, "empty" if packaged().get(key) == "" else None)
            value, count = Counter(values).most_common(1)[0]
            usual = rule if rule in values else value if 2 * count > len(values) else None
            if spell(config[key]) != usual:
                shown.append(f"{key}={spell(config[key])}")
        label = f"{method} ({', '.join(shown)})" if shown else method
        variants.append(Variant(label, tuple(group.values()), differ))
    return variants, notes
