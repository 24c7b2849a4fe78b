"""Random numbers that are the same on any machine."""

import numpy as np


def generator(seed: int, *path: int) -> np.random.Generator:
    """Returns a PCG64 generator for one use of a seed: other paths give independent streams.

    Paths are padded with zeros: (1,) and (1, 0) give the same stream.

    Raises:
      ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be an integer of at least 0")
    # Named, because `default_rng` may use another generator in a later NumPy.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *path])))
