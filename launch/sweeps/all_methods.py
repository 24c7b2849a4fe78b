"""Compares all methods of the library on the same data: which of them help on unseen domains?

    python launch/sweeps/all_methods.py [run]  [--dataset NAME] [--path PATH] [--target NAMES]
        [--only GLOBS] [--seeds N] [--rates R,R] [--workdir DIR] [--config.KEY=VALUE]
    python launch/sweeps/all_methods.py list | report        [the same]

NAME is one of scanners and beach, which need no data, digits and pacs, whose PATH is as their
config files take data.path, or any other data.name: `--dataset folders --path DIR` compares on your
own DIR/DOMAIN/CLASS/*.jpg. NAMES are the domains that are left out, one after the other (several at
once with a + between them); the default is the targets of the data set below, or each domain.

The methods are those of entries.py; GLOBS choose rows by their names ("Fed*,SNR"). Networks and
rounds are small, so that a run takes seconds on two cores: SmallCNN from random weights, momentum
0.9. Only the learning rate is tuned, for each method and data set: of the rates R it is the one
whose first seed has the best mean accuracy on the clients' validation samples, over all targets;
the other seeds take it. The round is selected by validation too. The unseen domain decides nothing.

All runs share this process and the compiled programs in config.compilation_cache, so that seeds do
not compile again. Each is a usual run in DIR and is not repeated, so the same command continues.
`list` prints the commands of all runs. `report`, with which `run` ends, prints and writes
DIR/DATASET.md: for every row the mean and 95 % interval (Student's t over seeds) on clients and on
unseen domains, the paired difference to FedAvg by seed, seconds a round, bytes; which rows do not
help; and the settings of the runs. Data without validation samples are refused before the first
run. If data come divided without them, as digits do, data.split=official holds some out of the
training samples.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from compared import Measured, measure, read_summary, table
from domains import target_in
from entries import Entry, chosen_rows
from plan import Run, configuration, text
from report import equals_fedavg, selected_validation
from sweep import train_command

from fedjax_bn.arguments.errors import InterruptedRun, NotFiniteError, UserError
from fedjax_bn.report.runs import EQUALS_FEDAVG
from fedjax_bn.run.experiment.datasets import configured_clients, domain_names, read_data
from fedjax_bn.training.workdir import write_atomically

RATES = (0.02, 0.1)
SEEDS = 3
SMALL = {
    **{"model": "SmallCNN", "weigh": "", "baselines": ""},
    **{"optimizer.momentum": 0.9, "optimizer.schedule": "constant"},
}
HOLD_OUT = (
    "hold some out with --config.data.validation=0.1, for data that come divided with "
    "--config.data.split=official too"
)


class Bench(NamedTuple):
    """A data set on which methods are compared."""

    config: str  # the config file
    # the domains that are left out one after the other; empty: each domain in turn
    targets: tuple[str, ...]
    changes: Mapping[str, Any]  # changes of the config


BENCHES = {
    "scanners": Bench(
        "configs/quickstart.py",
        ("fax",),
        {"data.name": "scanners", "rounds": 40, "batch_size": 16, "eval_every": 10},
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


def bench_of(options: argparse.Namespace, given: Sequence[tuple[str, str]] = ()) -> Bench:
    """Returns the bench of the chosen data set; any `data.name` has one.

    If no targets are given, each domain of the data is left out in turn.
    """
    changes = {"data.name": options.dataset, "rounds": 40, "batch_size": 16, "eval_every": 10}
    own = Bench("configs/quickstart.py", (), changes)
    bench = BENCHES.get(options.dataset, own)
    path = {"data.path": options.path} if options.path else {}
    bench = bench._replace(changes={**bench.changes, **path})
    targets = [one.replace("+", ",") for one in options.target.split(",") if one]
    targets = targets or [target_in(options.path, target) for target in bench.targets]
    if not targets:
        targets = domain_names(configuration(bench.config, bench.changes, given))
    return bench._replace(targets=tuple(targets))


def runs_of(
    options: argparse.Namespace, bench: Bench, entry: Entry, rate: float, seed: int
) -> tuple[Run, ...]:
    """Returns the runs of a row, one for each target."""
    changes = {**SMALL, **bench.changes, **entry.changes, "adaptations": entry.adaptations}
    if entry.norm:
        changes["model"] = f"{changes['model']}:norm={entry.norm}"
    if changes["method"] == "fedprox" and bench.config.startswith("configs/pacs.py"):
        changes["method"] = "fedprox:mu=0.1"  # as in FedDG-GA's code on PACS
    changes |= {"optimizer.learning_rate": rate, "seed": seed}
    # one checkpoint, at the end, because a run takes seconds and there are hundreds
    changes |= {"checkpoint_every": changes["rounds"], "target": ""}
    found = []
    for target in bench.targets:
        folder = target.replace(" ", "_").replace(",", "+")
        name = f"{options.dataset}/{entry.folder}/rate-{rate:g}/{folder}/{seed}"
        found.append(Run(name, bench.config, {**changes, "target": target}, {}))
    return tuple(found)


def check_validation(run: Run, changes: Sequence[tuple[str, str]]) -> None:
    """Checks a run's data before hours of training."""
    config = configuration(run.config, run.changes, changes)
    try:
        clients = configured_clients(read_data(config), config)[0].domains
    except (ValueError, OSError) as error:
        raise SystemExit(f"{run.name}: {error}") from error
    without = [client.name for client in clients if client.validation is None]
    if without:
        raise SystemExit(
            f"client {without[0]!r} of {config.data.name} has no validation samples, by which the "
            f"learning rate is chosen: {HOLD_OUT}"
        )


def best_rate(options: argparse.Namespace, bench: Bench, entry: Entry) -> float | None:
    """Returns the rate whose first seed validates best; None until one has finished all targets."""

    def validation(rate: float) -> float:
        total = 0.0  # over targets; each has the same weight
        for run in runs_of(options, bench, entry, rate, 0):
            folder = options.workdir / run.name
            if (summary := read_summary(folder)) is None:
                return -float("inf")
            total += selected_validation(folder, summary)
        return total

    best = max(options.rates, key=validation)
    return best if validation(best) > -float("inf") else None


def train_all(
    options: argparse.Namespace,
    bench: Bench,
    rows: Mapping[str, Entry],
    changes: Sequence[tuple[str, str]],
) -> None:
    """Trains the runs that have not finished or failed, in this process, row after row.

    The first seed is trained at each rate, the other seeds at the best.
    """
    import jax

    from fedjax_bn.run import train
    from fedjax_bn.training.programs import keep_compiled

    folders: set[str] = set()
    for label, entry in rows.items():
        if entry.folder in folders:
            continue
        folders.add(entry.folder)
        print(f"{options.dataset}: {label}", file=sys.stderr, flush=True)
        # other rows do not need the last row's programs, and hundreds would fill the memory
        jax.clear_caches()
        for seed in range(options.seeds):
            best = best_rate(options, bench, entry) if seed else None
            rates = options.rates if seed == 0 else filter(None, [best])
            for run in (one for r in rates for one in runs_of(options, bench, entry, r, seed)):
                folder, failure = options.workdir / run.name, _failure(options, run)
                if read_summary(folder) or failure.exists():
                    continue
                config = configuration(run.config, run.changes, changes)
                keep_compiled(config.compilation_cache)
                try:
                    train.run(config, folder, say=lambda text: None)
                except InterruptedRun:
                    raise
                except UserError as error:  # another process has it, or it cannot be run
                    print(f"{run.name}: {error}", file=sys.stderr)
                    if isinstance(error, NotFiniteError):  # a retry would diverge again
                        write_atomically(failure, f"{error}\n")


def _failure(options: argparse.Namespace, run: Run) -> Path:
    return options.workdir / "failed" / f"{run.name}.txt"


def report(options: argparse.Namespace, bench: Bench, rows: Mapping[str, Entry]) -> str:
    """Returns the report of a data set from finished runs."""
    measured: dict[str, Measured] = {}
    notes: dict[str, str] = {}  # on rows that failed, and on FedNova where it is FedAvg
    for label, entry in rows.items():
        of = partial(runs_of, options, bench, entry)
        rate = best_rate(options, bench, entry)
        if rate is None:
            why = [_failure(options, run) for one in options.rates for run in of(one, 0)]
            words = [path.read_text().strip() for path in why if path.exists()]
            notes[label] = words[0] if words else "not run"
            continue
        found = {
            seed: [read_summary(options.workdir / run.name) for run in of(rate, seed)]
            for seed in range(options.seeds)
        }
        whole = {seed: known for seed, known in found.items() if None not in known}
        measured[label] = measure(entry, rate, whole)
        if all(equals_fedavg(options.workdir / r.name) for seed in whole for r in of(rate, seed)):
            notes[label] = EQUALS_FEDAVG
    return table(measured, notes)


def parse(arguments: Iterable[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the arguments --config.KEY=VALUE as given."""

    def rates(text: str) -> tuple[float, ...]:
        return tuple(map(float, text.split(",")))

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("action", choices=("run", "list", "report"), nargs="?", default="run")
    add("--dataset", default="scanners", help=f"{', '.join(BENCHES)}, or your own")
    add("--path", default="", help="data.path of the data set")
    add("--target", default="", help="domains left out one after the other")
    add("--only", default="", help="globs of rows, with commas between them")
    add("--seeds", type=int, default=SEEDS)
    add("--rates", type=rates, default=RATES, help="learning rates to try")
    add("--workdir", type=Path, default=Path("runs") / "all_methods")
    options, changes = parser.parse_known_args(arguments)
    for argument in changes:
        if not argument.startswith("--config.") or "=" not in argument:
            parser.error(f"unknown argument {argument}: write --config.KEY=VALUE")
    return options, changes


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options, given = parse(arguments)
    changes = [tuple(one.removeprefix("--config.").split("=", 1)) for one in given]
    bench = bench_of(options, changes)
    rows = chosen_rows(options.only)
    if options.action == "list":
        lines = [
            shlex.join(["python", *train_command(run, options.workdir, {}, given)])
            for entry in rows.values()
            for seed in range(options.seeds)
            for rate in options.rates
            for run in runs_of(options, bench, entry, rate, seed)
        ]
        print("\n".join(dict.fromkeys(lines)))
        return 0
    if options.action == "run":
        entry = next(iter(rows.values()))  # all runs read the same data, so one is enough
        check_validation(runs_of(options, bench, entry, options.rates[0], 0)[0], changes)
        train_all(options, bench, rows, changes)
    keys = {key: text(value) for key, value in bench.changes.items()} | dict(changes)
    each = [f"{k}={v}" for k, v in keys.items() if k not in ("data.path", "compilation_cache")]
    left_out = " or ".join(target.replace(",", " and ") for target in bench.targets)
    settings = f"Made with {bench.config}, {left_out} left out: {', '.join(each)}."
    shown = f"{report(options, bench, rows)}\n\n{settings}"
    write_atomically(options.workdir / f"{options.dataset}.md", f"{shown}\n")
    print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
