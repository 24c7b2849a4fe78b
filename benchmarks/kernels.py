"""What each algorithm takes for the convolutions of a network on this CPU; which is chosen.

    python benchmarks/kernels.py                                    # ResNet18, 64x64, batches of 16
    python benchmarks/kernels.py --model DigitCNN --side 28 --batch 32
    python benchmarks/kernels.py --forward --batch 100              # inference alone

Each algorithm runs in a loop, with its gradients unless --forward; all of a layer take turns. Least
CPU milliseconds of a step, on all cores, which neighbours on the machine hardly change, and beside
them the least on the wall. "measured" is what `cpu_kernels=measured` would choose by the wall.
"""

import argparse
from contextlib import ExitStack

import jax
import jax.numpy as jnp

from fedjax_bn import models
from fedjax_bn.models.cpu import measure
from fedjax_bn.models.cpu.choice import Shapes, by_table, choosing, forward_only
from interleave import interleave
from machine import announce


def main() -> None:
    """Prints a line for each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="ResNet18", choices=models.__all__, help="default %(default)s")
    add("--side", type=int, default=64, help="of the images; default %(default)s")
    add("--batch", type=int, default=16, help="samples of a step; default %(default)s")
    add("--repeats", type=int, default=9, help="default %(default)s")
    add("--forward", action="store_true", help="without gradients")
    options = parser.parse_args()
    announce(
        f"{options.model} {options.side}x{options.side}, batches of {options.batch}: CPU ms of "
        "each algorithm (ms on the wall)"
    )
    for shapes, count in layers(options).items():
        show(shapes, count, options.repeats)


def layers(options: argparse.Namespace) -> dict[Shapes, int]:
    """The convolutions that have more than one candidate, and how many there are of each."""
    found: dict[Shapes, int] = {}

    def rule(shapes: Shapes) -> str:
        found[shapes] = found.get(shapes, 0) + 1
        return by_table(shapes)

    model = getattr(models, options.model)()
    images = jnp.zeros((options.batch, options.side, options.side, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    with ExitStack() as stack:
        stack.enter_context(choosing(rule))
        if options.forward:
            stack.enter_context(forward_only())
        jax.eval_shape(model.apply, variables, images)
    return {shapes: n for shapes, n in found.items() if len(measure.candidates(shapes)) > 1}


def show(shapes: Shapes, count: int, repeats: int) -> None:
    """Times the candidates of a layer and prints them, the fastest first."""
    names = measure.candidates(shapes)
    runs = {name: measure.timed_loop(name, shapes) for name in names}
    taken = {n: own.per(measure.STEPS / 1e3) for n, own in interleave(runs, repeats).items()}
    walls = {name: list(own.wall) for name, own in taken.items()}
    cpu = {name: float((own.user + own.system).min()) for name, own in taken.items()}
    times = "  ".join(f"{n} {cpu[n]:.1f} ({min(walls[n]):.1f})" for n in sorted(cpu, key=cpu.get))
    chosen = measure.fastest(walls, names[0])
    print(f"{count} x {shapes}\n    {times}; table {names[0]}, measured {chosen}", flush=True)


if __name__ == "__main__":
    main()
