"""The data sets of `all_methods.py`, small, and the runs of a row on them."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from entries import Entry
from plan import ROOT, Run, target_in
from sweep import text

SMALL = {"model": "SmallCNN", "weigh": "", "optimizer.momentum": 0.9, "baselines": ""}
_RATE = "optimizer.learning_rate"
HOLD_OUT = (
    "hold some out with --config.data.validation=0.1, for data that come divided with "
    "--config.data.split=official too"
)


class Bench(NamedTuple):
    """A data set as it is compared on.

    Attributes:
      config: the config file.
      targets: left out one after the other; empty: each domain in turn.
      changes: of the config.
    """

    config: str
    targets: tuple[str, ...]
    changes: Mapping[str, Any]


BENCHES = {
    "scanners": Bench(
        "configs/quickstart.py", ("fax",), {"rounds": 40, "batch_size": 16, "eval_every": 10}
    ),
    "digits": Bench(
        "configs/digits.py",
        ("mnist", "svhn", "usps", "fonts", "mnist_m"),
        {
            **{"rounds": 20, "eval_every": 10, "data.split": "official"},  # a tenth validates
            **{"data.fraction": 1.0, "data.truncate": False},  # of an `.npz` of some 700 images
        },
    ),
    "beach": Bench("configs/cow_on_beach.py", ("zoo,beach",), {"rounds": 30, "eval_every": 10}),
    "pacs": Bench(
        "configs/pacs.py:protocol=fedcd",
        ("sketch",),
        {
            **{"rounds": 10, "eval_every": 5, "local_epochs": 1, "batch_size": 32},
            **{"data.image_size": 32, "data.fraction": 0.3, "data.augment": "none"},
        },
    ),
}


def bench_of(options: argparse.Namespace) -> Bench:
    """The data set that was chosen; any `data.name` has a bench."""
    name = options.dataset
    changes = {"data.name": name, "rounds": 40, "batch_size": 16, "eval_every": 10}
    own = Bench("configs/quickstart.py", (), changes)
    bench = BENCHES.get(name, own)
    path = {"data.path": options.path} if options.path else {}
    targets = tuple(filter(None, options.target.replace("+", " ").split(",")))
    targets = tuple(target.replace(" ", ",") for target in targets)
    known = tuple(target_in(options.path, target) for target in bench.targets)
    return bench._replace(targets=targets or known, changes={**bench.changes, **path})


def all_targets(bench: Bench, changes: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """What is left out; where nothing was said each domain of the data."""
    if bench.targets:
        return bench.targets
    from fedjax_bn.run.config.file import read
    from fedjax_bn.run.experiment.datasets import domain_names

    spelled = [(key, str(value)) for key, value in bench.changes.items()]
    return domain_names(read(str(ROOT / bench.config), [*spelled, *changes]))


def config_of(run: Run, changes: Sequence[tuple[str, str]]) -> Any:
    """The configuration of a run with changes of one's own."""
    from fedjax_bn.run.config.file import read

    name, colon, inline = run.config.partition(":")
    spelled = [(key, text(value)) for key, value in run.changes.items()]
    return read(f"{ROOT / name}{colon}{inline}", [*spelled, *changes])


def check_validation(run: Run, changes: Sequence[tuple[str, str]]) -> None:
    """Reads the data of a run, before hours of training.

    Raises:
      SystemExit: they cannot be read, or a client has no validation samples to choose a rate by.
    """
    from fedjax_bn.run.errors import ConfigError
    from fedjax_bn.run.experiment.datasets import clients_without_validation

    config = config_of(run, changes)
    try:
        without = clients_without_validation(config)
    except ConfigError as error:
        raise SystemExit(f"{run.name}: {error}") from error
    if without:
        raise SystemExit(
            f"client {without[0]!r} of {config.data.name} has no validation samples, by which the "
            f"learning rate is chosen: {HOLD_OUT}"
        )


def settings(bench: Bench, changes: Sequence[tuple[str, str]]) -> str:
    """A sentence on what the runs of a data set have in common."""
    shown = {key: text(value) for key, value in bench.changes.items()} | dict(changes)
    spelled = [f"{k}={v}" for k, v in shown.items() if k not in ("data.path", "compilation_cache")]
    left_out = " or ".join(target.replace(",", " and ") for target in bench.targets)
    return f"Made with {bench.config}, {left_out} left out: {', '.join(spelled)}."


def runs_of(
    options: argparse.Namespace, bench: Bench, entry: Entry, rate: float, seed: int
) -> tuple[Run, ...]:
    """The runs of a row, one a target."""
    changes = {**SMALL, **bench.changes, **entry.changes, "adaptations": entry.adaptations}
    if entry.norm:
        changes["model"] = f"{changes['model']}:norm={entry.norm}"
    changes |= {_RATE: rate, "seed": seed, "checkpoint_every": changes["rounds"]}
    changes["target"] = ""
    return tuple(
        Run(
            "/".join((options.dataset, entry.folder, f"rate-{rate:g}", _folder(target), str(seed))),
            bench.config,
            {**changes, "target": target},
            {},
        )
        for target in bench.targets
    )


def _folder(target: str) -> str:
    return target.replace(" ", "_").replace(",", "+")
