"""Computes the theory of client-specific batch norm (FedBN, section 4; UniFed, section 3.3).

    python launch/theory --workdir DIR [--width 2000] [--steps 2000] [--seeds 3]

FedBN, on random points and on the embedded digits of five scanners: computes the Gram matrices of
averaged and client-specific batch norm in closed form and by Monte Carlo, with their least
eigenvalues (Corollary 4.6); trains the two-layer network with either kind of scale and compares its
predicted rate. It also draws the errors of FedBN's Fig. 1 and 2.

UniFed: computes the bounds (Eq. 16 and 18) for an unseen client, which receives the mean of the
others' linear classifiers and normalizes by their mean statistics or its own. The clients are
Gaussian and differ only in mean and scale, as the paper assumes, or are scanners (odd digits
against even ones). bounds.py states what is estimated, and from which side.

Writes the first seed's figures and theory.json, mean and deviation over seeds, into DIR in about
half a minute a seed.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "launch")]

from fedjax_bn.training.workdir import write_atomically  # noqa: E402
from theory import bounds  # noqa: E402
from theory import figures as draw  # noqa: E402
from theory.convergence import (  # noqa: E402
    Data,
    gram,
    least_eigenvalue,
    race,
    same_client,
    sampled_gram,
)
from theory.data import (  # noqa: E402
    gaussian_clients,
    scanner_clients,
    scanner_points,
    shifted_points,
)
from theory.toy import toy_regression  # noqa: E402

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:  # until jax 0.8
    from jax.experimental import enable_x64

SAMPLES = 100_000  # draws of Monte Carlo
CLIENTS, EACH, DIMENSION, DELTA = 6, 180, 10, 0.05  # arguments of the bounds


def numbers(key: jax.Array, data: Data, courses: dict) -> dict[str, float]:
    """Returns theory.json's numbers on the Gram matrices and training of one data set."""
    exact = gram(data.points)
    estimate, error = sampled_gram(key, data.points, SAMPLES)
    return {
        "least eigenvalue of G": float(least_eigenvalue(exact)),
        "least eigenvalue of G*": float(least_eigenvalue(same_client(exact, data.client))),
        "Monte Carlo: largest deviation, standard errors": float(
            abs((estimate - exact) / error).max()
        ),
    } | {
        f"{name}: {what}": float(value)
        for name, course in courses.items()
        for what, value in (
            ("least eigenvalue of the network's G", course.eigenvalue),
            ("least eigenvalue of Lambda at the end", course.slowest),
            ("loss at the end / at the start", course.losses[-1] / course.losses[0]),
            ("the same, predicted", course.bound[-1] / course.bound[0]),
        )
    }


def bound_numbers(points: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns theory.json's numbers on the bounds; the last client is unseen, all others train.

    Args:
      points: f[N * M, d], the points of N clients, one client after the other.
      labels: i[N * M], 0 or 1.
    """
    points = points.reshape(CLIENTS, EACH, DIMENSION)
    labels = labels.reshape(CLIENTS, EACH)
    weights = np.full(CLIENTS - 1, 1 / (CLIENTS - 1))
    mean, variance = points.mean(1, keepdims=True), points.var(1, keepdims=True)
    ways = {
        "averaged": (mean[:-1].mean(0), variance[:-1].mean(0), bounds.averaged_bound),
        "client-specific": (mean, variance, bounds.specific_bound),
    }
    found = {}
    for name, (centre, scale, bound) in ways.items():
        features = (points - centre) / np.sqrt(scale)
        # an unseen client receives the mean of the seen clients' classifiers
        served = np.mean(list(map(ridge, features[:-1], labels[:-1])), axis=0)
        common = ridge(features.reshape(-1, DIMENSION), labels.ravel())
        clients = [
            bounds.Client(x, classes(served, x), classes(common, x), y)
            for x, y in zip(features, labels, strict=True)
        ]
        given = (clients[:-1], clients[-1], weights, DIMENSION + 1, DELTA)
        result, averaged = bound(*given), bounds.averaged_bound(*given)
        numbers = {
            "risk of the seen": result.risk,
            "divergence, mean of the seen, lower estimate": weights @ averaged.divergences,
            "error of a common hypothesis, upper estimate": weights @ result.errors,
            "complexity": result.complexity,
            "bound": result.total,
            "risk of the unseen": result.observed,
        }
        found |= {f"{name}: {what}": float(number) for what, number in numbers.items()}
    return found


def ridge(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns a linear classifier f[d + 1] of points f[M, d] by ridge regression, its bias last."""
    inputs = np.append(points, np.ones((len(points), 1)), axis=1)
    gram = inputs.T @ inputs + 1e-3 * len(inputs) * np.eye(inputs.shape[1])
    signs = 2 * labels.astype(points.dtype) - 1
    return np.linalg.solve(gram, inputs.T @ signs)


def classes(classifier: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Returns the predicted classes i[M], 0 or 1, of points f[M, d]."""
    return (points @ classifier[:-1] + classifier[-1] > 0).astype(np.int32)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Figures and numbers of the theory.")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--width", type=int, default=2000, help="neurons of the two-layer network")
    parser.add_argument("--steps", type=int, default=2000, help="of gradient descent")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    with enable_x64(True):
        results = [measured(seed, options.width, options.steps) for seed in range(options.seeds)]
        for name, image in drawn(*results[0][1:]).items():
            write_atomically(options.workdir / f"{name}.png", image)
    text = json.dumps(over_seeds([tables for tables, *_ in results]), indent=2)
    write_atomically(options.workdir / "theory.json", f"{text}\n")
    print(text)
    return 0


def measured(seed: int, width: int, steps: int) -> tuple[dict, dict[str, Data], dict]:
    """Returns a seed's numbers, its data sets and the courses of training on them."""
    key = jax.random.key(seed)
    datasets = {"random points": gaussian_clients(seed), "digits": scanner_clients(seed)}
    courses = {name: race(key, data, width, steps) for name, data in datasets.items()}
    tables = {name: numbers(key, data, courses[name]) for name, data in datasets.items()}
    sizes = seed, CLIENTS, EACH, DIMENSION
    tables["bounds, Gaussian clients"] = bound_numbers(*shifted_points(*sizes))
    tables["bounds, an unseen scanner"] = bound_numbers(*scanner_points(*sizes))
    return tables, datasets, courses


def drawn(datasets: dict[str, Data], courses: dict) -> dict[str, bytes]:
    """Returns the figures of seed 0 as PNG by name."""
    digits, key, toy = datasets["digits"], jax.random.key(0), toy_regression(seed=0)
    whole = gram(digits.points)
    return {
        "gram": draw.gram_matrices(key, digits.points, digits.client, SAMPLES),
        "spectra": draw.spectra({"G": whole, "G*": same_client(whole, digits.client)}),
        "rates": draw.courses(courses),
        "fig1": draw.toy_errors(toy),
        "fig2": draw.toy_surfaces(toy),
    }


def over_seeds(results: list[dict]) -> dict:
    """Returns the numbers of all seeds as [mean, standard deviation]; of one seed [number]."""
    if not isinstance(results[0], dict):
        return [np.mean(results), np.std(results, ddof=1)] if len(results) > 1 else results
    return {key: over_seeds([result[key] for result in results]) for key in results[0]}


if __name__ == "__main__":
    sys.exit(main())
