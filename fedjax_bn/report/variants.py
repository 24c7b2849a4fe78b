"""Which finished runs are seeds of one variant of a method, and what tells variants apart."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedjax_bn.report.finished_runs import Run, defaults
from fedjax_bn.run.experiment.method import METHODS, group_of, own_rules
from fedjax_bn.run.training.records import Record

# What no number depends on, and what a report puts side by side by itself: seeds, targets, tests.
APART = frozenset(
    (
        *("seed", "target", "baselines", "adaptations", "adapt_batch_size", "compilation_cache"),
        *("data.path", "data.cache", "data.device_megabytes", "data.max_megapixels"),
        *("mesh", "clients", "population", "checkpoint_every", "clients_named", "predictions"),
        *("eval_batch_size", "eval_train_loss", "eval_unseen", "method", "wandb"),
    )
)


class Variant(NamedTuple):
    """Runs that differ in nothing but their seeds and the domains left out.

    Attributes:
      label: the method, with the keys that tell it from other variants of the same method; of a
        rule the method's own is not told, of other keys a value that more than half have.
      runs: in the order in which they were given.
      keys: those in which the method's variants differ.
    """

    label: str
    runs: tuple[Run, ...]
    keys: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """Of its runs."""
        return self.runs[0].summary["method"]


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
    labels, keys = _labels(grouped.values())
    made = [
        Variant(label, tuple(group), keys[group[0].summary["method"]])
        for label, group in zip(labels, grouped.values(), strict=True)
    ]
    return made, notes


def relevant(run: Run) -> Record:
    """The keys of a run on which its numbers depend, those of other methods left out.

    The method's own rules, where `share` and `weigh` are empty, have their names.
    """
    name = str(run.config["method"]).partition(":")[0]
    others = set(METHODS) - {group_of(name)}
    rules = own_rules(name, private=run.config["privacy.clip"] > 0)
    own = {key: rule for key, rule in rules.items() if not run.config[key]}
    return {
        key: value
        for key, value in (run.config | own).items()
        if key not in APART and key.partition(".")[0] not in others
    }


def changed_keys(run: Run) -> Record:
    """The keys whose values are not the defaults."""
    usual = defaults()
    return {key: value for key, value in run.config.items() if usual.get(key) != value}


def spell(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "empty" if value in ("", None) else str(value)


def _identity(run: Run) -> tuple:
    return run.summary["method"], tuple(sorted((k, str(v)) for k, v in relevant(run).items()))


def _labels(groups: Iterable[Sequence[Run]]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The label of each group, and method -> the keys in which its groups differ."""
    firsts = [group[0] for group in groups]
    by_method: dict[str, list[Record]] = {}
    for run in firsts:
        by_method.setdefault(run.summary["method"], []).append(relevant(run))
    keys, usual = {}, {}
    for method, configs in by_method.items():
        first = configs[0]
        keys[method] = tuple(k for k in first if any(c.get(k) != first[k] for c in configs))
        for key in keys[method]:
            values = [spell(config.get(key)) for config in configs]
            usual[method, key] = _usual(method, key, values)
    labels = []
    for run in firsts:
        method, config = run.summary["method"], relevant(run)
        values = {key: spell(config.get(key)) for key in keys[method]}
        told = [f"{key}={text}" for key, text in values.items() if text != usual[method, key]]
        labels.append(f"{method} ({', '.join(told)})" if told else method)
    return labels, keys


def _usual(method: str, key: str, values: Sequence[str]) -> str | None:
    """The value of a key that labels do not tell; None where each one is told."""
    own = own_rules(method).get(key, "empty" if defaults().get(key) == "" else None)
    if own in values:
        return own
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None
