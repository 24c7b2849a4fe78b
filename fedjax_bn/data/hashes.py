"""Digests of content, the same on any machine."""

import hashlib

import numpy as np


def hash_of(*content: object) -> str:
    """Returns 20 hexadecimal digits that change with an array's bytes or another value's `repr`."""
    state = hashlib.sha256()
    for one in content:
        if isinstance(one, np.ndarray):
            state.update(f"{one.dtype.str} {one.shape}\n".encode())
            for first in range(0, len(one), 10_000):  # arrays may be memory-mapped and large
                state.update(np.ascontiguousarray(one[first : first + 10_000]))
        else:
            state.update(f"{one!r}\n".encode())
    return state.hexdigest()[:20]
