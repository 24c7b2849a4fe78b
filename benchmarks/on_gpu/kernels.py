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
    *("while", "call", "conditional", "async-start", "async-done", "async-update", "copy-done"),
    *("add-dependency", "partition-id", "replica-id", "all-reduce-done", "all-gather-done"),
}
# A fusion of nothing else makes a copy, in another dtype or layout at most.
COPIES = {
    *("parameter", "constant", "tuple", "bitcast", "copy", "transpose", "convert", "slice"),
    *("reshape", "concatenate", "copy-start"),
}
SLICES = ("slice", "dynamic-slice", "gather")
SMALL = 2**15  # bytes up to which a kernel of a normalization works on channels, not on maps
# XLA's kinds of cuDNN's convolutions by the part of their names.
CONVOLUTIONS = {
    "BackwardInput": "convolutions, to inputs",
    "BackwardFilter": "convolutions, to filters",
    "Forward": "convolutions, forward",
}


class Kernel(NamedTuple):
    """A kernel: what it does, and what it moves and computes in one launch."""

    name: str
    kind: str
    read: int  # bytes
    written: int  # bytes
    flops: int  # of convolutions and matrix products
    half: bool  # whether it has an argument in bfloat16

    def seconds(self, bandwidth: float, peaks: tuple[float, float], share: float = 0.6) -> float:
        """Returns a roofline's time, from bytes/s and flop/s in bfloat16 and TF32, at a share."""
        peak = peaks[0] if self.half else peaks[1]
        return max((self.read + self.written) / bandwidth, self.flops / (share * peak))


class Round(NamedTuple):
    """The kernels of a round."""

    step: list[Kernel]  # of one turn of the loop over local steps
    steps: int  # turns of that loop in a round, over all clients
    of_a_client: int  # launches beside the steps in a turn of the loop around them; 0 without one
    launches: int  # of the round

    @property
    def outside(self) -> int:
        """Returns the launches of the round beside those of the steps."""
        return self.launches - self.steps * len(self.step)


def read(text: str) -> Round:
    """Returns the kernels of a program; its step is the loop's body with most products."""
    program = parse(text)
    holders = {}  # the body of a loop -> the computation that has the loop
    for name, instructions in program.computations.items():
        for instruction in instructions:
            if instruction.opcode == "while":
                (_, body), (_, condition) = calls(program, instruction)
                holders[body] = name
                if "known_trip_count" in instruction.attributes:  # then nothing asks the condition
                    program.computations[condition] = []
    times = Counter[str]()
    for name, count in turns(program, program.entry):
        times[name] += count
    kernels = {name: list(kernels_of(program, name)) for name in times}
    loops = times.keys() & holders.keys()
    step = max(loops, key=lambda name: sum(kernel.flops > 0 for kernel in kernels[name]))
    of_step = [kernel for name, n in turns(program, step) for kernel in n * kernels[name]]
    holder, of_a_client = holders[step], 0
    if holder in loops:
        steps = times[step] // times[holder]
        of_a_client = launches(program, holder) - steps * len(of_step)
    return Round(of_step, times[step], of_a_client, launches(program, program.entry))


def turns(program: Program, computation: str, times: int = 1) -> Iterator[tuple[str, int]]:
    """Yields the computations that one performs, itself first, and how often."""
    yield computation, times
    for instruction in program.computations[computation]:
        for count, name in calls(program, instruction, launches):
            yield from turns(program, name, times * count)


def launches(program: Program, computation: str) -> int:
    """Returns the kernels that one call of a computation launches."""
    return sum(
        times * sum(instruction.opcode not in FREE for instruction in program.computations[name])
        for name, times in turns(program, computation)
    )


def kernels_of(program: Program, computation: str) -> Iterator[Kernel]:
    """Yields the kernels of a computation, in order."""
    instructions = program.computations[computation]
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    readers: dict[str, Instruction] = {}
    for instruction in reversed(instructions):
        readers.update(dict.fromkeys(instruction.operands, instruction))
    for instruction in instructions:
        if instruction.opcode in FREE:
            continue
        inside = fused(program, instruction, shapes)
        received, written = traffic(inside)
        flops = sum(operations(part, shapes_of(inside)) for part in inside)
        half = any(part.shape.startswith("bf16") for part in inside)
        kind = "copies"
        if not {part.opcode for part in inside} <= COPIES:
            user = instruction
            while (
                not _name(user) and user.name in readers
            ):  # the compiler's own serve their readers
                user = readers[user.name]
            user = user if _name(user) else instruction
            kind = kind_of(user, fused(program, user, shapes), received + written)
        yield Kernel(instruction.name, kind, received, written, flops, half)


def fused(program: Program, instruction: Instruction, shapes: dict[str, str]) -> list[Instruction]:
    """Returns what a kernel consists of: its parameters, what it computes, at last its result."""
    if instruction.opcode == "fusion":
        return program.computations[re.search(r"calls=%?([\w.\-]+)", instruction.attributes)[1]]
    arguments = [
        Instruction(name, "parameter", shapes[name], (), "")
        for name in dict.fromkeys(instruction.operands)
    ]
    return [*arguments, instruction]


def shapes_of(inside: list[Instruction]) -> dict[str, str]:
    """Returns the types of instructions by name."""
    return {instruction.name: instruction.shape for instruction in inside}


def traffic(inside: list[Instruction]) -> tuple[int, int]:
    """Returns the bytes that a kernel reads and writes."""
    by_name = {instruction.name: instruction for instruction in inside}

    def size(name: str) -> int:
        return size_of(by_name[name].shape)

    def received(name: str) -> int:
        """Returns the bytes that are read of a value."""
        total = 0
        for instruction in inside:
            if name not in instruction.operands:
                continue
            opcode = instruction.opcode if instruction.operands[0] == name else "another"
            if opcode == "bitcast":
                total += received(instruction.name)
            elif opcode in SLICES:
                total += size(instruction.name)
            elif opcode == "scatter":
                total += size(instruction.operands[-1])  # an atomic update reads and writes
            elif opcode != "dynamic-update-slice":
                total += size(name)
        return min(total, size(name))

    def written(instruction: Instruction) -> int:
        """Returns the bytes that are written of a result."""
        source = instruction
        while source.opcode in ("bitcast", "copy"):
            source = by_name[source.operands[0]]
        if source.opcode == "dynamic-update-slice":
            return size(source.operands[1])
        return size(source.operands[-1] if source.opcode == "scatter" else instruction.name)

    root = inside[-1]
    results = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    parameters = [instruction.name for instruction in inside if instruction.opcode == "parameter"]
    return sum(map(received, parameters)), sum(map(written, results))


def operations(instruction: Instruction, shapes: dict[str, str]) -> int:
    """Returns the floating-point operations of a convolution or matrix product, 0 of all else."""
    contracted = re.search(r'lhs_contracting_dim\w*"?[=:][\[{]([\d",]*)', instruction.attributes)
    labels = re.search(r"dim_labels=\w+?_(\w+)->", instruction.attributes)
    if not (contracted or labels):
        return 0
    outputs, left, right = map(
        _sides, (instruction.shape, *(shapes[name] for name in instruction.operands[:2]))
    )
    if contracted:
        axes = map(int, re.findall(r"\d+", contracted[1]))
        return 2 * math.prod(outputs) * math.prod(left[axis] for axis in axes)
    kernel = right
    if "BackwardInput" in instruction.attributes:
        outputs = left
    elif "BackwardFilter" in instruction.attributes:
        outputs, kernel = right, outputs
    return 2 * math.prod(outputs) * math.prod(kernel) // kernel[labels[1].index("o")]


def kind_of(instruction: Instruction, inside: list[Instruction], size: int) -> str:
    """Returns the kind of a kernel of so many bytes, as names of JAX's operations tell it."""
    name, opcodes = _name(instruction), {part.opcode for part in inside}
    names = " ".join([name, *map(_name, inside)])
    backward, in_gradient = "transpose(" in name, "jvp(" in name
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    if "convolution" in opcodes or (target and "conv" in target[1]):
        instruction = next((part for part in inside if part.opcode == "convolution"), instruction)
        part = target[1] if target else "Forward"
        if "Forward" in part and backward:
            # vmap makes gradients to filters of it, whose windows are as large as maps.
            window = re.search(r"window=\{size=(\d+)", instruction.attributes)
            axis = re.search(r"dim_labels=\w+->(\w+)", instruction.attributes)[1].index("0")
            wide = window and int(window[1]) > _sides(instruction.shape)[axis]
            part = "BackwardFilter" if wide else "BackwardInput"
        return next(kind for name, kind in CONVOLUTIONS.items() if name in part)
    if "dot" in opcodes or (target and "gemm" in target[1]):
        return "dense products"
    if not in_gradient and re.search("is_?finite|reduce_and", name):
        return "finite checks"
    if not in_gradient and re.search(r"select_n$|/(add|mul|sub)$", name):
        return "optimizer and selection"
    if re.search("reduce_window|select_and_scatter|max_pool", names):
        return "pooling, gradient" if backward or "select_and_scatter" in names else "pooling"
    if "norm" in name and ("reduce" in opcodes or size <= SMALL or name.endswith("select_n")):
        return "batch norm backward, sums" if backward else "batch norm statistics"
    if not backward and re.search("norm|relu", name):
        return "normalize and ReLU"
    if "norm" in name:
        return "batch norm backward, by element"
    return "ReLU and residuals, backward" if backward and size > SMALL else "other"


def _name(instruction: Instruction) -> str:
    """Returns the name of JAX's operation."""
    named = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return named[1] if named else ""


def _sides(shape: str) -> list[int]:
    """Returns the lengths of the first array's axes in a type."""
    return [int(side) for side in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if side]
