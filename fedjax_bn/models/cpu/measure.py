"""What each algorithm takes for a convolution on this CPU, and which is the fastest.

CPUs differ in which of the algorithms is fastest for a shape. Here they are timed when a program is
traced that needs one: each as it stands in a training step, in a loop and with its gradients. Who
calls keeps the result (`fedjax_bn.run.kernels`): a second measurement may choose otherwise, and
another algorithm has other last bits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_bn.dtypes import in_float64
from fedjax_bn.models.cpu.algorithms import ALGORITHMS, UNIT_STRIDES
from fedjax_bn.models.cpu.choice import (
    Shapes,
    by_table,
    exceeds,
    few_channels,
    is_usual,
    windows_of,
)

GAIN = 1.15  # another algorithm is taken where the table's takes so many times as long
STEPS = 4  # of the loop that is timed
_REPEATS, _FEWEST = 9, 5
_SECONDS = 0.5  # after which no further repetition begins
_FAR = 2.5  # what takes so many times the least is left out
_MOST_VALUES = 2**27  # of all windows: more take gigabytes


def fastest(times: Mapping[str, Sequence[float]], usual: str) -> str:
    """The fastest algorithm; the usual one unless another is clearly faster.

    Clearly: by the least times and by the median of the ratios of each repetition the usual one
    takes at least `GAIN` times as long, so that others at work on the machine hardly decide.

    Args:
      times: seconds of the repetitions by name, as `measured` gives them; empty: the usual one.
      usual: the name that the table has.
    """
    if usual not in times:
        return usual
    seconds = {name: np.asarray(own) for name, own in times.items()}

    def gain(name: str) -> float:
        own = seconds[name]
        others = seconds[usual][: len(own)]  # what is far behind was left out early
        return min(float(np.median(others / own)), float(others.min() / own.min()))

    best = max(sorted(seconds), key=gain)
    return best if gain(best) >= GAIN else usual


def candidates(shapes: Shapes) -> tuple[str, ...]:
    """The algorithms that may be the fastest, the table's first; one alone needs no measurement."""
    usual = by_table(shapes)
    taps, largest = max(shapes.kernel[:2]), max(*shapes.images[1:3], *shapes.outputs)
    if not is_usual(shapes) or taps == 1:
        return (usual,)
    deep = min(shapes.kernel[2:]) >= 8
    may = {
        usual: True,
        "direct": not exceeds(shapes),
        "fast_fourier": few_channels(shapes),
        "folded": shapes.strides != (1, 1) and shapes.images[3] <= 4,
        "patches": windows_of(shapes) <= _MOST_VALUES,
        "taps": deep and largest <= 16,
        "tiled": deep and taps <= 5,
        "tiled_small": deep and taps <= 5,
        "transformed": deep and largest <= 16,
    }
    unit = shapes.strides == (1, 1)
    return tuple(n for n, so in may.items() if so and (unit or n not in UNIT_STRIDES))


def measured(shapes: Shapes) -> dict[str, list[float]]:
    """Seconds of each candidate in each repetition; nothing where there is only one.

    It runs in a thread of its own, so that it can be called while a program is traced.
    """
    names = candidates(shapes)
    if len(names) == 1:
        return {}
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, shapes, names).result()


def _measure(shapes: Shapes, names: tuple[str, ...]) -> dict[str, list[float]]:
    with in_float64(shapes.dtype == "float64"):
        runs = {name: timed_loop(name, shapes) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + _SECONDS
    for repeat in range(_REPEATS):
        if repeat >= _FEWEST and time.perf_counter() > end:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - start) / STEPS)
        least = min(min(own) for own in seconds.values())
        near = {name for name, own in seconds.items() if min(own) < _FAR * least}
        runs = {name: run for name, run in runs.items() if name in near | {names[0]}}
    return seconds


def timed_loop(name: str, shapes: Shapes) -> Callable[[], None]:
    """A call of an algorithm's compiled loop of `STEPS` steps, which has run once."""
    algorithm = ALGORITHMS[name]
    random, dtype = np.random.default_rng(0), shapes.dtype
    images = jnp.asarray(random.standard_normal((STEPS, *shapes.images)), dtype)
    kernel = jnp.asarray(random.standard_normal(shapes.kernel) / prod(shapes.kernel[:3]), dtype)

    def forward(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return algorithm(x, kernel, shapes.strides, shapes.padding)

    def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not shapes.trained:
            return kernel, forward(kernel, x).max((0, 1, 2))
        # Nobody asks for the gradient of the images themselves, which have few channels.
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
