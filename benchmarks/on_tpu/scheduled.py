"""Reads the text of a program that the TPU's compiler has scheduled (`compiled.as_text()`).

Nearly every instruction of it carries the compiler's estimate of its cycles. Here they are summed
along the call graph: a `while` counts its turns, a `conditional` its larger branch, a fusion
itself alone. XLA's own sum, `cost_analysis`, counts the body of a loop once.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
# Parts of an `op_name` that say how JAX reached an operation, and not which one it is.
WRAPPERS = re.compile(
    r"jit\([^()]*\)/|(?:while/(?:body|cond)|closed_call|checkpoint|shard_map|vmap\(\)|jvp\(\))/"
)
# The type has no word with a parenthesis after a blank, so that the first one is the opcode.
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)")
# An attribute that names computations: one, or several in braces.
CALLS = re.compile(
    r"(body|condition|branch_computations|(?:true|false)_computation|to_apply|calls)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)


class Instruction(NamedTuple):
    """An instruction of a computation."""

    name: str  # its name, which is unique in its computation
    opcode: str  # such as `fusion` or `while`
    shape: str  # the text of its result's type
    operands: tuple[str, ...]  # names of the instructions that it reads
    attributes: str  # the text after the operands


class Program(NamedTuple):
    """A scheduled program: its computations by name, and the name of the one that begins."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """Returns the computations of a program.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            name, shape, opcode, operands, attributes = found.groups()
            read = tuple(re.findall(r"%([\w.\-]+)", operands))
            # The number of a constant is where other instructions have their operands.
            attributes = operands if opcode == "constant" else attributes
            current.append(Instruction(name, opcode, shape, read, attributes))
    if entry is None:
        raise ValueError("this is not the text of a compiled program: it has no line ENTRY")
    return Program(computations, entry)


def cycles(program: Program, computation: str | None = None) -> int:
    """Returns the estimated cycles of the program, or of one call of a computation."""
    return sum(times * _own(one) for times, one in performed(program, computation))


def performed(
    program: Program, computation: str | None = None
) -> Iterator[tuple[int, Instruction]]:
    """Yields every instruction that is performed, with the number of times."""
    for one in program.computations[computation or program.entry]:
        yield 1, one
        for times, called in calls(program, one):
            for inner, instruction in performed(program, called):
                yield times * inner, instruction


def cycles_of_a_step(program: Program, steps: int) -> float | None:
    """Returns the estimated cycles of one local step of all the clients of a device.

    These are the cycles inside the loops over local steps, divided by `steps`: one turn of the loop
    where all clients are mapped at once, K turns where they are mapped one after another. A loop
    over local steps has `steps` turns, and no loops of as many turns within it take more than half
    of its cycles (those would be the loops over steps, in a loop over as many clients).

    Returns:
      The cycles; None if the program has no such loop.
    """

    def inside(computation: str) -> int:
        total = 0
        for one in program.computations[computation]:
            called = calls(program, one)
            deeper = sum(times * inside(name) for times, name in called)
            whole = sum(times * cycles(program, name) for times, name in called)
            looped = one.opcode == "while" and _turns(program, one) == steps
            total += whole if looped and 2 * deeper <= whole else deeper
        return total

    return inside(program.entry) / steps or None


def collectives(program: Program) -> dict[str, tuple[int, int]]:
    """Returns for each kind of collective how often it is performed, and the bytes that it reads.

    The bytes are those of its operands on one device, summed over all times it is performed. An
    asynchronous collective counts where it starts.
    """
    shapes = {one.name: one.shape for body in program.computations.values() for one in body}
    found: dict[str, tuple[int, int]] = {}
    for times, performed_one in performed(program):
        for one in (performed_one, *_fused(program, performed_one)):
            kind = one.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                number, size = found.get(kind, (0, 0))
                read = sum(size_of(shapes[name]) for name in one.operands)
                found[kind] = number + times, size + times * read
    return found


def size_of(shape: str) -> int:
    """Returns the bytes of a type such as `(f32[3,4]{1,0}, pred[2])`, without padding to tiles."""
    bits = 0
    for dtype, sides in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        each = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or "0")[0])
        for side in filter(None, sides.split(",")):
            each *= int(side)
        bits += each
    return bits // 8


def where(program: Program) -> list[tuple[str, int]]:
    """Returns the estimated cycles by the last three parts of `op_name`, the largest first.

    An instruction that the compiler added has no `op_name`: its opcode and name take its place.
    """
    groups: Counter[str] = Counter()
    for times, one in performed(program):
        named = re.search(r'op_name="([^"]*)"', one.attributes)
        parts = WRAPPERS.sub("", named[1]).split("/")[-3:] if named else ()
        added = f"{one.opcode}: {re.sub(r'[.0-9]+$', '', one.name)}"
        groups["/".join(parts) or added] += times * _own(one)
    return [(group, count) for group, count in groups.most_common() if count]


def _own(one: Instruction) -> int:
    """Returns the cycles that an instruction itself is estimated to take; 0 without an estimate."""
    found = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
    return int(found[1]) if found else 0


def calls(program: Program, one: Instruction) -> list[tuple[int, str]]:
    """Returns the computations that an instruction performs, with the number of times."""
    if one.opcode not in ("while", "conditional", "call", "async-start"):
        return []
    names = _named(one)
    if one.opcode == "while":
        turns = _turns(program, one)
        return [(turns, *names["body"]), (turns, *names["condition"])]
    called = [name for found in names.values() for name in found]
    if one.opcode == "conditional":
        return [(1, max(called, key=lambda name: cycles(program, name)))]
    # A call may have the estimate of what it calls itself.
    return [] if _own(one) else [(1, name) for name in called]


def _fused(program: Program, one: Instruction) -> list[Instruction]:
    """Returns the instructions that a fusion consists of."""
    if one.opcode != "fusion":
        return []
    return [inner for name in _named(one)["calls"] for inner in program.computations[name]]


def _named(one: Instruction) -> dict[str, list[str]]:
    """Returns the computations that an instruction names, by attribute."""
    found = CALLS.findall(one.attributes)
    return {key: re.findall(r"[\w.\-]+", names) for key, names in found}


def _turns(program: Program, loop: Instruction) -> int:
    """Returns the number of turns of a loop; 1 if it is not known to the compiler."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    # JAX's loops count from 0 to a constant of the condition.
    (condition,) = _named(loop)["condition"]
    constants = [
        int(one.attributes)
        for one in program.computations[condition]
        if one.opcode == "constant" and one.attributes.isdecimal()
    ]
    return max(constants, default=1)
