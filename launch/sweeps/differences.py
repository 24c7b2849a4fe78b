"""In what a finished run differs from the plan's, so that a report can say so beside its number."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from string import ascii_lowercase

from plan import ROOT, Run

from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import flatten

# Keys of the machine, of what is kept and of what is shown, which no number depends on.
APART = (
    *("data.path", "data.cache", "data.device_megabytes", "baselines", "adaptations", "clients"),
    *("checkpoint_every", "eval_batch_size", "seed"),
)


def differences(workdir: Path, run: Run) -> tuple[str, ...]:
    """Sentences such as "model is SmallCNN (planned: DigitCNN)"; none for the planned run.

    Of what the user must supply, such as weights, only whether it was supplied counts.

    Args:
      workdir: of the sweep.
      run: one that has finished.
    """
    path = workdir / run.name / "config.json"
    if not path.exists():
        return ()
    theirs = json.loads(path.read_text())["config"]
    changes = {key: value for key, value in run.changes.items() if key != "seed"}
    supplied = dict.fromkeys(run.needs, "PATH")
    planned = _planned(run.config, tuple((changes | supplied).items()))
    said = []
    others = _other_methods(theirs.get("method", ""))
    for key in sorted(planned.keys() & theirs.keys() - set(APART)):
        if key.partition(".")[0] in others:
            continue
        ours, given = planned[key], theirs[key]
        if key in run.needs:
            if not given:
                said.append(f"{key} is empty (planned: --data.{run.needs[key]})")
        elif _plain(ours) != _plain(given):
            said.append(f"{key} is {_show(given)} (planned: {_show(ours)})")
    return (*said, *_other_samples(path.parent, run.samples))


def _other_samples(folder: Path, planned: Mapping[str, int]) -> tuple[str, ...]:
    """A sentence on the domains whose clients trained on other numbers of samples than planned.

    Args:
      folder: of a finished run.
      planned: see `Run.samples`.
    """
    path = folder / "data.json"
    if not planned or not path.exists():
        return ()
    from fedjax_bn.report.data import other_samples  # imports JAX, see `_planned`

    found = other_samples(json.loads(path.read_text()), planned)
    said = ", ".join(f"{name} {count} (planned: {planned[name]})" for name, count in found.items())
    return (f"training samples of a client: {said}",) if said else ()


def _other_methods(method: str) -> set[str]:
    """The groups of keys that are arguments of other methods."""
    from fedjax_bn.run.experiment.method import METHODS, group_of  # imports JAX, see `_planned`

    return set(METHODS) - {group_of(method)}


@cache
def _planned(config: str, changes: tuple[tuple[str, object], ...]) -> Mapping[str, object]:
    """The planned configuration, dotted key -> value."""
    name, colon, inline = config.partition(":")
    spelled = [(key, _show(value) if value != "" else "") for key, value in changes]
    return dict(flatten(read(f"{ROOT / name}{colon}{inline}", spelled)))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _show(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value) if value != "" else "empty"


def letters(said: Iterable[str]) -> dict[str, str]:
    """A letter for each difference, in order: a to z, then a1 to z1 and so on."""
    found = {}
    for number, difference in enumerate(dict.fromkeys(said)):
        turn, place = divmod(number, len(ascii_lowercase))
        found[difference] = ascii_lowercase[place] + (str(turn) if turn else "")
    return found


def legend(marks: Mapping[str, str]) -> str:
    """What the letters mean; empty where there are none."""
    said = "; ".join(f"[{letter}] {difference}" for difference, letter in marks.items())
    return f"Differs from the plan: {said}." if said else ""
