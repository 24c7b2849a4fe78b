"""Measures what a step would cost without each of the algorithms for convolutions on this CPU.

    python benchmarks/kernels.py                              # all cases, a quarter of an hour
    python benchmarks/kernels.py --only ResNet18 --layers     # and each algorithm, layer by layer
    python benchmarks/kernels.py --only DigitCNN --forward    # inference alone

The cases are the networks of `method_costs` in rounds of FedAvg, at its sizes; YOLOv5n; and L2D's
stylist on images of ResNet18's size in rounds of L2D. Each algorithm that can compute a layer runs
in a loop, with its gradients unless --forward is given; the algorithms of a layer take turns. A row
has the CPU milliseconds of a step of the whole round. Then, for each algorithm, it has the
milliseconds that its layers would take more by the next best one, and their share of the step. An
algorithm is worth its code if the largest share is a tenth or more. Times are the least CPU
milliseconds on all cores, which other programs on the machine hardly change.

The table has the times of a forward and backward pass in a `scan`, in float32 with jax 0.10.2; the
column of PyTorch 2.13 is in channels_last. Before the slash are ms on two shared AVX-512 cores, the
median of 9 alternating runs. After it are CPU ms, summed over two slower cores (AMD EPYC of family
25, model 17), the least of 9 runs. * marks the algorithm chosen:

    layer (kernel, images)             direct   patches    taps      tiled  transformed PyTorch
    5x5       3 ->  64, 32 x 28 x 28  5.8/7.3  5.2/11.6*      -          -        -         3.7
    5x5      64 ->  64, 32 x 14 x 14  27/41      35/87        -    16.5/24   9.3/15.4*     10.9
    5x5      64 -> 128, 32 x  7 x  7  11/22     9.8/28        -     5.5/9.5   4.9/7.0*      6.1
    7x7 / 2   3 ->  64, 16 x 64 x 64  5.5/8.8*  4.7/16.7      -          -        -         3.8
    3x3      64 ->  64, 16 x 16 x 16  7.8/10.2  6.7/16.1    /18.3   4.6/6.9*  6.1/10.2      4.8
    3x3     256 -> 256, 16 x  4 x  4  6.4/11.6  3.5/11.9    /9.3*   5.4/8.8   6.5/11.2      5.0
    3x3     512 -> 512, 16 x  2 x  2  288/      5.3/16.4   /11.8*  21.6/49.9     /28.5     11.0
    3x3     512 -> 512, 64 x  2 x  2  1098/    14.7/46.4   /23.6*  46.1/105                25.2
    3x3 / 2 256 -> 512, 16 x  4 x  4  68.5/     2.2/8.3     /8.0*        -        -         6.1
    3x3 / 2  16 ->  32, 4 x 160 x 160     /13.6*   /29.3    /36.3        -        -        /11.4
    3x3      32 ->  32, 4 x  40 x  40      /4.1*    /9.0     /9.7     /6.6        -         /4.5
    3x3      16 ->  16, 4 x  80 x  80      /8.3    /17.2    /23.7        -        -         /4.5
    6x6 / 2   3 ->  16, 4 x 320 x 320     /46.5    /40.2        -        -        -         /9.0

The last two take /6.2 by pairs of columns and /19.7 with folded strides, which are chosen. The
6x6 layer has no gradient of its images.
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
from fedjax_bn.contrib.l2d import draw_stylist, stylize
from fedjax_bn.models.cpu import convolution
from fedjax_bn.models.cpu.convolution import ALGORITHMS, UNIT_STRIDES, Shapes, algorithm_of
from interleave import interleave
from machine import announce
from method_costs import CLIENTS, SHARE, SIZES, Size, compiled_round, least_cpu, make_batches
from round_time import our_round
from tasks import YOLO

STEPS = 4  # turns of the loop that is timed
ENOUGH = 0.1  # share of a step that makes an algorithm worth its code
CASES = SIZES | {"YOLOv5n": Size(320, 4, 2), "L2D": SIZES["ResNet18"]}
_MOST_VALUES = 2**27  # numbers in all windows; more would take gigabytes


def main() -> None:
    """Prints a row for each case, and whether each algorithm is worth its code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="*", default=list(CASES), choices=CASES, help="cases; default: all")
    for name in Size._fields:
        add(f"--{name}", type=int, help="default: the case's own")
    add("--repeats", type=int, default=9, help="default %(default)s")
    add("--layers", action="store_true", help="show each algorithm's time for each layer")
    add("--forward", action="store_true", help="without gradients, and without a round's share")
    options = parser.parse_args()
    announce("CPU ms of a step, and how many more it would take without each algorithm (share)")
    print("| case | a step | " + " | ".join(ALGORITHMS) + " |")
    print("|---|" + "---:|" * (1 + len(ALGORITHMS)), flush=True)
    largest: dict[str, tuple[float, str]] = {}  # name -> (share, case)
    for case in options.only:
        sizes = (getattr(options, name) or getattr(CASES[case], name) for name in Size._fields)
        gains, step = measure(case, Size(*sizes), options)
        cells = dict.fromkeys(ALGORITHMS, "")
        for name, gain in gains.items():
            cells[name] = f"{gain:.1f}"
            if step:
                cells[name] += f" ({gain / step:.0%})"
                largest[name] = max(largest.get(name, (-1.0, "")), (gain / step, case))
        print(f"| {case} | {step:.1f} | " + " | ".join(cells.values()) + " |", flush=True)
    for name, (share, case) in largest.items():
        verdict = "" if share >= ENOUGH else f", less than {ENOUGH:.0%} in each case above"
        print(f"{name} saves at most {share:.0%} of a step, in {case}{verdict}")


def measure(case: str, size: Size, options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Returns what each algorithm saves in a step, and the step itself, in CPU ms."""
    gains: dict[str, float] = {}
    for shapes, count in layers(case, size).items():
        names = candidates(shapes)
        runs = {name: timed_loop(name, shapes, not options.forward) for name in names}
        taken = interleave(runs, options.repeats)
        cpu = {name: 1e3 * least_cpu(own.per(STEPS)) for name, own in taken.items()}
        chosen, next_best = cpu.pop(names[0]), min(cpu.values())
        gains[names[0]] = gains.get(names[0], 0.0) + count * (next_best - chosen)
        if options.layers:
            times = [f"{names[0]} {chosen:.1f} (chosen)"]
            times += [f"{name} {cpu[name]:.1f}" for name in sorted(cpu, key=cpu.get)]
            (_, high, wide, inputs), (r, s, _, outputs) = shapes.images, shapes.kernel
            stride = f", stride {shapes.strides[0]}" * (shapes.strides != (1, 1))
            layer = f"{r}x{s}, {inputs} to {outputs} channels on {high}x{wide}{stride}"
            print(f"{case}, {count} x {layer}: {'; '.join(times)}", flush=True)
    if options.forward:
        return gains, 0.0
    if case == "YOLOv5n":
        # two clients with the same number of steps
        run, _ = our_round(YOLO._replace(side=size.side), mesh=None)
    else:
        method, network = ("l2d", "ResNet18") if case == "L2D" else ("fedavg", case)
        run, _ = compiled_round(method, network, make_batches(size))
    taken = interleave({"round": run}, options.repeats)["round"]
    return gains, 1e3 * least_cpu(taken.per(CLIENTS * size.steps))


def layers(case: str, size: Size) -> dict[Shapes, int]:
    """Returns the convolutions with several candidates, and how often each occurs in a pass."""
    found: dict[Shapes, int] = {}

    def noting(shapes: Shapes, few: bool = False) -> str:
        found[shapes] = found.get(shapes, 0) + 1
        return algorithm_of(shapes, few)

    images, key = jnp.zeros((size.batch, size.side, size.side, 3)), jax.random.key(0)
    # traces only shapes and computes nothing
    with mock.patch.object(convolution, "algorithm_of", noting):
        if case == "L2D":
            given = draw_stylist(key, 3, jnp.float32), images
            jax.eval_shape(lambda layers, images: stylize(layers, images, SHARE, key), *given)
        else:
            model = getattr(models, case)(10)
            variables = jax.eval_shape(model.init, key, images)
            found.clear()
            jax.eval_shape(model.apply, variables, images)
    return {shapes: n for shapes, n in found.items() if len(candidates(shapes)) > 1}


def candidates(shapes: Shapes) -> tuple[str, ...]:
    """Returns the algorithms that may be the fastest for a convolution, the chosen one first."""
    chosen = algorithm_of(shapes)
    taps, largest = max(shapes.kernel[:2]), max(*shapes.images[1:3], *shapes.outputs)
    if taps == 1:
        return (chosen,)
    deep = min(shapes.kernel[2:]) >= 8
    may = {
        chosen: True,
        "direct": taps <= largest,
        "fast_fourier": prod(shapes.kernel[2:]) <= 16,
        "folded": max(shapes.strides) > 1 and shapes.images[3] <= 4,
        "pairs": shapes.kernel[2:] == (16, 16),
        "patches": shapes.windows <= _MOST_VALUES,
        "taps": deep and largest <= 16,
        "tiled": deep and taps <= 5,
        "transformed": deep and largest <= 16,
    }
    unit = shapes.strides == (1, 1)
    return tuple(n for n, so in may.items() if so and (unit or n not in UNIT_STRIDES))


def timed_loop(name: str, shapes: Shapes, trained: bool) -> Callable[[], None]:
    """Returns a call of an algorithm's compiled loop of `STEPS` steps, which has run once."""
    algorithm = ALGORITHMS[name]
    random, dtype = np.random.default_rng(0), jnp.float32
    images = jnp.asarray(random.standard_normal((STEPS, *shapes.images)), dtype)
    kernel = jnp.asarray(random.standard_normal(shapes.kernel) / prod(shapes.kernel[:3]), dtype)

    def forward(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return algorithm(x, kernel, shapes.strides, shapes.padding)

    def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not trained:
            return kernel, forward(kernel, x).max((0, 1, 2))
        # A network's first layer, with few channels, needs no gradient of its input images.
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
