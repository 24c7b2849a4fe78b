"""Tests FedAvg, FedBN, SiloBN and FedIG with statistics from before and from after aggregation.

    python launch/sweeps/lag.py run [--only scanners,digits] [--data FOLDER] [--workdir DIR]
    python launch/sweeps/lag.py report [--workdir DIR]
    python launch/sweeps/lag.py cost

How much of "FedBN above FedAvg" is that running statistics, taken before aggregation, do not suit
the weights after it? A run trains once, without a selected round, and its last model is tested on
the clients' own samples with running, batch and precise statistics (`adaptation.precise`). FOLDER
has digits.npz and pacs; the scanners and the stains of configs/segmentation.py need no data, and
FedIG predicts no masks. A run that is there is not made twice, so the same command continues.

`report` prints means over seeds 0 to 2 in percent, Dice for the stains, with running/batch/precise
statistics, and FedBN minus FedAvg with the 95 % interval over seeds (Student's t, paired by seed).
`cost` prints the median seconds of five rounds of FedBN on the scanners, and of precise statistics.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import plan

from fedjax_bn.report.results import over_seeds
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.training.evaluation.evaluate import batch_accuracy, internal_evaluator
from fedjax_bn.training.evaluation.statistics import reestimation
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.rounds import open_rounds
from fedjax_bn.training.start import make_start
from fedjax_bn.training.workdir import write_atomically

METHODS = {"FedAvg": "fedavg", "FedBN": "fedbn", "SiloBN": "silobn", "FedIG": "fedig"}
STATISTICS, SEEDS = ("running", "batch", "precise"), range(3)


class Setting(NamedTuple):
    """A federation."""

    data: str  # the name in the folder of data; "" for data that need none
    config: str
    changes: dict[str, Any]
    methods: tuple[str, ...] = tuple(METHODS.values())


BOTH = {"target": "", "adaptations": (), "baselines": (), "mesh.clients": 1}
SMALL_CNN = {
    **{"model": "SmallCNN", "optimizer.learning_rate": 0.03, "optimizer.momentum": 0.9},
    "batch_size": 32,
}
SETTINGS = {
    "scanners": Setting(
        *("", "configs/quickstart.py"),
        {"target": "fax", "model": "SmallDigitCNN:width=8", "data.name": "scanners:seed=0"},
    ),
    "digits": Setting("digits.npz", "configs/digits.py", SMALL_CNN | {"rounds": 15}),
    "PACS": Setting(
        *("pacs", "configs/pacs.py"),
        {
            **SMALL_CNN,
            **{"data.image_size": 28, "data.augment": "none", "data.test": 0.2},
            **{"local_selection": 0, "local_steps": 20, "rounds": 20},
            **{"validate_with": "own", "data.validation": 0.1},
        },
    ),
    "stains": Setting(
        *("", "configs/segmentation.py"),
        {"target": "faded", "data.name": "stains", "rounds": 15, "optimizer.warmup_rounds": 0},
        ("fedavg", "fedbn", "silobn"),
    ),
}


def trained_and_tested(experiment: Experiment, keys: Any) -> dict[str, Any]:
    """Returns the scores of the clients after the last round, with each kind of statistics."""
    state = make_start(experiment, keys)()
    round = open_rounds(experiment, keys, state).compile(state)
    for _ in range(experiment.plan.rounds):
        state, _ = jax.block_until_ready(round(state))
    precise = experiment.evaluation._replace(statistics="precise")
    precise = experiment._replace(evaluation=precise)
    return {
        "running": internal_evaluator(experiment)(state)["accuracy"],
        "batch": batch_accuracy(experiment, state),
        "precise": internal_evaluator(precise)(state)["accuracy"],
    }


def run(setting: Setting, data: str, folder: Path) -> None:
    """Writes FOLDER/METHOD-SEED.json of each run that is not there."""
    compiled: dict[str, dict[str, Any]] = {}  # seeds of a method share its programs
    for seed in SEEDS:
        for method in setting.methods:
            path = folder / f"{method}-{seed}.json"
            if path.exists():
                continue
            changes = BOTH | setting.changes | {"method": method, "seed": seed}
            changes |= {"data.path": f"{data}/{setting.data}"} if setting.data else {}
            experiment, keys, _ = prepare(plan.configuration(setting.config, changes), traced=False)
            parts = {x: getattr(experiment, x) for x in ("model", "method", "prepare", "task")}
            experiment = experiment._replace(**compiled.setdefault(method, parts))
            scores = trained_and_tested(experiment, keys)
            write_atomically(path, json.dumps(scores))
            print(path, {name: round(scores[name]["mean"], 1) for name in scores}, flush=True)


def cost() -> str:
    """Returns the seconds of a round, and of precise statistics for all its clients."""
    setting = SETTINGS["scanners"]
    experiment, keys, start = prepare(
        plan.configuration(setting.config, BOTH | setting.changes), traced=False
    )
    trains = [domain.train for domain in experiment.internal.domains]
    reestimate, state = reestimation(experiment, trains), start()
    round = open_rounds(experiment, keys, state).compile(state)
    seconds: list[tuple[float, float]] = []
    for _ in range(6):
        times = [time.perf_counter()]
        state, _ = jax.block_until_ready(round(state))
        times.append(time.perf_counter())
        jax.block_until_ready(reestimate(state, range(len(trains))))
        times.append(time.perf_counter())
        seconds.append((times[1] - times[0], times[2] - times[1]))
    training, estimation = np.median(seconds[1:], axis=0)  # the first compiles
    return f"a round {training:.3f} s, precise statistics {estimation:.3f} s"


def report(workdir: Path) -> str:
    """Returns the table in Markdown, and the median of the deviations between seeds."""
    scores: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name, (label, method) in product(SETTINGS, METHODS.items()):
        paths = [workdir / name / f"{method}-{seed}.json" for seed in SEEDS]
        if all(path.exists() for path in paths):
            by_seed = [json.loads(path.read_text()) for path in paths]
            means = {s: np.array([run[s]["mean"] for run in by_seed]) for s in STATISTICS}
            scores[name, label] = means

    complete = [name for name in SETTINGS if {(name, "FedAvg"), (name, "FedBN")} <= scores.keys()]

    def row(label: str, cell: Callable[[str], str]) -> str:
        return f"| {label} | {' | '.join(map(cell, complete))} |"

    def means_of(label: str, name: str) -> str:
        means = scores.get((name, label), {}).values()
        return "/".join(f"{x.mean():.1f}" for x in means) or "-"

    def gap_of(statistics: str, name: str) -> str:
        fedbn, fedavg = (scores[name, label][statistics] for label in ("FedBN", "FedAvg"))
        gap = over_seeds(fedbn - fedavg)
        return f"{gap.mean:+.1f} [{gap.low:.1f}, {gap.high:.1f}]"

    lines = [f"| | {' | '.join(complete)} |", "|---|" + "---:|" * len(complete)]
    lines += [row(label, partial(means_of, label)) for label in METHODS]
    lines += [row(f"FedBN minus FedAvg, {s}", partial(gap_of, s)) for s in STATISTICS]
    deviations = [x.std(ddof=1) for means in scores.values() for x in means.values()]
    return "\n".join([*lines, f"median deviation between seeds: {np.median(deviations):.1f}"])


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("run", "report", "cost"))
    parser.add_argument("--only", default=",".join(SETTINGS))
    parser.add_argument("--data", default="data")
    parser.add_argument("--workdir", type=Path, default=Path("runs/lag"))
    options = parser.parse_args(arguments)
    if options.action != "run":
        print(cost() if options.action == "cost" else report(options.workdir))
        return 0
    for name in options.only.split(","):
        run(SETTINGS[name], options.data, options.workdir / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
