"""Makes random numbers and digests of content that are the same on any machine."""

import hashlib

import numpy as np


def generator(seed: int, *path: int) -> np.random.Generator:
    """Returns a PCG64 generator for one use of a seed; different paths give independent streams.

    Paths are padded with zeros: (1,) and (1, 0) give the same stream.

    Raises:
      ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be an integer of at least 0")
    # Named, because `default_rng` may use another generator in a later NumPy.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *path])))


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
