"""Reads finished runs for a report, and groups those that are seeds of one variant of a method."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.run.config.defaults import base
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.method import name_of, option_values, own_rules
from fedjax_bn.training.evaluation.answers import Answered, AnsweredMasks, read_answers
from fedjax_bn.training.records import Record
from fedjax_bn.training.score_tables import part_tested
from fedjax_bn.training.workdir import CLAIM, DATA, SUMMARY, read_json, read_lines

# Keys on which no number depends, and keys that a report puts side by side: seeds, targets, tests.
APART = frozenset(
    (
        *("seed", "target", "baselines", "adaptations", "adapt_batch_size", "compilation_cache"),
        *("data.path", "data.cache", "data.device_megabytes", "data.max_megapixels", "population"),
        *("mesh.clients", "mesh.batch", "clients", "checkpoint_every", "clients_named", "wandb"),
        *("predictions", "profile", "eval_batch_size", "eval_train_loss", "eval_unseen", "method"),
    )
)


_WHOM = {"internal": "internal clients", "unseen": "unseen domains"}


class Run(NamedTuple):
    """A finished run, read from its workdir.

    Attributes:
      folder: the workdir.
      about: the content of config.json.
      summary: the content of summary.json.
      records: the records of all rounds, in order.
      data: the content of data.json, see `page.data_facts`; empty if there is no such file.
      answers: (client, "") or (unseen domain, adaptation) -> which samples were answered rightly,
        see `run.evaluation.answers`; empty for other tasks and runs that wrote none.
      masks: likewise -> Dice by volume and some pictures of predicted masks.
    """

    folder: Path
    about: Record
    summary: Record
    records: list[Record]
    data: Record
    answers: Mapping[tuple[str, str], Answered]
    masks: Mapping[tuple[str, str], AnsweredMasks] = {}

    @property
    def config(self) -> Record:
        """Dotted key -> value; keys that the run's version lacked have their defaults."""
        return defaults() | self.about["config"]

    @property
    def values(self) -> Record:
        """The configuration with the options of the method, such as "fedprox:mu" -> 0.1."""
        options = option_values(self.config["method"]).items()
        return self.config | {f"{self.method}:{key}": value for key, value in options}

    @property
    def method(self) -> str:
        """The name of the run's method."""
        return name_of(self.summary["method"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.summary["seed"]

    @property
    def target(self) -> str:
        """The domains that were left out of training; "" if none were."""
        return str(self.config["target"])

    @property
    def score(self) -> str:
        """What the percentages are: accuracy, mAP50 of a detector, or Dice of masks."""
        return self.summary.get("score", "accuracy")

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
        """Returns the number of samples that a client's or an unseen domain's score is of.

        The number is 0 if unknown.
        """
        if (name, adaptation) in self.answers:
            return len(self.answers[name, adaptation].right)
        parts = self.data.get("unseen" if adaptation else "clients", {}).get(name)
        # Without test samples the validation samples are tested.
        return parts.get("test", parts.get("validation"))["samples"] if parts else 0


class Variant(NamedTuple):
    """Runs that differ only in their seeds and the domains left out.

    Attributes:
      label: the method, with the keys in which it differs from other variants of the method. It
        leaves out a method's own rules, and values that more than half of the variants have.
      runs: the runs, in the order in which they were given.
      keys: the keys in which the variants of this method differ.
    """

    label: str
    runs: tuple[Run, ...]
    keys: tuple[str, ...] = ()

    @property
    def values(self) -> Record:
        """The configuration with the options of the method, such as "fedprox:mu" -> 0.1."""
        options = option_values(self.config["method"]).items()
        return self.config | {f"{self.method}:{key}": value for key, value in options}

    @property
    def method(self) -> str:
        """The method of its runs."""
        return self.runs[0].method


def samples_scored(variants: Sequence[Variant]) -> str:
    """Returns which samples the scores of runs are of, such as "test samples"."""
    runs = [run for variant in variants for run in variant.runs]
    inside, outside = (part_of_all(run.part(whom) for run in runs) for whom in _WHOM)
    if inside == outside or not any(run.summary["accuracy"]["unseen"] for run in runs):
        return f"{inside} samples"
    return f"{inside} samples of clients and {outside} samples of unseen domains"


def whose(variants: Sequence[Variant], whom: str = "internal") -> str:
    """Returns "internal clients" or "unseen domains", and their samples if not test samples."""
    part = part_of_all(run.part(whom) for variant in variants for run in variant.runs)
    tested = "" if part == "test" else f" ({part} samples)"
    return f"{_WHOM[whom]}{tested}"


def sizes_of_masks(variants: Sequence[Variant]) -> str:
    """Returns at which size of masks Dice was taken, as text; "" without masks."""
    labels: dict[str, dict[str, None]] = {}
    for variant in variants:
        for run in variant.runs:
            labels.setdefault(run.size, {})[variant.label] = None
    labels.pop("", None)
    if not labels:
        return ""
    sizes = [f"{size} ({', '.join(names)})" if len(labels) > 1 else size
             for size, names in labels.items()]  # fmt: skip
    end = "; scores at different sizes do not compare" if len(labels) > 1 else ""
    return f"Dice is taken at {' and '.join(sizes)}{end}."


def as_json(config: ConfigDict) -> Record:
    """Returns dotted key -> value of a configuration, with tuples as lists, as JSON stores them."""
    return _lists(dict(flatten(config)))


def _lists(flat: Record) -> Record:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}


@cache
def defaults() -> Record:
    """Returns dotted key -> default value, with tuples as lists."""
    return as_json(base())


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Returns the finished runs in folders, at any depth, and notes on runs that were left out.

    Raises:
      WorkdirError: a folder does not exist or cannot be read, there is no finished run, or one is
        damaged.
    """
    folders = [Path(folder) for folder in folders]
    runs, notes = [], []
    for folder in folders:
        if not folder.is_dir():
            raise WorkdirError(f"{folder} is not a folder: give workdirs of finished runs")
        for place in _workdirs(folder):
            if not (place / "summary.json").exists():
                notes.append(f"{place} holds a run that has not finished: it is left out.")
                continue
            summary = read_json(place / "summary.json", SUMMARY)
            records = read_lines(place / "metrics.jsonl", summary["rounds"])
            about = read_json(place / "config.json", CLAIM)
            about |= {"config": _lists(about["config"])}
            data = read_json(place / "data.json", DATA) if (place / "data.json").exists() else {}
            answered = read_answers(place).items()
            answers = {key: entry for key, entry in answered if isinstance(entry, Answered)}
            masks = {key: entry for key, entry in answered if isinstance(entry, AnsweredMasks)}
            runs.append(Run(place, about, summary, records, data, answers, masks))
    if not runs:
        named = ", ".join(map(str, folders))
        raise WorkdirError(f"no finished run (a summary.json) in {named}: give other folders")
    return runs, notes


def _workdirs(folder: Path) -> Iterator[Path]:
    """Yields the workdirs in a folder, a run before its baselines."""
    if (folder / "config.json").exists() or (folder / "summary.json").exists():
        yield folder
        # the other folders of a workdir hold many files and no runs
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


def relevant(run: Run) -> Record:
    """Returns the keys of a run on which its numbers depend.

    If `share` or `weigh` is empty, it is replaced with the name of the method's own rule.
    """
    rules = own_rules(run.config["method"], private=run.config["privacy.clip"] > 0)
    method_rules = {key: rule for key, rule in rules.items() if not run.config[key]}
    return {k: value for k, value in (run.values | method_rules).items() if k not in APART}


def other_samples(data: Record, planned: Mapping[str, int]) -> dict[str, int]:
    """Returns domain -> training samples of a client, for domains that differ from the plan.

    Differences of one sample, or of up to two in a thousand, count as rounding.

    Args:
      data: the content of data.json; empty if the run wrote none, so that its samples are unknown.
      planned: domain -> training samples of each of its clients; other domains are not compared.
    """
    differing: dict[str, int] = {}
    for client, parts in data.get("clients", {}).items():
        domain, count = client.partition("/")[0], parts["train"]["samples"]
        expected = planned.get(domain, count)
        if abs(count - expected) > max(1, expected // 500):
            differing[domain] = count
    return differing


def has_equal_steps(config: Record, data: Record) -> bool:
    """Returns whether all clients are known to make equally many steps in each round.

    Args:
      config: dotted key -> value.
      data: the content of data.json; empty if the run wrote none.
    """
    clients = data.get("clients", {}).values()
    if not clients or data.get("number", len(clients)) > len(clients):
        return False
    batches = {-(-parts["train"]["samples"] // config["batch_size"]) for parts in clients}
    epochs = set(config.get("client_epochs") or [config["local_epochs"]])
    return bool(config.get("local_steps")) or len(batches) == len(epochs) == 1


EQUALS_FEDAVG = (
    "All clients of FedNova's runs make equally many steps, so that it equals FedAvg up to "
    "rounding: its numbers here can only be FedAvg's"
)


def spell(value: Any) -> str:
    """Returns a value as text: a list with commas, or "none"; "empty" for "" and None."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "empty" if value in ("", None) else str(value)


def variants_of(runs: Sequence[Run]) -> tuple[list[Variant], list[str]]:
    """Returns the variants of runs on one data set, and notes on repeated runs, now left out."""
    groups: dict[tuple, list[Run]] = {}
    notes = []
    for run in runs:
        # as text, because lists cannot be hashed
        keys = tuple(sorted((key, str(value)) for key, value in relevant(run).items()))
        group = groups.setdefault((run.method, keys), [])
        twin = [
            sibling for sibling in group if (sibling.seed, sibling.target) == (run.seed, run.target)
        ]
        if twin:
            notes.append(
                f"{run.folder} repeats {twin[0].folder} (method, keys, seed and target): it is "
                "left out."
            )
        else:
            group.append(run)
    configs = [(group[0].method, relevant(group[0])) for group in groups.values()]
    variants = []
    for (method, config_keys), group in zip(configs, groups.values(), strict=True):
        siblings = [config for name, config in configs if name == method]
        differ = tuple(
            key
            for key in config_keys
            if any(sibling.get(key) != config_keys[key] for sibling in siblings)
        )
        shown = []
        for key in differ:
            values = [spell(sibling.get(key)) for sibling in siblings]
            # a label leaves out the method's own rule, or else the value of more than half
            rule = own_rules(method).get(key, "empty" if defaults().get(key) == "" else None)
            value, count = Counter(values).most_common(1)[0]
            usual = rule if rule in values else value if 2 * count > len(values) else None
            if (value_text := spell(config_keys[key])) != usual:
                shown.append(f"{key}={value_text}")
        label = f"{method} ({', '.join(shown)})" if shown else method
        variants.append(Variant(label, tuple(group), differ))
    return variants, notes
