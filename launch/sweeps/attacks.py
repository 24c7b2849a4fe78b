"""Trains eight clients of which none, one or two attack, and prints what the honest ones have.

    python launch/sweeps/attacks.py [--only fedbn] [--seeds 3] [--workdir DIR]

Four of the scanners have two clients each, and `magazine` and `fax` are left out. The quickstart's
network with 8 channels is trained for 20 rounds by FedBN, where batch norm stays, and by FedAvg,
where it travels.
One attacker is a client of the first scanner, the second one a client of the third. They attack in
every round by what they upload (of parameters only, so that variances stay positive), or by their
labels:

    flip    the negative of the update
    scale   -100 times the update
    noise   Gaussian noise of ten times the update's norm
    labels  9 - y instead of the digit y

Runs are not made twice, so the same command continues. Each method has four tables with a row for
each rule, of means over the seeds in percent: the test accuracy of the honest clients after the
last round; the attackers' part of the weights, a mean over rounds; and both by client where no
client attacks and only features differ. There each client's part would be 12.5 if it were equal.
A score is nan if the update of an honest client became infinite in a run of a seed, which ends it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plan
from jax.flatten_util import ravel_pytree

from fedjax_bn import methods
from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.client import Trained, run_steps
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.run import train

ATTACKERS = (1, 5)
_NOISE = 2**31 + 9  # a constant of a client's round that no stream of the library has
RULES = (
    *("by_size", "coordinate_median", "trimmed_mean:trim=0.25", "krum:malicious=2"),
    *("krum:malicious=2:keep=6", "geometric_median", "norm_clipping"),
)
METHODS, KINDS = ("fedbn", "fedavg"), ("flip", "scale", "noise", "labels")
# column -> how the attackers attack, and how many do
ATTACKS = {"none": ("none", 0)} | {f"{n} {kind}": (kind, n) for kind, n in product(KINDS, (1, 2))}
CHANGES = {
    "data.name": "scanners",  # of the run's seed
    "model": "SmallDigitCNN:width=8",
    "baselines": "",
    "target": "magazine,fax",
    "data.clients_per_domain": 2,
    "adaptations": "running",
    "batch_size": 16,
    "optimizer.learning_rate": 0.03,
    "optimizer.momentum": 0.9,
    "optimizer.schedule": "constant",
    "rounds": 20,
    "checkpoint_every": 20,
    "eval_every": 20,
}


def _noise(key: jax.Array, updates: Any) -> Any:
    flat, restore = ravel_pytree(updates)
    drawn = jax.random.normal(key, flat.shape, flat.dtype)
    return restore(10 * jnp.linalg.norm(flat) / jnp.linalg.norm(drawn) * drawn)


SENT: dict[str, Callable[[jax.Array, Any], Any]] = {
    "flip": lambda key, updates: jax.tree.map(jnp.negative, updates),
    "scale": lambda key, updates: jax.tree.map(lambda x: -100 * x, updates),
    "noise": _noise,
    "labels": lambda key, updates: updates,
}


def attacking(kind: str, count: int) -> Callable[..., Trained]:
    """Returns local training in which `count` of `ATTACKERS` attack, in a way of `KINDS`."""

    def run(step: Any, received: Any, variables: Any, *rest: Any) -> Trained:
        state, batches, key, *load = rest
        attacks = jnp.isin(received.client, jnp.asarray(ATTACKERS[:count], jnp.int32))
        if kind == "labels":
            swapped = jnp.where(attacks, 9 - batches["label"], batches["label"])
            batches = batches | {"label": swapped}
        trained = run_steps(step, received, variables, state, batches, key, *load)
        params, start = trained.variables["params"], received.shared["params"]
        # Personal leaves are None in `start`; nothing of them is sent.
        updates = jax.tree.map(
            lambda x, y: None if x is None else y - x, start, params, is_leaf=lambda x: x is None
        )
        sent = SENT[kind](jax.random.fold_in(key, _NOISE), updates)

        def uploaded(x: Any, own: Any, update: Any) -> Any:
            return own if x is None else jnp.where(attacks, x + update, own)

        params = jax.tree.map(uploaded, start, params, sent, is_leaf=lambda x: x is None)
        return trained._replace(variables={**trained.variables, "params": params})

    return run


def attacked(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    base: str = "fedbn",
    kind: str = "flip",
    count: int = 1,
    **options: Any,
) -> FederatedMethod:
    """Returns the method `base` with attackers, for `config.method=attacks:attacked:kind=...`."""
    method = getattr(methods, base)
    return method(model, optimizer, train=attacking(kind, count), **options)


def changes_of(base: str, rule: str, kind: str, count: int, seed: int) -> dict[str, Any]:
    """Returns the changes of the quickstart's config for one run."""
    method = f"attacks:attacked:base={base}:kind={kind}:count={count}" if count else base
    return CHANGES | {"method": method, "weigh": rule, "seed": seed}


def tested(folder: Path, changes: dict[str, Any]) -> dict[str, float]:
    """Returns client -> its test accuracy in percent; makes a run that is missing."""
    if not (folder / "summary.json").exists():
        config = plan.configuration("configs/quickstart.py", changes)
        try:
            train.run(config, folder, modules=False)
        except NotFiniteError:
            return dict.fromkeys(shares(folder), np.nan)
    found = json.loads((folder / "summary.json").read_text())["last_round"]["internal"]
    return {name: value for name, value in found.items() if name != "mean"}


def shares(folder: Path) -> dict[str, float]:
    """Returns client -> its part of the weights in percent, a mean over the rounds of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    weights = [json.loads(line)["weights"] for line in lines]
    return {name: 100 * float(np.mean([one[name] for one in weights])) for name in weights[0]}


def honest(scores: np.ndarray, count: int) -> np.ndarray:
    """Returns the mean f[seeds] of scores f[seeds, K] over the clients that do not attack."""
    return np.delete(scores, ATTACKERS[:count], axis=1).mean(1)


def table(rows: Iterable[str], heads: Iterable[str], cell: Callable[[str, str], Any]) -> str:
    """Returns a table in Markdown with the mean of each `cell(row, head)`."""
    heads = list(heads)
    lines = [["rule", *heads], ["---", *("---:",) * len(heads)]]
    lines += [[row, *(f"{np.mean(cell(row, head)):.1f}" for head in heads)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(base: str, workdir: Path, seeds: int) -> str:
    """Returns the tables of a method; makes the runs that are missing."""
    scores, parts = {}, {}  # (rule, attack) -> f[seeds, K]
    names: dict[str, int] = {}
    for rule, (attack, (kind, count)) in product(RULES, ATTACKS.items()):
        place = workdir / base / rule.replace(":", "-") / f"{kind}-{count}"
        runs = {place / str(k): changes_of(base, rule, kind, count, k) for k in range(seeds)}
        found = [tested(folder, changes) for folder, changes in runs.items()]
        scores[rule, attack] = np.array([[*one.values()] for one in found])
        parts[rule, attack] = np.array([[*shares(folder).values()] for folder in runs])
        names = {name: k for k, name in enumerate(found[0])}

    def taken(rule: str, attack: str) -> np.ndarray:
        return parts[rule, attack][:, ATTACKERS[: ATTACKS[attack][1]]].sum(1)

    means = {(row, head): honest(x, ATTACKS[head][1]) for (row, head), x in scores.items()}
    tables = {
        "accuracy of the honest clients": table(RULES, ATTACKS, lambda *at: means[at]),
        "the attackers' part of the weights": table(RULES, [*ATTACKS][1:], taken),
        "accuracy by client where no client attacks": table(
            RULES, names, lambda row, name: scores[row, "none"][:, names[name]]
        ),
        "part of the weights where no client attacks": table(
            RULES, names, lambda row, name: parts[row, "none"][:, names[name]]
        ),
    }
    lines = [f"\n{base}: {title}\n\n{text}" for title, text in tables.items()]
    if seeds > 1:
        spread = np.nanmedian([mean.std(ddof=1) for mean in means.values()])
        lines.append(f"\nDeviation of the first table between seeds: median {spread:.1f}.")
    return "\n".join(lines)


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--only", default=",".join(METHODS), help="methods, with commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workdir", type=Path, default=Path("runs") / "attacks")
    options = parser.parse_args(arguments)
    for base in options.only.split(","):
        print(report(base, options.workdir, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
