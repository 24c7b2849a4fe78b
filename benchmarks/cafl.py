"""Compares readings of FedIG's CAFL (Eq. 4), from random weights and from trained ones.

    python benchmarks/cafl.py --path PACS [--seeds 3] [--model ResNet18:width=16] [--warm 10]
    python benchmarks/cafl.py --path PACS --model ResNet50:keras=True --pretrained WEIGHTS

FedIG with lambda_1 = 0.1 and lambda_2 = 4 on PACS, one domain left out, SGD with learning rate 0.01
and momentum 0.5 as in the paper. The readings define the distance of a sample's two passes
differently: the sum or the mean of the squared differences of its features; the sum for features
scaled to length one; the sum or the mean over the maps before pooling. `--warm` first trains so
many rounds without CAFL, from which all readings continue. A row is one seed of a reading, which
determines the weights, batches and draws, and ends at an update that is not finite. "features" is
the standard deviation of the clients' features over images, averaged over features. After the seeds
of a reading: mean and standard deviation.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.methods import fedig
from fedjax_bn.models import ResNet, pretrained
from fedjax_bn.normalization import batch_statistics, normalize_with
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import Experiment, build

CONFIG = Path(__file__).parents[1] / "configs/pacs.py"
Round = Callable[..., tuple[FederatedState, dict[str, jax.Array]]]
Start = Callable[[jax.Array], FederatedState]


class Unpooled(ResNet):
    """A ResNet whose features are the maps before pooling, which all readings need."""

    def features(self, images: jax.Array) -> jax.Array:
        """Returns maps f[B, H / 32, W / 32, F] of images f[B, H, W, C]."""
        return self.maps(images)

    def classify(self, features: jax.Array) -> jax.Array:
        """Returns logits f[B, classes] of maps."""
        return self.head(features.mean((1, 2)))


def unit(maps: jax.Array) -> jax.Array:
    """Returns the pooled features f[B, F], scaled to length one."""
    x = maps.mean((1, 2))
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


# reading -> distance of the two passes' maps, f[B, H, W, F] each, as f[B]
READINGS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "none": lambda a, b: jnp.zeros(len(a)),
    "sum": lambda a, b: jnp.square((a - b).mean((1, 2))).sum(-1),
    "mean": lambda a, b: jnp.square((a - b).mean((1, 2))).mean(-1),
    "unit": lambda a, b: jnp.square(unit(a) - unit(b)).sum(-1),
    "map_sum": lambda a, b: jnp.square(a - b).sum((1, 2, 3)),
    "map_mean": lambda a, b: jnp.square(a - b).mean((1, 2, 3)),
}


def main() -> None:
    """Trains with every reading and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--path", required=True)
    add("--model", default="ResNet18:width=16")
    add("--target", default="sketch")
    add("--pretrained", default="", help="weights to start from, as config.pretrained takes them")
    for name, default in {"size": 64, "batch": 32, "steps": 20, "rounds": 5}.items():
        add(f"--{name}", type=int, default=default)
    add("--warm", type=int, default=0, help="rounds without CAFL first")
    add("--seeds", type=int, default=3)
    add("--only", default=",".join(READINGS), help="readings, comma-separated")
    options = parser.parse_args()
    changes = [("data.path", options.path), ("data.image_size", str(options.size))]
    changes += [("model", options.model), ("target", options.target), ("data.validation", "0.1")]
    experiment = build(read(str(CONFIG), changes))
    drawing = partial(sample, experiment, options.steps, options.batch)
    step, start = programs(experiment, drawing(0, 0), options.pretrained)
    score, starts = scorer(experiment), []  # of each seed: how it draws batches, its state, its key
    for seed in range(options.seeds):
        draw, key = partial(drawing, seed), jax.random.key(seed)
        state, losses = train(step, start(key), draw, options.warm, "none", key)
        print(json.dumps({"seed": seed, "warm": losses}), flush=True)
        starts.append((draw, state, key))
    for reading in options.only.split(","):
        rows = []
        for seed, (draw, state, key) in enumerate(starts):
            trained, losses = train(step, state, draw, options.rounds, reading, key)
            rows.append(score(trained) | {"first loss": losses[0], "last loss": losses[-1]})
            named = {"reading": reading, "seed": seed, "losses": losses}
            print(json.dumps(named | rows[-1]), flush=True)
        table = np.array([[*row.values()] for row in rows])
        cells = zip(rows[0], table.mean(0).round(2), table.std(0, ddof=1).round(2), strict=True)
        shown = {name: [float(mean), float(deviation)] for name, mean, deviation in cells}
        print(json.dumps({"reading": reading, **shown}), flush=True)


def sample(
    experiment: Experiment, steps: int, batch: int, seed: int, number: int
) -> dict[str, Any]:
    """Returns the batches of one round, the same for every reading."""
    random = np.random.default_rng((seed, number))
    splits = [domain.train for domain in experiment.internal.domains]
    chosen = [random.integers(len(split.labels), size=(steps, batch)) for split in splits]
    images, labels = (
        np.stack([getattr(s, kind)[c] for s, c in zip(splits, chosen, strict=True)])
        for kind in ("images", "labels")
    )
    return {"image": images, "label": labels, "valid": np.ones(labels.shape, bool)}


def programs(experiment: Experiment, batches: dict[str, Any], weights: str) -> tuple[Round, Start]:
    """Returns one program for a round with any reading, and `start(key)`, the state before it."""
    model = Unpooled(**{name: getattr(experiment.model, name) for name in ResNet.__annotations__})

    def method(chosen: jax.Array) -> Any:
        # computes all readings, so that one compiled program serves each of them
        def distance(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.stack([read(a, b) for read in READINGS.values()])[chosen]

        return fedig(model, optax.sgd(0.01, 0.5), cafl=distance, prepare=experiment.prepare)

    @jax.jit
    def step(
        state: FederatedState, batches: dict[str, jax.Array], chosen: jax.Array, key: jax.Array
    ) -> tuple[FederatedState, dict[str, jax.Array]]:
        return method(chosen).round(state, batches, key)

    image = experiment.prepare(jnp.asarray(batches["image"][0, 0, :2]), jnp.float32)

    def start(key: jax.Array) -> FederatedState:
        variables = jax.jit(model.init)(key, image)
        if weights:
            variables, _ = pretrained.load_pretrained(weights, experiment.model, variables)
        return method(jnp.int32(0)).init(key, variables, len(batches["image"]))

    return step, start


def train(
    step: Round, state: FederatedState, draw: Callable, rounds: int, reading: str, key: jax.Array
) -> tuple[FederatedState, list[float]]:
    """Returns the state after `rounds`, or after an update that is not finite, and mean losses."""
    losses = []
    for number in range(int(state.round), int(state.round) + rounds):
        state, metrics = step(state, draw(number), list(READINGS).index(reading), key)
        losses.append(round(float(metrics["loss"].mean()), 3))
        if not metrics["finite"].all():
            break
    return state, losses


def scorer(experiment: Experiment) -> Callable[[FederatedState], dict[str, float]]:
    """Returns `score(state)`, the accuracy on the clients' validation and on 1,000 unseen images.

    Clients use their own running statistics, unseen images the averaged ones. "batch" is the
    clients' accuracy with the statistics of batches of 100, which shows whether running ones lag.
    """
    model = experiment.model

    @jax.jit
    def infer(variables: Any, images: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        features = model.apply(variables, images, method=model.features)
        with normalize_with(batch_statistics):
            fresh = model.apply(variables, images)
        logits = model.apply(variables, features, method=model.classify)
        return features, logits.argmax(-1), fresh.argmax(-1)

    def test(variables: Any, split: Any) -> tuple[float, float, float]:
        order = np.random.default_rng(0).permutation(len(split.labels))[:1000]
        images = experiment.prepare(jnp.asarray(split.images[order]), jnp.float32)
        parts = [infer(variables, images[i : i + 100]) for i in range(0, len(order), 100)]
        features, *answers = (np.concatenate(part) for part in zip(*parts, strict=True))
        running, batch = (100 * (given == split.labels[order]).mean() for given in answers)
        return running, batch, features.std(0).mean()

    def score(state: FederatedState) -> dict[str, float]:
        own = client_variables(state)
        tested = [
            test(jax.tree.map(lambda leaf, k=k: leaf[k], own), domain.validation)
            for k, domain in enumerate(experiment.internal.domains)
        ]
        names = ("clients", "batch", "features")
        row = dict(zip(names, np.mean(tested, 0), strict=True))
        row["unseen"] = test(global_variables(state), experiment.unseen[0].test)[0]
        return {name: round(float(value), 2) for name, value in row.items()}

    return score


if __name__ == "__main__":
    main()
