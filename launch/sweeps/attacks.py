"""Trains eight clients of unequal sizes, of which the largest or the smallest attacks, or none.

    python launch/sweeps/attacks.py [--seeds 3] [--workdir DIR]

Four of the scanners have two clients each, and `magazine` and `fax` are left out. Training sets
have `SIZES` images, the largest 20 times the smallest. FedBN trains the quickstart's network with
8 channels for 12 rounds. The attacker attacks in every round by what it uploads (of parameters
only, so that variances stay positive):

    flip    the negative of the update
    scale   -100 times the update

Runs are not made twice, so the same command continues. Tables have a row for each rule and means
over the seeds in percent: the test accuracy after the last round, of the six clients that never
attack; the attacker's part of the weights, a mean over rounds; and both by client where no client
attacks. A score is nan if the update of an honest client became infinite in a run of a seed, which
ends it.
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

from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.client import Trained, run_steps
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods import fedbn
from fedjax_bn.run import train

SIZES = (160, 16, 104, 8, 64, 24, 40, 32)  # 20, 2, 13, 1, 8, 3, 5 and 4 times 8 images
ATTACKERS = {"largest": 0, "smallest": 3}
HONEST = [k for k in range(len(SIZES)) if k not in ATTACKERS.values()]
WITH_SIZES = ("coordinate_median", "trimmed_mean:trim=0.25", "geometric_median", "norm_clipping")
RULES = (
    *("uniform", "by_size", "krum:malicious=1:keep=6"),
    *(rule + weights for rule in WITH_SIZES for weights in ("", ":weights=by_size")),
)
# way -> how many times its update the attacker sends
TIMES = {"flip": -1, "scale": -100}
# column -> how the attacker attacks, and its number
ATTACKS = {"none": ("none", -1)} | {
    f"{kind}, {who}": (kind, client) for kind, (who, client) in product(TIMES, ATTACKERS.items())
}
CHANGES = {
    "data.name": "scanners",  # of the run's seed
    "model": "SmallDigitCNN:width=8",
    "baselines": "",
    "target": "magazine,fax",
    "data.clients_per_domain": 2,
    "data.sizes": ",".join(map(str, SIZES)),
    "adaptations": "running",
    "batch_size": 16,
    "optimizer.learning_rate": 0.03,
    "optimizer.momentum": 0.9,
    "optimizer.schedule": "constant",
    "rounds": 12,
    "checkpoint_every": 12,
    "eval_every": 12,
}


def attacking(kind: str, client: int) -> Callable[..., Trained]:
    """Returns local training in which the client of this number attacks, in a way of `TIMES`."""

    def run(step: Any, received: Any, variables: Any, *rest: Any) -> Trained:
        state, batches, key, *load = rest
        trained = run_steps(step, received, variables, state, batches, key, *load)
        params, start = trained.variables["params"], received.shared["params"]

        def sent(x: Any, y: Any) -> Any:
            if x is None:  # personal; nothing of it is sent
                return y
            return jnp.where(received.client == client, x + TIMES[kind] * (y - x), y)

        params = jax.tree.map(sent, start, params, is_leaf=lambda x: x is None)
        return trained._replace(variables={**trained.variables, "params": params})

    return run


def attacked(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    kind: str = "flip",
    client: int = 0,
    **options: Any,
) -> FederatedMethod:
    """Returns FedBN with an attacker, for `config.method=attacks:attacked:kind=...:client=...`."""
    return fedbn(model, optimizer, train=attacking(kind, client), **options)


def changes_of(rule: str, kind: str, client: int, seed: int) -> dict[str, Any]:
    """Returns the changes of the quickstart's config for one run; of client -1 nobody attacks."""
    method = f"attacks:attacked:kind={kind}:client={client}" if client >= 0 else "fedbn"
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


def table(rows: Iterable[str], heads: Iterable[str], cell: Callable[[str, str], Any]) -> str:
    """Returns a table in Markdown with the mean of each `cell(row, head)`."""
    heads = list(heads)
    lines = [["rule", *heads], ["---", *("---:",) * len(heads)]]
    lines += [[row, *(f"{np.mean(cell(row, head)):.1f}" for head in heads)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(workdir: Path, seeds: int) -> str:
    """Returns the tables; makes the runs that are missing."""
    scores, parts = {}, {}  # (rule, attack) -> f[seeds, K]
    names: dict[str, int] = {}
    for rule, (attack, (kind, client)) in product(RULES, ATTACKS.items()):
        place = workdir / rule.replace(":", "-") / attack.replace(", ", "-")
        runs = {place / str(k): changes_of(rule, kind, client, k) for k in range(seeds)}
        found = [tested(folder, changes) for folder, changes in runs.items()]
        scores[rule, attack] = np.array([[*one.values()] for one in found])
        parts[rule, attack] = np.array([[*shares(folder).values()] for folder in runs])
        names = {name: k for k, name in enumerate(found[0])}

    means = {at: x[:, HONEST].mean(1) for at, x in scores.items()}
    tables = {
        "accuracy of the six that never attack": table(RULES, ATTACKS, lambda *at: means[at]),
        "the attacker's part of the weights": table(
            RULES, [*ATTACKS][1:], lambda row, head: parts[row, head][:, ATTACKS[head][1]]
        ),
        "accuracy by client where no client attacks": table(
            RULES, names, lambda row, name: scores[row, "none"][:, names[name]]
        ),
        "part of the weights where no client attacks": table(
            RULES, names, lambda row, name: parts[row, "none"][:, names[name]]
        ),
    }
    lines = [f"\n{title}\n\n{text}" for title, text in tables.items()]
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workdir", type=Path, default=Path("runs") / "attacks")
    options = parser.parse_args(arguments)
    print(report(options.workdir, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
