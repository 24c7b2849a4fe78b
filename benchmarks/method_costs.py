"""Measures each method's round, and compares it with a prediction from its passes.

    python benchmarks/method_costs.py                                # all networks; long
    python benchmarks/method_costs.py --only DigitCNN --json         # one JSON object as last line
    python benchmarks/method_costs.py --only ResNet18 --methods moon fedig
    python benchmarks/method_costs.py --record costs.jsonl           # continues after a kill
    python benchmarks/method_costs.py --only SmallCNN           # for docs/methods.md

A training step is three passes through the network that cost about the same: forward, the gradient
of its maps, the gradient of its weights. The table lists how many of each a method's formula needs
in a step; the prediction is FedAvg's round times their sum, divided by FedAvg's three. A method
that divides each batch into two steps is predicted by FedAvg's round with half batches, because a
step updates all weights for a small batch too. A method's own layers (a projection, a latent, a
discriminator) are predicted by FedAvg's round of two dense layers of the features' size, in
proportion to their number of weights, which on AlexNet with its 4,096 features is up to twice the
network's. Further computation (L2D's stylist) is timed as a program of its own, and added. No
prediction includes optimizers, corrections by control variates and the server. Methods are timed in
turn, a few at a time and FedAvg with each few (see `interleave`); the target is that no method
takes more than 1.25 times its prediction. "times" is a round's CPU seconds over FedAvg's; kB down
and up are what a client receives and sends in a round in addition to what it does under FedAvg.

Here the larger networks have small images and short rounds, far from an epoch of a paper's client,
so that a round takes seconds. The fewer steps a round has, the larger is the share of work that a
method does once a round with every weight (control variates, statistics of other clients, distances
between clients).
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn import models
from fedjax_bn.contrib.l2d import draw_stylist, stylize
from fedjax_bn.engine.backend import for_one_run
from fedjax_bn.federation import FederatedMethod, FederatedState, global_variables, traffic
from fedjax_bn.models.classifier import sizes_of
from fedjax_bn.run.experiment.method import METHODS
from interleave import Samples, interleave, paired_ratio, spend
from machine import announce

TARGET = 1.25
HALVED = "fedavg, halves"  # FedAvg's round with twice the steps of half the batch
DENSE = "fedavg, dense"  # FedAvg's round of `Dense`
BASE = {"perfedavg": HALVED}  # method -> the round of its prediction, if it is not FedAvg's
LEAST = 0.05  # a smaller share of `Dense`'s weights is left out of the prediction


class Passes(NamedTuple):
    """The numbers of passes through the whole network in a step, each with the whole batch."""

    forward: float = 1
    maps: float = 1  # gradients of maps
    weights: float = 1  # gradients of weights


_OF_THE_SERVER = ("fedadagrad", "fedadam", "fedavgm", "fedyogi")
_OF_THE_CLASSIFIER = ("copa", "csd", "fedsr", "jigen", "rsc", "selfreg", "sfa", "snr")
PASSES = {
    **dict.fromkeys(
        ("fedavg", "fedprox", "fedbn", "silobn", "singleset", "scaffold", "fednova", "feddc"),
        Passes(),
    ),
    **dict.fromkeys(_OF_THE_SERVER + _OF_THE_CLASSIFIER, Passes()),
    **dict.fromkeys(("fedwon", "fixbn", "mixstyle", "pn"), Passes()),  # other norms, as many passes
    **dict.fromkeys(("fedawa", "feddyn", "fedlws", "fedrod"), Passes()),
    **dict.fromkeys(("fedfa", "fedrdn"), Passes()),  # other maps or images, as many passes
    "fedcd": Passes(),  # its second derivative is of the classifier alone
    "perfedavg": Passes(),  # a half of the batch adapts, the other half gives the gradient
    "csac": Passes(forward=2),  # by the frozen model too; its own layers come on top
    "fedadg": Passes(forward=2),  # for what the discriminator reads, once the network has moved
    "hbn": Passes(forward=2),  # a pass through the round's data before training
    "moon": Passes(forward=3),  # by the received and by the previous model too
    "fedsam": Passes(2, 2, 2),  # the gradient where the first one leads, too
    "harmofl": Passes(2, 2, 2),  # likewise
    "fedig": Passes(2, 2, 2),  # the mixed pass
    **dict.fromkeys(("apfl", "ditto"), Passes(2, 2, 2)),  # the client's own model too
    # A pass before training, with the gradients of the last layers or the head alone.
    **dict.fromkeys(("fedala", "fedbabu", "fedrep"), Passes(2, 1, 1)),
    "gperxan": Passes(),  # instance norms beside the batch norms, as many passes
    "fediga": Passes(3, 3, 2),  # the adapter's pass, with the weights frozen
    "l2d": Passes(4, 4, 2),  # two styles, for the model and again for the stylist
    "feddg": Passes(4, 4, 4),  # two gradients, and the derivative of the inner one
    "randconv": Passes(3, 3, 3),  # of three random convolutions
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedig": {"cafl": "mean"},
    "fediga": {"cafl": "mean"},
    "feddg": {"spectra": 4},
}
FIELDS: dict[str, dict[str, Any]] = {"fedwon": {"norm": "none"}}  # of the network


class Size(NamedTuple):
    """The round of a network: side of its images, samples of a batch, steps of a client."""

    side: int
    batch: int
    steps: int


SIZES = {
    "DigitCNN": Size(28, 32, 24),  # an epoch of the 743 digits of a client of FedBN
    "ResNet18": Size(64, 16, 8),
    "AlexNet": Size(128, 32, 6),
    "DenseNet121": Size(64, 16, 4),
    "SmallCNN": Size(28, 32, 8),
}
CLIENTS, CLASSES = 2, 10
SHARE = 0.6  # of the new style, the default of `contrib.l2d`


class Dense(nn.Module):
    """Two dense layers of a network's feature size, to predict a method's own layers."""

    features: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns f[B, features] of the first `features` numbers of each image f[B, H, W, C]."""
        x = images.reshape(len(images), -1)[:, : self.features]
        return nn.Dense(self.features)(nn.relu(nn.Dense(self.features)(x)))


def main() -> None:
    """Times all methods, and prints a table for each network, and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="*", default=list(SIZES), choices=SIZES, help="networks; default: all")
    add("--methods", nargs="*", default=list(PASSES), choices=PASSES, help="default: all")
    for name in Size._fields:
        add(f"--{name}", type=int, help="default: the network's own")
    add("--repeats", type=int, default=9, help="rounds of each; default %(default)s")
    add("--together", type=int, default=8, help="programs in memory; default %(default)s")
    add("--record", type=Path, help="takes a line of each method; what it has is left out")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(
        f"a round of each method, {CLIENTS} clients, measured over predicted by its passes; "
        f"on {jax.devices()[0]}"
    )
    results = {}
    for network in options.only:
        own = SIZES[network]
        size = Size(*(getattr(options, name) or getattr(own, name) for name in Size._fields))
        results[network] = measure(network, size, options, options.record or Path(os.devnull))
    if options.json:
        print(json.dumps({"machine": here, "results": results}))


def measure(network: str, size: Size, options: argparse.Namespace, record: Path) -> dict[str, Any]:
    """Returns method -> seconds of a round and of its compilation, and measured over predicted."""
    print(f"\n{network} {size.side}x{size.side}, {size.steps} steps of {size.batch}")
    rows, batches = recorded(record, network, size), make_batches(size)
    others = [name for name in options.methods if name not in ("fedavg", *rows)]
    if rows:
        print(table(rows), flush=True)
    if not others and rows:
        return rows
    beside, base = max(1, options.together - 1), compiled_round("fedavg", network, batches)
    for begin in range(0, max(len(others), 1), beside):
        rounds, few = {"fedavg": base}, others[begin : begin + beside]
        if HALVED in map(BASE.get, few):
            halves = jax.tree.map(  # each batch as two of half its size, in twice the steps
                lambda x: x.reshape(len(x), 2 * x.shape[1], x.shape[2] // 2, *x.shape[3:]), batches
            )
            rounds[HALVED] = compiled_round("fedavg", network, halves)
        for name in few:
            rounds[name] = compiled_round(name, network, batches)
        own = {name: own_share(name, network, batches) for name in ("fedavg", *few)}
        if max(own.values()) > LEAST:
            rounds[DENSE] = compiled_round("fedavg", network, batches, dense=True)
        rounds |= {PARTS[n][0]: (PARTS[n][1](batches), 0.0) for n in few if n in PARTS}
        taken = interleave({name: run for name, (run, _) in rounds.items()}, options.repeats)
        names = ("fedavg", *few)
        found = {name: row(name, taken, rounds[name][1], own[name]) for name in names}
        for name in names:
            found[name] |= extra_bytes(name, network, batches)
        print(table(found), flush=True)
        append(record, network, size, found)
        rows |= found
        jax.clear_caches()  # or the programs of all methods would stay in memory
    return rows


def append(record: Path, network: str, size: Size, found: dict[str, dict[str, Any]]) -> None:
    """Appends a line with the measured row of each method to the record."""
    lines = [json.dumps({"of": [network, *size], "method": n, "row": found[n]}) for n in found]
    with record.open("a") as file:
        file.write("\n".join(lines) + "\n")


def recorded(record: Path, network: str, size: Size) -> dict[str, dict[str, Any]]:
    """Returns a record's rows of this network and size; the last one of each method counts."""
    if not record.exists():
        return {}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {line["method"]: line["row"] for line in lines if line["of"] == [network, *size]}


def make_batches(size: Size) -> dict[str, jax.Array]:
    """Returns random images as bytes, in full batches."""
    key, lead = jax.random.key(0), (CLIENTS, size.steps, size.batch)
    return {
        "image": jax.random.randint(key, (*lead, size.side, size.side, 3), 0, 256, jnp.uint8),
        "label": jax.random.randint(key, lead, 0, CLASSES, jnp.int32),
        "valid": jnp.ones(lead, bool),
    }


def started(
    name: str, network: str, batches: dict[str, jax.Array], *, dense: bool = False
) -> tuple[FederatedMethod, Callable[[], FederatedState]]:
    """Returns a method and the maker of its first state; `dense` takes `Dense` as the network."""
    model = getattr(models, network)(num_classes=CLASSES, **FIELDS.get(name, {}))
    images = batches["image"][0, 0].astype(jnp.float32)
    if dense:
        like = jax.eval_shape(model.init, jax.random.key(1), images)
        model = Dense(sizes_of(model, like).features)
    method = METHODS[name](model, optax.sgd(0.01), **OPTIONS.get(name, {}))

    def start() -> FederatedState:
        variables = model.init(jax.random.key(1), images)
        return method.init(jax.random.key(2), variables, CLIENTS)

    return method, start


def own_share(name: str, network: str, batches: dict[str, jax.Array]) -> float:
    """Returns the number of weights that a method adds, divided by that of `Dense`."""

    def weights(name: str, dense: bool = False) -> int:
        state = jax.eval_shape(started(name, network, batches, dense=dense)[1])
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(global_variables, state)))

    own = max(0, weights(name) - weights("fedavg"))
    return own / weights("fedavg", dense=True)


def extra_bytes(name: str, network: str, batches: dict[str, jax.Array]) -> dict[str, int]:
    """Returns what a client receives and sends in a round, in bytes more than under FedAvg."""

    def moved(name: str) -> dict[str, int]:
        method, start = started(name, network, batches)
        of_client = jax.tree.map(lambda leaf: leaf[0], batches)
        return traffic(method, jax.eval_shape(start), of_client)

    more, base = moved(name), moved("fedavg")
    return {way: more[way] - base[way] for way in base}


def compiled_round(
    name: str, network: str, batches: dict[str, jax.Array], *, dense: bool = False
) -> tuple[Callable[[], object], float]:
    """Returns a call that makes a method's next round, and the CPU seconds of compiling it.

    The first round has run already, because in it some methods have nothing from the server.
    """
    method, start = started(name, network, batches, dense=dense)
    key, state = jax.random.key(2), for_one_run(start)()
    made = []
    _, user, system = spend(lambda: made.append(method.round.lower(state, batches, key).compile()))
    (round,), states = made, [state]

    def run() -> None:
        """Makes one round and keeps its state; the old state is donated, as in a run."""
        states[:] = jax.block_until_ready(round(states.pop(), batches, key))[:1]

    run()
    return run, user + system


def styles(batches: dict[str, jax.Array]) -> Callable[[], object]:
    """Returns a call of L2D's stylist alone for a round's steps: new styles and its gradient."""

    def step(layers: dict, given: tuple[jax.Array, jax.Array]) -> tuple[dict, jax.Array]:
        images, key = given
        images = images.astype(jnp.float32) / 255
        styled = stylize(layers, images, SHARE, key)
        slope = jax.grad(lambda layers: stylize(layers, images, SHARE).mean())(layers)
        return jax.tree.map(jnp.subtract, layers, slope), styled.mean()

    def round(layers: dict, images: jax.Array, keys: jax.Array) -> tuple[dict, jax.Array]:
        return jax.lax.scan(step, layers, (images, keys))

    images = batches["image"].reshape(-1, *batches["image"].shape[2:])
    layers = draw_stylist(jax.random.key(3), images.shape[-1], jnp.float32)
    given = layers, images, jax.random.split(jax.random.key(4), len(images))
    compiled = jax.jit(round).lower(*given).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*given))

    run()
    return run


# method -> its computation outside the network's passes, timed as a program of its own
PARTS = {"l2d": ("l2d, own part", styles)}


def row(name: str, taken: dict[str, Samples], compiling: float, own: float = 0.0) -> dict[str, Any]:
    """Returns a method's figures by wall time and least CPU seconds; `own` is of `own_share`."""
    base = taken[BASE.get(name, "fedavg")]
    ratio, cpu = paired_ratio(taken[name], base), least_cpu(taken[name])
    predicted = predicted_of(name)
    if own > LEAST:
        predicted += own * least_cpu(taken[DENSE]) / least_cpu(base)
    if name in PARTS:
        predicted += least_cpu(taken[PARTS[name][0]]) / least_cpu(base)
    return {
        "passes": list(PASSES[name]),
        "own": round(own, 3),
        "seconds": float(taken[name].wall.min()),
        "cpu_seconds": cpu,
        "compile_cpu_seconds": round(compiling, 2),
        "times": cpu / least_cpu(taken["fedavg"]),
        "by_wall": ratio.of_medians / predicted,
        "by_cpu": cpu / least_cpu(base) / predicted,
    }


def predicted_of(name: str) -> float:
    """Returns a method's predicted round in units of FedAvg's; all passes cost the same."""
    return sum(PASSES[name]) / sum(PASSES["fedavg"])


def least_cpu(samples: Samples) -> float:
    """Returns the CPU seconds of the round that took the least."""
    return float((samples.user + samples.system).min())


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns one line for each method."""
    lines = [
        "            passes                                     measured / predicted   compile",
        "method      forward  maps  weights   least s     CPU s      by wall   by CPU     CPU s"
        "   times   kB down     kB up",
    ]
    for name, found in rows.items():
        forward, maps, weights = found["passes"]
        over, of_cpu = found["by_wall"], found["by_cpu"]
        above = " *" if over > TARGET else ""
        lines.append(
            f"{name:10}  {forward:7.3g}  {maps:4.3g}  {weights:7.3g}   {found['seconds']:7.3f}   "
            f"{found['cpu_seconds']:7.3f} {over:12.2f}   {of_cpu:6.2f}   "
            f"{found['compile_cpu_seconds']:7.1f} {found['times']:7.2f} {found['down'] / 1e3:9.1f} "
            f"{found['up'] / 1e3:9.1f}{above}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
