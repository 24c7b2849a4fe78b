"""Chooses how many clients a TPU trains at once, from a traced program of one client.

The rule follows `benchmarks/README.md` ("Compiled for a TPU"), so it rests on the compiler's
estimates. Clients together fill the vector registers better than one. But if what they train no
longer fits into a core's fast memory, every step reads and writes it in the main memory, which
costs more: a network with large dense layers is cheaper client by client.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

_FAST = 2**27  # bytes of a core's fast memory; half of it is left to maps and gradients
_MAPS = 2**33  # bytes of the main memory that maps may take, half of the smallest chip's


class _Loop(NamedTuple):
    """A loop of a program, in bytes: what it carries, and the results of its products."""

    carried: int
    products: int


def at_once(program: Any, num_clients: int) -> int:
    """Returns how many of the clients to train at once, at least 1 and at most `num_clients`.

    A number that divides the clients is preferred, because a remainder is compiled a second time.

    Args:
      program: the jaxpr of one client's training; its loop over local steps is the one with the
        largest results of convolutions and matrix products.
      num_clients: the number of clients that a device trains.
    """
    steps = max(_loops(program), key=lambda loop: loop.products, default=_Loop(0, 0))
    most = min(_FAST // 2 // max(steps.carried, 1), _MAPS // max(steps.products, 1))
    most = max(1, min(most, num_clients))
    even = max(n for n in range(1, most + 1) if num_clients % n == 0)
    return even if 2 * even > most else most


def _loops(program: Any) -> Iterator[_Loop]:
    """Yields all scans of a program, at any depth."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr
            first = equation.params["num_consts"]
            carry = body.invars[first : first + equation.params["num_carry"]]
            yield _Loop(sum(map(_bytes, carry)), _products(body))
        for inner in _inside(equation):
            yield from _loops(inner)


def _products(program: Any) -> int:
    """Returns the bytes of the results of all convolutions and matrix products of a program."""
    total = 0
    for equation in program.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            total += sum(map(_bytes, equation.outvars))
        total += sum(map(_products, _inside(equation)))
    return total


def _inside(equation: Any) -> Iterator[Any]:
    """Yields the programs in an operation's parameters, such as the body of a loop."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            program = getattr(one, "jaxpr", one)
            if hasattr(program, "eqns"):
                yield program


def _bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
