"""What privacy costs in accuracy: FedBN on the quickstart's scanners, by noise and clients.

    python benchmarks/privacy.py

Each scanner's 180 training images belong to one client, or to 16 of some eleven images each, or to
100 that draw ten of them each; a network of 38,000 shared numbers is trained. Rows are the noise
multiplier z, with the epsilon that follows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from fedjax_bn.accounting import epsilon
from fedjax_bn.data.drawing import drawing
from fedjax_bn.federation import FederatedState
from fedjax_bn.methods import fedbn
from fedjax_bn.privacy import Privacy
from fedjax_bn.run.config_file import read
from fedjax_bn.run.evaluate import evaluator
from fedjax_bn.run.experiment import build, sample_input

ROUNDS = flags.DEFINE_integer("rounds", 40, "rounds of training")
SEEDS = flags.DEFINE_integer("seeds", 3, "seeds 0, 1, ...")
CLIP = flags.DEFINE_float("clip", 1.0, "norm to which an update is clipped")
NOISE = flags.DEFINE_list("noise", ["0.01", "0.1", "0.5", "1", "2"], "noise multipliers")
EACH = flags.DEFINE_list("each", ["1", "16", "100"], "clients of a scanner")
EPOCHS, RATE, DELTA = 5, 0.1, 1e-5
WITHOUT = 1e9  # no update is as long


def main(argv: list[str]) -> None:
    """Prints a table."""
    del argv
    print("clients  clip  noise  epsilon   clients' mean %   fax [tsmobn] %")
    settings = [(WITHOUT, 0.0), (CLIP.value, 0.0)]
    settings += [(CLIP.value, float(noise)) for noise in NOISE.value]
    for each in EACH.value:
        test = tester(int(each))
        for clip, noise in settings:
            found = [test(clip, noise, seed) for seed in range(SEEDS.value)]
            inside, outside = (mean_and_deviation(column) for column in zip(*found, strict=True))
            spent = f"{epsilon(noise, ROUNDS.value, DELTA):.3g}" if noise else "none"
            shown = "none" if clip == WITHOUT else f"{clip:g}"
            head = f"{5 * int(each):7}  {shown:>4}  {noise:5g}  {spent:>7}"
            print(f"{head}   {inside}   {outside}", flush=True)


def tester(each: int) -> Callable[[float, float, int], tuple[float, float]]:
    """Returns `test(clip, noise, seed)` -> accuracy of the clients and of the unseen scanner."""
    changes = {"model": "MLP", "data.clients_per_domain": str(each), "adaptations": "tsmobn"}
    if each > 16:  # more than there are images of a class
        changes["data.partition"] = "drawn:10"
    config = read("quickstart", list(changes.items()))
    built = build(config)
    arrays = [domain.train[:2] for domain in built.internal.domains]
    draw = drawing(arrays, local_epochs=EPOCHS)
    evaluate = evaluator(config, built)
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

        return jax.lax.scan(step, start._replace(server=server), jnp.arange(ROUNDS.value))[0]

    def test(clip: float, noise: float, seed: int) -> tuple[float, float]:
        record = evaluate(train(jnp.float32(clip), jnp.float32(noise), jax.random.key(seed)))
        return record["accuracy"]["mean"], record["unseen"]["fax"]["tsmobn"]

    return test


def mean_and_deviation(values: tuple[float, ...]) -> str:
    """Over seeds."""
    values = jnp.asarray(values)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{float(values.mean()):9.1f} ({float(deviation):.1f})"


if __name__ == "__main__":
    app.run(main)
