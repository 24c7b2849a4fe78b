"""The theory of client-specific batch norm in numbers and figures (FedBN, section 4; UniFed, 3.3).

    python launch/theory.py --workdir DIR [--width 2000] [--steps 2000] [--seed 0]

On random points and on the embedded digits seen by five scanners: the Gram matrices of averaged and
client-specific batch norm in closed form and by Monte Carlo, their least eigenvalues (Corollary
4.6), the two-layer network trained with either scale beside its predicted rate, and the error
surfaces of FedBN's Fig. 1 and 2. Writes figures and theory.json into DIR; about half a minute.
"""

import argparse
import json
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from fedjax_bn.data.sets import synthetic  # noqa: E402
from fedjax_bn.run.workdir import write_atomically  # noqa: E402
from fedjax_bn.theory import Data, gram, least_eigenvalue, race, same_client, sampled_gram  # noqa: E402
from fedjax_bn.theory import figures as draw  # noqa: E402
from fedjax_bn.theory.data import gaussian_clients, scanner_clients  # noqa: E402

SAMPLES = 100_000  # of Monte Carlo


def numbers(key: jax.Array, data: Data, courses: dict) -> dict[str, float]:
    """What theory.json says of one data set."""
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


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Figures and numbers of the theory.")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--width", type=int, default=2000, help="neurons of the two-layer network")
    parser.add_argument("--steps", type=int, default=2000, help="of gradient descent")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    enable_x64 = getattr(jax, "enable_x64", None) or jax.experimental.enable_x64  # before 0.8
    with enable_x64(True):
        key = jax.random.key(options.seed)
        datasets = {"random points": gaussian_clients(options.seed), "digits": scanner_clients()}
        courses = {
            name: race(key, data, options.width, options.steps) for name, data in datasets.items()
        }
        found = {name: numbers(key, data, courses[name]) for name, data in datasets.items()}
        digits = datasets["digits"]
        whole = gram(digits.points)
        toy = synthetic.toy_regression(seed=options.seed)
        figures = {
            "gram": draw.gram_matrices(key, digits.points, digits.client, SAMPLES),
            "spectra": draw.spectra({"G": whole, "G*": same_client(whole, digits.client)}),
            "rates": draw.courses(courses),
            "fig1": draw.toy_errors(toy),
            "fig2": draw.toy_surfaces(toy),
        }
    for name, image in figures.items():
        write_atomically(options.workdir / f"{name}.png", image)
    write_atomically(options.workdir / "theory.json", json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
