"""Chooses how many clients a TPU or a GPU trains at once, from a traced program of one client.

The rule for a TPU rests on the compiler's estimates (`benchmarks/README.md`, "Compiled for a TPU").
Clients together fill the vector registers better than one. But if what they train no longer fits
into a core's fast memory, every step reads and writes it in the main memory, which costs more. Nor
do clients gain from each other if the maps of one are large.

The rule for a GPU rests on times of an H200 ("On an accelerator"). Clients together start fewer
kernels, but their convolutions become grouped ones, which are slow for large maps and in 16 bits:
DigitCNN in float32 takes 0.7 to 0.8 of the time, but ResNet18 at 224 pixels 4.8 times as long, and
46 times in bfloat16.
"""

import math
from collections.abc import Iterator
from typing import Any

from fedjax_bn.engine.backend import on_tpu

_FAST = 2**27  # bytes of a core's fast memory; half of it is left to maps and gradients
_MAPS = 3 * 2**29  # bytes of a step's maps up to which clients together cost less on a TPU
_ROOM = 2**33  # bytes of a GPU's memory that a step's maps may take
_SMALL = 2**25  # bytes of a step's convolutions; DigitCNN's are 22 MB with batches of 64


def clients_at_once(program: Any, num_clients: int) -> int:
    """Returns how many of the clients of a device it trains at once, 1 to `num_clients`.

    `program` is the jaxpr of one client's training; its loop over local steps is the one with the
    largest results of convolutions and matrix products.
    """
    carried, products = max(_loops(program), key=lambda loop: loop[1], default=(0, 0))
    if on_tpu():
        most_clients = min(_FAST // 2 // max(carried, 1), _MAPS // max(products, 1))
    else:
        maps = [variable.aval for variable in _results(program, ("conv_general_dilated",))]
        if sum(map(_bytes, maps)) > _SMALL or any(x.dtype.itemsize < 4 for x in maps):
            return 1
        most_clients = _ROOM // max(products, 1)
    most_clients = max(1, min(most_clients, num_clients))
    # A number that divides the clients is preferred: a remainder is compiled a second time.
    even = max(n for n in range(1, most_clients + 1) if num_clients % n == 0)
    return even if 2 * even > most_clients else most_clients


def _loops(program: Any) -> Iterator[tuple[int, int]]:
    """Yields what each scan carries and the results of its products, in bytes, at any depth."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr
            start = equation.params["num_consts"]
            carry = body.invars[start : start + equation.params["num_carry"]]
            results = _results(body, ("conv_general_dilated", "dot_general"))
            yield sum(_bytes(x.aval) for x in carry), sum(_bytes(x.aval) for x in results)
        for inner in _inside(equation):
            yield from _loops(inner)


def _results(program: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Yields what the operations of these names return, at any depth."""
    for equation in program.eqns:
        if equation.primitive.name in names:
            yield from equation.outvars
        for inner in _inside(equation):
            yield from _results(inner, names)


def _inside(equation: Any) -> Iterator[Any]:
    """Yields the programs in an operation's parameters, such as the body of a loop."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            program = getattr(part, "jaxpr", part)
            if hasattr(program, "eqns"):
                yield program


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
