"""What each algorithm takes for the convolutions of a network on this CPU; which is chosen.

    python benchmarks/kernels.py                                    # ResNet18, 64x64, batches of 16
    python benchmarks/kernels.py --model DigitCNN --side 28 --batch 32
    python benchmarks/kernels.py --forward --batch 100              # inference alone

Each algorithm runs in a loop, with its gradients unless --forward; all of a layer take turns. Least
CPU milliseconds of a step, on all cores, which neighbours on the machine hardly change, and beside
them the least on the wall.
"""

import argparse
from collections.abc import Callable
from math import prod
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_bn import models
from fedjax_bn.models.cpu import convolution
from fedjax_bn.models.cpu.convolution import ALGORITHMS, UNIT_STRIDES, Shapes, algorithm_of
from interleave import interleave
from machine import announce

STEPS = 4  # of the loop that is timed
_MOST_VALUES = 2**27  # of all windows: more take gigabytes


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
        show(shapes, count, options.repeats, trained=not options.forward)


def layers(options: argparse.Namespace) -> dict[Shapes, int]:
    """The convolutions that have more than one candidate, and how many there are of each."""
    found: dict[Shapes, int] = {}

    def noting(shapes: Shapes) -> str:
        found[shapes] = found.get(shapes, 0) + 1
        return algorithm_of(shapes)

    model = getattr(models, options.model)()
    images = jnp.zeros((options.batch, options.side, options.side, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    with mock.patch.object(convolution, "algorithm_of", noting):
        jax.eval_shape(model.apply, variables, images)
    return {shapes: n for shapes, n in found.items() if len(candidates(shapes)) > 1}


def show(shapes: Shapes, count: int, repeats: int, trained: bool) -> None:
    """Times the candidates of a layer and prints them, the fastest first."""
    names = candidates(shapes)
    runs = {name: timed_loop(name, shapes, trained) for name in names}
    taken = {n: own.per(STEPS / 1e3) for n, own in interleave(runs, repeats).items()}
    walls = {name: list(own.wall) for name, own in taken.items()}
    cpu = {name: float((own.user + own.system).min()) for name, own in taken.items()}
    times = "  ".join(f"{n} {cpu[n]:.1f} ({min(walls[n]):.1f})" for n in sorted(cpu, key=cpu.get))
    images, kernel, strides = ("x".join(map(str, numbers)) for numbers in shapes[:3])
    sides = ",".join(str(side) for pair in shapes.padding for side in pair)
    print(f"{count} x {images}*{kernel}/{strides}+{sides}", flush=True)
    print(f"    {times}; table {names[0]}", flush=True)


def candidates(shapes: Shapes) -> tuple[str, ...]:
    """The algorithms that may be the fastest for a convolution, the table's first."""
    usual = algorithm_of(shapes)
    taps, largest = max(shapes.kernel[:2]), max(*shapes.images[1:3], *shapes.outputs)
    if not shapes.usual or taps == 1:
        return (usual,)
    deep = min(shapes.kernel[2:]) >= 8
    may = {
        usual: True,
        "direct": not shapes.exceeds,
        "fast_fourier": shapes.few_channels,
        "folded": shapes.strides != (1, 1) and shapes.images[3] <= 4,
        "patches": shapes.windows <= _MOST_VALUES,
        "taps": deep and largest <= 16,
        "tiled": deep and taps <= 5,
        "transformed": deep and largest <= 16,
    }
    unit = shapes.strides == (1, 1)
    return tuple(n for n, so in may.items() if so and (unit or n not in UNIT_STRIDES))


def timed_loop(name: str, shapes: Shapes, trained: bool) -> Callable[[], None]:
    """A call of an algorithm's compiled loop of `STEPS` steps, which has run once."""
    algorithm = ALGORITHMS[name]
    random, dtype = np.random.default_rng(0), jnp.float32
    images = jnp.asarray(random.standard_normal((STEPS, *shapes.images)), dtype)
    kernel = jnp.asarray(random.standard_normal(shapes.kernel) / prod(shapes.kernel[:3]), dtype)

    def forward(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return algorithm(x, kernel, shapes.strides, shapes.padding)

    def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not trained:
            return kernel, forward(kernel, x).max((0, 1, 2))
        # No layer needs the gradient of the images themselves, which have few channels.
        wanted = (0,) if shapes.images[3] <= 4 else (0, 1)
        y, pull = jax.vjp(forward, kernel, x)
        pulled = pull(jnp.maximum(y, 0))
        return kernel - 1e-9 * pulled[0], sum(pulled[i].max() for i in wanted)

    loop = jax.jit(lambda kernel, images: lax.scan(step, kernel, images))
    compiled = loop.lower(kernel, images).compile()

    def run() -> None:
        jax.block_until_ready(compiled(kernel, images))

    run()
    return run


if __name__ == "__main__":
    main()
