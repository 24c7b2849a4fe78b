"""Measures the accuracy that privacy costs: FedBN on the quickstart's scanners.

    python benchmarks/privacy.py --seeds=3 --noise=0.1,0.5,1,2 --each=1,16,100

Each scanner's 180 training images belong to one client, or to 16 clients of about eleven images, or
to 100 clients that each draw ten of them; the network has 38,000 shared parameters. A row has a
noise multiplier z and the resulting epsilon.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.data.sampling import drawing
from fedjax_bn.engine.privacy import Privacy, epsilon
from fedjax_bn.federation import FederatedState
from fedjax_bn.methods import fedbn
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build
from fedjax_bn.training.evaluation.evaluate import evaluator
from fedjax_bn.training.start import sample_input

EPOCHS, RATE, DELTA = 5, 0.1, 1e-5
WITHOUT = 1e9  # a clip that is longer than any update


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=40, help="of training; default %(default)s")
    add("--seeds", type=int, default=3, help="seeds 0, 1, ...; default %(default)s")
    add("--clip", type=float, default=1.0, help="norm to which an update is clipped")
    add("--noise", type=listed(float), default="0.01,0.1,0.5,1,2", help="noise multipliers")
    add("--each", type=listed(int), default="1,16,100", help="clients of a scanner")
    options = parser.parse_args()
    print("clients  clip  noise  epsilon   clients' mean %   fax [tsmobn] %")
    settings = [(WITHOUT, 0.0), (options.clip, 0.0)]
    settings += [(options.clip, noise) for noise in options.noise]
    for each in options.each:
        test = tester(each, options.rounds)
        for clip, noise in settings:
            found = [test(clip, noise, seed) for seed in range(options.seeds)]
            inside, outside = (mean_and_deviation(column) for column in zip(*found, strict=True))
            spent = f"{epsilon(noise, options.rounds, DELTA):.3g}" if noise else "none"
            shown = "none" if clip == WITHOUT else f"{clip:g}"
            head = f"{5 * each:7}  {shown:>4}  {noise:5g}  {spent:>7}"
            print(f"{head}   {inside}   {outside}", flush=True)


def listed(kind: type) -> Callable[[str], list]:
    """Returns the type of an option that takes several values, with commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def tester(each: int, rounds: int) -> Callable[[float, float, int], tuple[float, float]]:
    """Returns `test(clip, noise, seed)` -> accuracy of the clients and of the unseen scanner."""
    changes = {"model": "MLP", "data.clients_per_domain": str(each), "adaptations": "tsmobn"}
    if each > 16:  # more clients than images of a class, so clients draw their samples
        changes["data.partition"] = "drawn:samples=10"
    config = read("quickstart", list(changes.items()))
    built = build(config)
    arrays = [domain.train[:2] for domain in built.internal.domains]
    draw = drawing(arrays, local_epochs=EPOCHS)
    evaluate = evaluator(built)
    sample = sample_input(built.internal, built.prepare, 2)

    @jax.jit
    def train(clip: jax.Array, noise: jax.Array, key: jax.Array) -> FederatedState:
        mechanism = Privacy(clip, noise, "server", 0)
        optimizer = optax.sgd(RATE)
        options = {"prepare": built.prepare, "local_epochs": EPOCHS, "privacy": mechanism}
        method = fedbn(built.model, optimizer, **options)
        start = method.init(key, built.model.init(key, sample), len(built.internal.domains))
        words = jax.random.key_data(jax.random.fold_in(key, 1))
        server = start.server._replace(kept=start.server.kept._replace(key=words))

        def step(state: FederatedState, number: jax.Array) -> tuple[FederatedState, None]:
            return method.round(state, draw(jax.random.fold_in(key, number)), key)[0], None

        return jax.lax.scan(step, start._replace(server=server), jnp.arange(rounds))[0]

    def test(clip: float, noise: float, seed: int) -> tuple[float, float]:
        record = evaluate(train(jnp.float32(clip), jnp.float32(noise), jax.random.key(seed)))
        return record["accuracy"]["mean"], record["unseen"]["fax"]["tsmobn"]

    return test


def mean_and_deviation(values: tuple[float, ...]) -> str:
    """Returns mean and deviation over seeds, as the table shows them."""
    values = jnp.asarray(values)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{float(values.mean()):9.1f} ({float(deviation):.1f})"


if __name__ == "__main__":
    main()
