"""Reads the text of a program that XLA has compiled for a GPU (`compiled.as_text()`).

Each instruction that is not free launches one kernel, which reads its arguments from the device's
memory and writes its results there once. What a kernel only slices counts as the slice, and what it
updates in place as the update. So bytes and kernels follow from the text alone, without a GPU.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from on_tpu.scheduled import Instruction, Program, calls, parse, size_of

# They move names, not bytes, or stand for the computations that they perform.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("while", "call", "conditional", "async-start", "async-done", "copy-done"),
}
# A fusion of nothing else makes a copy, in another dtype or layout at most.
COPIES = {
    *("parameter", "constant", "tuple", "bitcast", "copy", "transpose", "convert", "slice"),
    "concatenate",
}
SMALL = 2**15  # bytes up to which a kernel of a normalization works on channels, not on maps


class Kernel(NamedTuple):
    """A kernel, and what it moves and computes in one launch."""

    name: str
    kind: str
    size: int  # bytes read and written
    flops: int  # of convolutions and matrix products
    half: bool  # whether they are in bfloat16


class Round(NamedTuple):
    """The kernels of a round."""

    step: list[Kernel]  # of one turn of the loop over local steps
    steps: int  # turns of that loop in a round, over all clients
    of_a_client: int  # launches beside the steps in a turn of the loop around them; 0 without one
    launches: int  # of the round


def read(text: str) -> Round:
    """Returns the kernels of a program; its step is the loop's body with most products."""
    program = parse(text)
    holders = {}  # the body of a loop -> the computation that has the loop
    for name, instructions in program.computations.items():
        for loop in instructions:
            if loop.opcode == "while":
                (_, body), (_, condition) = calls(program, loop)
                holders[body] = name
                if "known_trip_count" in loop.attributes:  # then nothing asks the condition
                    program.computations[condition] = []
    times = Counter[str]()
    for name, count in turns(program, program.entry):
        times[name] += count
    kernels = {name: list(kernels_of(program, name)) for name in times}
    loops = times.keys() & holders.keys()
    body = max(loops, key=lambda name: sum(kernel.flops > 0 for kernel in kernels[name]))
    step = [kernel for name, count in turns(program, body) for kernel in count * kernels[name]]

    def launches(computation: str) -> int:
        return sum(count * len(kernels[name]) for name, count in turns(program, computation))

    holder, of_a_client = holders[body], 0
    if holder in loops:
        of_a_client = launches(holder) - times[body] // times[holder] * len(step)
    return Round(step, times[body], of_a_client, launches(program.entry))


def turns(program: Program, computation: str, times: int = 1) -> Iterator[tuple[str, int]]:
    """Yields the computations that one performs, itself first, and how often."""
    yield computation, times
    for instruction in program.computations[computation]:
        for count, name in calls(program, instruction):
            yield from turns(program, name, times * count)


def kernels_of(program: Program, computation: str) -> Iterator[Kernel]:
    """Yields the kernels of a computation, in order."""
    instructions = program.computations[computation]
    by_name = {instruction.name: instruction for instruction in instructions}
    readers = {}
    for instruction in reversed(instructions):
        readers |= dict.fromkeys(instruction.operands, instruction)
    for instruction in instructions:
        if instruction.opcode in FREE:
            continue
        parts = parts_of(program, instruction, by_name)
        size, flops = traffic(parts), sum(operations(part, parts) for part in parts.values())
        half = any(part.shape.startswith("bf16") for part in parts.values())
        kind = "copies"
        if not {part.opcode for part in parts.values()} <= COPIES:
            user, inside = instruction, parts
            while not _names(user, inside) and user.name in readers:  # it serves its reader
                user = readers[user.name]
                inside = parts_of(program, user, by_name)
            kind = kind_of(user, inside, size)
        yield Kernel(instruction.name, kind, size, flops, half)


def parts_of(
    program: Program, instruction: Instruction, by_name: dict[str, Instruction]
) -> dict[str, Instruction]:
    """Returns what a kernel consists of by name: parameters, operations, at last the result."""
    if instruction.opcode == "fusion":
        (fused,) = re.findall(r"calls=%?([\w.\-]+)", instruction.attributes)
        return {part.name: part for part in program.computations[fused]}
    arguments = [
        Instruction(name, "parameter", by_name[name].shape, (), "") for name in instruction.operands
    ]
    return {part.name: part for part in (*arguments, instruction)}


def traffic(parts: dict[str, Instruction]) -> int:
    """Returns the bytes that a kernel reads and writes."""

    def size(name: str) -> int:
        return size_of(parts[name].shape)

    def received(name: str) -> int:
        """Returns the bytes that are read of a value."""
        total = 0
        for part in parts.values():
            if name not in part.operands:
                continue
            opcode = part.opcode if part.operands[0] == name else "another"
            if opcode == "bitcast":
                total += received(part.name)
            elif opcode in ("slice", "dynamic-slice", "gather"):
                total += size(part.name)
            elif opcode == "scatter":
                total += size(part.operands[-1])  # an atomic update reads and writes
            elif opcode != "dynamic-update-slice":
                total += size(name)
        return min(total, size(name))

    def written(name: str) -> int:
        """Returns the bytes that are written of a result."""
        source = parts[name]
        while source.opcode in ("bitcast", "copy"):
            source = parts[source.operands[0]]
        if source.opcode == "dynamic-update-slice":
            return size(source.operands[1])
        return size(source.operands[-1] if source.opcode == "scatter" else name)

    *_, root = parts.values()
    results = root.operands if root.opcode == "tuple" else (root.name,)
    parameters = [name for name, part in parts.items() if part.opcode == "parameter"]
    return sum(map(received, parameters)) + sum(map(written, results))


def operations(product: Instruction, parts: dict[str, Instruction]) -> int:
    """Returns the floating-point operations of a convolution or matrix product, 0 of all else."""
    contracted = re.search(r'lhs_contracting_dim\w*"?[=:][\[{]([\d",]*)', product.attributes)
    labels = re.search(r"dim_labels=\w+?_(\w+)->", product.attributes)
    if not (contracted or labels):
        return 0
    outputs, left, right = (_sides(parts[name]) for name in (product.name, *product.operands[:2]))
    if contracted:
        axes = map(int, re.findall(r"\d+", contracted[1]))
        return 2 * math.prod(outputs) * math.prod(left[axis] for axis in axes)
    if "BackwardInput" in product.attributes:
        outputs = left
    elif "BackwardFilter" in product.attributes:
        outputs, right = right, outputs
    return 2 * math.prod(outputs) * math.prod(right) // right[labels[1].index("o")]


def kind_of(instruction: Instruction, parts: dict[str, Instruction], size: int) -> str:
    """Returns the kind of a kernel of so many bytes, as names of JAX's operations tell it."""
    names, opcodes = _names(instruction, parts), {part.opcode for part in parts.values()}
    name = names[-1] if names else ""
    backward, in_gradient = "transpose(" in name, "jvp(" in name
    (target,) = re.findall(r'custom_call_target="([^"]*)"', instruction.attributes) or [""]
    if "convolution" in opcodes or "conv" in target:
        if "Backward" in target:
            return f"convolutions, to {'inputs' if 'Input' in target else 'filters'}"
        # the gradients are to inputs of 1x1 filters, and to filters under vmap
        return f"convolutions, {'gradients as forward ones' if backward else 'forward'}"
    if "dot" in opcodes or "gemm" in target:
        return "dense products"
    if not in_gradient and re.search("is_?finite|reduce_and", name):
        return "finite checks"
    if not in_gradient and re.search(r"select_n$|/(add|mul|sub)$", name):
        return "optimizer and selection"
    pools = re.findall("reduce_window|select_and_scatter|max_pool", " ".join(names))
    if "reduce-window" in opcodes and "op_name" not in instruction.attributes:
        pools.append("select_and_scatter")  # which the compiler makes of it, without a name
    if pools:
        return "pooling, gradient" if backward or "select_and_scatter" in pools else "pooling"
    if "norm" in name and ("reduce" in opcodes or size <= SMALL or name.endswith("select_n")):
        return "batch norm backward, sums" if backward else "batch norm statistics"
    if not backward and re.search("norm|relu|silu", name):
        return "normalize and ReLU"
    if "norm" in name:
        return "batch norm backward, by element"
    return "ReLU and residuals, backward" if backward and size > SMALL else "other"


def _names(instruction: Instruction, parts: dict[str, Instruction]) -> list[str]:
    """Returns the names of JAX's operations in a kernel, at last its own if it has one."""
    attributes = [part.attributes for part in (*parts.values(), instruction)]
    return [name for text in attributes for name in re.findall(r'op_name="([^"]*)"', text)]


def _sides(instruction: Instruction) -> list[int]:
    """Returns the lengths of the axes of a result, or of its first array."""
    return [
        int(side) for side in re.search(r"\[([\d,]*)\]", instruction.shape)[1].split(",") if side
    ]
