"""Pickled dictionaries of NumPy arrays and lists, read without running any of what they name.

A pickle may call any function that its reader lets it find. Here it finds three stand-ins that only
remember what they are given, so that neither its code nor NumPy's own `__setstate__`, which trusts
whoever wrote a file, ever runs.
"""

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy", "_codecs")


class _Remembered:
    """A stand-in for a dtype or an array: what it was called with, and its state."""

    def __init__(self, *given: Any):
        self.given, self.state = given, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: str, encoding: Any) -> bytes:
    """How Python 3 pickles bytes in protocol 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


_STAND_INS = {
    "_reconstruct": _Remembered,
    "ndarray": _Remembered,
    "dtype": _Remembered,
    "encode": _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module not in _MODULES or name not in _STAND_INS:
            raise ValueError(f"it names {module}.{name}, which arrays have not")
        return _STAND_INS[name]


def read_pickled_arrays(content: bytes) -> dict[bytes, Any]:
    """The entries of a pickled dictionary, whose arrays hold integers.

    Raises:
      ValueError, and whatever else a damaged pickle raises: it is no such dictionary, or names
        anything but arrays.
    """
    _check_numbers(content)
    entries = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if type(entries) is not dict:
        raise ValueError(f"it holds a {type(entries).__name__}, not a dictionary")
    return {
        name: _array(value) if isinstance(value, _Remembered) else value
        for name, value in entries.items()
    }


def _check_numbers(content: bytes) -> None:
    """Raises ValueError where a number in the pickle claims memory that its bytes do not fill.

    `genops` refuses lengths beyond the end. `Unpickler` makes room for as many remembered objects
    as the number of one says, and picklers count them.
    """
    for count, (operation, number, _) in enumerate(pickletools.genops(content)):
        if operation.name in _PUTS and number > count:
            raise ValueError(f"it remembers object {number} after {count} operations")


def _array(told: _Remembered) -> np.ndarray:
    """The array of integers that an ndarray's state (version, shape, dtype, order, bytes) tells."""
    _, shape, dtype, by_columns, raw = told.state
    kind, order = dtype.given[0], dtype.state[1]
    kind, order = (x.decode() if isinstance(x, bytes) else x for x in (kind, order))
    if kind[0] not in "iu" or math.prod(shape) * int(kind[1:]) != len(raw):
        raise ValueError(f"it tells of {kind} {shape}, and has {len(raw)} bytes")
    flat = np.frombuffer(raw, np.dtype(kind).newbyteorder(order))
    return flat.reshape(shape, order="F" if by_columns else "C")
