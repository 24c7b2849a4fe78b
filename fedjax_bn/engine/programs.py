"""Reads traced programs, and compiles those that run many times."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from fedjax_bn.engine.backend import less_optimized

_BLOCK, _HEAP = 2**25, 2**26  # bytes: of temporaries, and of a heap of glibc


def compile_round(program: jax.stages.Traced) -> jax.stages.Compiled:
    """Returns the compiled program, on CPU with less optimization by LLVM: rounds take as long.

    There temporaries are in blocks that fit into glibc's heaps of 64 MiB, where freed memory stays
    (`training.mesh`), unless an array is larger; the system clears the pages of larger blocks in
    each round. JAX's cache of compiled programs takes only those with a single block.
    """
    options = less_optimized()
    config: Any = jax.config
    keeps = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    if options and not keeps:
        inner = (x for x in operations(program.jaxpr.jaxpr) if not _in_place(x))
        largest = max((size_in_bytes(y) for x in inner for y in x.outvars), default=0)
        if largest < _HEAP:
            options["xla_multiheap_size_constraint_per_heap"] = max(largest, _BLOCK)
    return program.lower().compile(compiler_options=options or None)


def _in_place(operation: Any) -> bool:
    return operation.primitive.name == "dynamic_update_slice" or any(_inner(operation))


def operations(program: Any) -> Iterator[Any]:
    """Yields the operations of a program at any depth, such as those of a loop's body."""
    for operation in program.eqns:
        yield operation
        for inner in _inner(operation):
            yield from operations(inner)


def _inner(operation: Any) -> Iterator[Any]:
    for value in operation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            program = getattr(part, "jaxpr", part)
            if hasattr(program, "eqns"):
                yield program


def results(program: Any, names: tuple[str, ...]) -> list[Any]:
    """Returns what the operations of these names return."""
    chosen = (x for x in operations(program) if x.primitive.name in names)
    return [result for operation in chosen for result in operation.outvars]


def size_in_bytes(variable: Any) -> int:
    """Returns the bytes of an operation's result."""
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
