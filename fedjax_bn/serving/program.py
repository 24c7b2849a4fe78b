"""Exports an adaptation of a model as a StableHLO program, which JAX runs without this library.

    import numpy as np
    from jax import export

    program = export.deserialize(bytearray(open("programs/tsmobn.stablehlo", "rb").read()))
    arrays = dict(np.load("variables.npz"))
    carry = dict(np.load("programs/tsmobn.npz"))           # before a client's first batch
    probabilities, carry = program.call(arrays, carry, images, valid)   # batch after batch

Images [B, ...] have the stored form (the program standardizes bytes), with B from model.json;
valid bool[B] is False after the last image of a short batch. Probabilities are f[B, classes], or
f[B, H, W, classes] of pixels where model.json has `masks`. Programs are for CPU.

A program is code, like a module: run only one whose origin you trust. It makes no custom call,
because JAX checks neither which function such a call names nor the sizes of its arrays, and one
with too small results writes past its memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export

from fedjax_bn.adaptation.choice import Choice
from fedjax_bn.arguments.text import file_name
from fedjax_bn.engine.images import Prepare
from fedjax_bn.serving.predictor import Predictor, step_of
from fedjax_bn.sharing import Variables

PyTree = Any
Arrays = dict[str, Any]


class Program(NamedTuple):
    """An exported adaptation."""

    content: bytes  # what `jax.export` serialized
    carry: Arrays  # before a client's first batch, by name; {} if nothing is carried
    batch_size: int
    order: int  # of the images, see `adaptation.choice.Choice`


def export(
    choice: Choice, variables: Variables, prepare: Prepare, shape: tuple[int, ...], dtype: str
) -> Program:
    """Returns an adaptation as a program over named arrays.

    The program contains only the form of `variables`; `shape` and `dtype` are those of one stored
    sample, which `prepare` converts to the model's inputs.

    Raises:
      ImportError: flatbuffers, which `jax.export` needs, is not installed.
      ValueError: the program makes a custom call, as linear algebra does.
    """
    start, step = choice.adaptation.init(variables), step_of(choice.adaptation, prepare)

    def run(arrays: Arrays, carry: Arrays, images: jax.Array, valid: jax.Array) -> tuple:
        variables = unflatten_dict(arrays, sep="/")
        leaves, form = jax.tree.flatten(start)
        leaves = [
            jax.random.wrap_key_data(carry[str(i)]) if _is_key(x) else carry[str(i)]
            for i, x in enumerate(leaves)
        ]
        probabilities, after = step(variables, jax.tree.unflatten(form, leaves), images, valid)
        return probabilities, _to_named(after)

    arrays, carry = flatten_dict(variables, sep="/"), _to_named(start)
    images = jax.ShapeDtypeStruct((choice.batch_size, *shape), dtype)
    valid = jax.ShapeDtypeStruct((choice.batch_size,), bool)
    program = jax_export.export(jax.jit(run), platforms=("cpu",))(arrays, carry, images, valid)
    _refuse_custom_calls(program)
    carry = {name: np.asarray(leaf) for name, leaf in carry.items()}
    return Program(bytes(program.serialize()), carry, choice.batch_size, choice.order)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turns any error on a damaged file into a ValueError with its path."""
    try:
        yield
    except Exception as error:  # flatbuffers and NumPy raise any error on damaged files
        raise ValueError(
            f"cannot read {path} ({error}): give a folder that `fedjax-bn serve --export` has "
            "written, or serve it again"
        ) from error


def write_program(folder: Path, adaptation: str, program: Program) -> dict[str, Any]:
    """Writes NAME.stablehlo and NAME.npz; returns the argument `about` of `open_program`."""
    name = file_name(adaptation)
    (folder / f"{name}.stablehlo").write_bytes(program.content)
    np.savez(folder / f"{name}.npz", **program.carry)
    return {"batch_size": program.batch_size, "order": program.order}


def open_program(
    folder: Path,
    adaptation: str,
    about: Mapping[str, Any],
    arrays: Arrays,
    check: Callable[[np.ndarray], None],
) -> Predictor:
    """Returns a predictor by the program of an adaptation, which is code and runs in this process.

    `adaptation` and `about` are the argument and the result of `write_program`. A program that is
    missing or damaged, or makes a custom call, is a ValueError.
    """
    path = folder / f"{file_name(adaptation)}.stablehlo"
    with damage_named(path):
        program = jax_export.deserialize(bytearray(path.read_bytes()))
        _refuse_custom_calls(program)
        with path.with_suffix(".npz").open("rb") as file:
            start = dict(np.load(file))
    step = partial(jax.jit(program.call), arrays)
    return Predictor(lambda: start, step, check, about["batch_size"], about["order"])


def _refuse_custom_calls(program: jax_export.Exported) -> None:
    """Raises ValueError if a program makes a custom call; this library's own make none."""
    if call := re.search(r"\.custom_call\b([^(]{0,80})", program.mlir_module()):
        raise ValueError(
            f"the program makes the custom call{call[1]}, and programs may make none: write the "
            "model without it (linear algebra of JAX is made of custom calls)"
        )


def _to_named(carry: PyTree) -> Arrays:
    """Returns the leaves of a carry by their number, with random keys as their raw words."""
    # An .npz cannot hold key arrays, and callers of a program need no tree of this library.
    leaves = enumerate(jax.tree.leaves(carry))
    return {str(i): jax.random.key_data(x) if _is_key(x) else x for i, x in leaves}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
