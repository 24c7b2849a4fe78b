"""Named streams of random keys, and the constants with which a key is folded to make them.

Each use of a key has its own stream, so that a method draws the same batches and dropout with and
without another use. A new stream needs a new constant. Those of 2^31 or more are for keys that are
also folded with counts (clients, rounds, rows), which stay below 2^31.
"""

import jax
import jax.numpy as jnp

STREAMS = {
    # of a model's first key
    "adapter": 3,
    "latent layer": 4,
    "decomposed head": 8,
    "puzzle head": 9,
    "projection": 11,
    "restitution": 13,
    "attention": 14,
    "generator and judge": 15,
    "stylist": 17,
    "low-rank factors": 22,
    # of a step
    "mixed statistics": 1,
    "adapted statistics": 2,
    "random convolutions": 5,
    "mixed styles": 6,
    "feature noise": 7,
    "puzzles": 10,
    "pairs": 12,
    "generated features": 16,
    "styled images": 18,
    "amplitudes": 19,
    "redrawn statistics": 20,
    "normalizing clients": 21,
    "load": 2**31,
    "perturb": 2**31 + 1,
    "latent noise": 2**31 + 2,
    # of a client's round
    "privacy": 2**31 + 2,
    "moments of a round": 2**31 + 3,
    "mean amplitude": 2**31 + 4,
    "sent amplitudes": 2**31 + 5,
    "image statistics": 2**31 + 6,
    "epochs of the head": 2**31 + 7,
    "weights of last layers": 2**31 + 8,
    "local optimizer": 2**31 + 9,
    # of an augmented sample or batch
    "elastic field": 2**31 + 7,
    # of a round's participation
    "dropout of clients": 2**31,
    "cohort by size": 2**31 + 1,
}


def stream(key: jax.Array, name: str) -> jax.Array:
    """Returns the key of a named use of `key`; `STREAMS` has the names."""
    return jax.random.fold_in(key, STREAMS[name])


def step_keys(key: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns a key for each of S steps, [S], of which `valid` bool[S, B] marks the samples."""
    # The n-th step that has a valid sample gets the n-th key, and empty steps get the others. So a
    # client draws the same numbers however many empty steps its epochs end with.
    place = jnp.argsort(jnp.argsort(~valid.any(1)))
    return jax.random.split(key, len(valid))[place]
