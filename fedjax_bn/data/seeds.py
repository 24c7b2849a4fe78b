"""Makes random numbers and digests of content that are the same on any machine."""

import hashlib

import numpy as np


def generator(seed: int, *path: int) -> np.random.Generator:
    """Returns a PCG64 generator for one use of a seed, at least 0; paths give independent streams.

    Paths are padded with zeros: (1,) and (1, 0) give the same stream.
    """
    # Named, because `default_rng` may use another generator in a later NumPy.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *path])))


def hash_of(*content: object) -> str:
    """Returns 20 hexadecimal digits that change with an array's bytes or another value's `repr`."""
    state = hashlib.sha256()
    for value in content:
        if isinstance(value, np.ndarray):
            state.update(f"{value.dtype.str} {value.shape}\n".encode())
            for start in range(0, len(value), 10_000):  # arrays may be memory-mapped and large
                state.update(np.ascontiguousarray(value[start : start + 10_000]))
        else:
            state.update(f"{value!r}\n".encode())
    return state.hexdigest()[:20]
