"""Counts floating-point operations of a traced program, from its convolutions and matrix products.

XLA's own count (`cost_analysis`) counts a loop's body once and does not include cuDNN's work.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax

PRODUCTS = ("conv_general_dilated", "dot_general")  # names of operations


def count(jaxpr: Any) -> int:
    """Counts multiplications and additions of convolutions and matrix products, loops unrolled.

    Padding is counted; the zeros that a gradient's dilation puts between values are not. A branch
    counts its most expensive side, and a loop of unknown length one turn.
    """
    return sum(of_equation(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def of_equation(equation: Any) -> int:
    """Returns `count` of one operation."""
    name, params = equation.primitive.name, equation.params
    if name in PRODUCTS:
        outputs = math.prod(equation.outvars[0].aval.shape)
        if name == "dot_general":
            (axes, _), _ = params["dimension_numbers"]
            return 2 * outputs * math.prod(equation.invars[0].aval.shape[axis] for axis in axes)
        dimensions = params["dimension_numbers"].rhs_spec  # output, input, then space
        taps = math.prod(equation.invars[1].aval.shape[axis] for axis in dimensions[1:])
        return 2 * outputs * taps // math.prod(params["lhs_dilation"])
    inner = [count(one) for one in _programs(params.values())]
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _programs(values: Iterable[Any]) -> Iterable[Any]:
    """Yields the programs among an operation's parameters."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _programs(value)
        elif hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value


def products(program: Any) -> Iterator[Any]:
    """Yields the convolutions and matrix products of a program, those of a loop once."""
    for equation in program.eqns:
        if equation.primitive.name in PRODUCTS:
            yield equation
        for inner in _programs(equation.params.values()):
            yield from products(getattr(inner, "jaxpr", inner))


def largest_loop(program: Any) -> Any:
    """Returns the body of the loop without loops inside that has most operations in a turn."""
    return max(_innermost(program), key=lambda body: sum(map(of_equation, body.eqns)))


def _innermost(program: Any) -> Iterator[Any]:
    """Yields the bodies of the loops of known length that contain no other."""
    for equation in program.eqns:
        for inner in _programs(equation.params.values()):
            body = getattr(inner, "jaxpr", inner)
            deeper = list(_innermost(body))
            yield from deeper
            if equation.primitive.name == "scan" and not deeper:
                yield body


def of_function(function: Any, *args: Any) -> int:
    """Returns `count` of a function, traced on arguments (or their shapes)."""
    return count(jax.make_jaxpr(function)(*args))
