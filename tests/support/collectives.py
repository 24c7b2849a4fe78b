"""What devices exchange, read from the text of a compiled program."""

import re

import numpy as np

_EXCHANGE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def collectives(text: str) -> list[tuple[str, int]]:
    """Kind and numbers on a device of every exchange, such as ("all-reduce", 11)."""
    return [(kind, _numbers(form)) for form, kind in _EXCHANGE.findall(text)]


def _numbers(form: str) -> int:
    """How many numbers the shapes in a text have, such as 11 for (f32[], f32[2,5]{1,0})."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", form)
    return sum(int(np.prod([int(side) for side in shape.split(",") if side])) for shape in shapes)
