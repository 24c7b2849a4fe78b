"""Differential privacy of clients: updates are clipped, and the sum gets noise.

    Delta_k <- Delta_k min(1, C / ||Delta_k||),   Delta_k = y_k - x over all shared leaves
    x' = x + (sum_k Delta_k + z C N(0, I)) / n

(McMahan, Ramage, Talwar & Zhang, "Learning differentially private recurrent language models", ICLR
2018, Algorithm 1 with flat clipping and equal weights; n clients count in the round.) Any method
takes it as an option, `fedbn(model, optimizer, privacy=gaussian(clip=1.0, noise=1.0))`.

It covers what a method shares each round, but neither sizes, losses, accuracies and the round
selected by them, nor personal leaves that are sent on (`global_variables` averages batch norms).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Seed, bounded
from fedjax_bn.engine.dtypes import promote, wide

PyTree = Any


class Privacy(NamedTuple):
    """A Gaussian mechanism over clients; made by `gaussian`. Clip and noise may be traced."""

    clip: float | jax.Array  # C, the largest norm of a client's update; infinity for no bound
    noise: float | jax.Array  # z, the noise's standard deviation in units of `clip`
    at: str  # who adds the noise
    seed: int  # of the noise


@bounded
def gaussian(
    clip: float, noise: float = 0.0, *, at: Literal["server", "client"] = "server", seed: Seed = 0
) -> Privacy:
    """Returns the option `privacy` of a method.

    Args:
      clip: C, the norm to which a client's update is clipped, above 0; infinity for no clipping.
      noise: z, at least 0, of N(0, (z C)^2).
      at: who adds it: the server to the sum of the updates, or every client to its own.
      seed: the seed of the noise, 0 to 2**32 - 1. Whoever knows it can subtract the noise:
        `fedjax_bn.flower` draws secret ones by itself.

    Raises:
      ValueError: an argument is out of its range, or there is noise without a clip.
    """
    if not clip > 0 or not 0 <= noise < math.inf or (noise and clip == math.inf):
        allowed = f"must be above 0, noise={noise} 0 or more, with a finite clip"
        raise ValueError(f"clip={clip} {allowed}")
    return Privacy(float(clip), float(noise), at, seed)


def clipped(leaves: PyTree, start: PyTree, norm: float | jax.Array) -> PyTree:
    """Returns start + Delta min(1, norm / ||Delta||), Delta = leaves - start, norm above 0.

    ||Delta|| is over all leaves together. An update within it is returned bit by bit.
    """
    if is_known(norm, math.inf) or not jax.tree.leaves(leaves):
        return leaves
    delta = jax.tree.map(lambda y, x: wide(y) - wide(x), leaves, start)
    squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(delta)]
    dtype = promote(*{x.dtype for x in squares})
    length, norm = jnp.sqrt(sum(x.astype(dtype) for x in squares)), jnp.asarray(norm, dtype)
    # An update of zeros has length 0.
    scale = norm / jnp.where(length > 0, length, 1)

    def shorten(y: jax.Array, x: jax.Array, d: jax.Array) -> jax.Array:
        short = (wide(x) + scale.astype(d.dtype) * d).astype(y.dtype)
        # The leaf itself, not x + (y - x), which rounds.
        return jnp.where(length <= norm, y, short)

    return jax.tree.map(shorten, leaves, start, delta)


def with_noise(leaves: PyTree, key: jax.Array, scale: float | jax.Array) -> PyTree:
    """Returns floating leaves + scale N(0, I), a key for each leaf; unchanged for the number 0."""
    if is_known(scale, 0):
        return leaves
    flat, form = jax.tree.flatten(leaves)

    def add(number: int, leaf: jax.Array) -> jax.Array:
        dtype = wide(leaf).dtype
        # A key for each leaf: with one key, leaves of equal shape would get equal noise.
        drawn = jax.random.normal(jax.random.fold_in(key, number), leaf.shape, dtype)
        return (leaf.astype(dtype) + jnp.asarray(scale, dtype) * drawn).astype(leaf.dtype)

    return jax.tree.unflatten(form, [add(i, leaf) for i, leaf in enumerate(flat)])


def is_known(value: float | jax.Array, number: float) -> bool:
    """Returns whether a number is known before compilation and equals this one."""
    return isinstance(value, float | int) and value == number


def epsilon(noise: float, rounds: int, delta: float, cohort: Sequence[int] = ()) -> float:
    """Returns the epsilon of a client's (epsilon, delta) after T rounds, by dp-accounting.

    If all clients take part in every round, epsilon is exact for T Gaussian mechanisms together;
    two runs then differ in one client's update, which is sent or replaced by zeros. If C of K
    clients are drawn at random (without replacement, and secretly), it is an upper bound (Wang,
    Balle & Kasiviswanathan, AISTATS 2019, Theorem 27); two runs then differ in a client's data.

    The noise is z (0 gives infinity), the cohort (C, K), empty if all take part; delta is well
    below one over the number of clients. ImportError without dp-accounting.
    """
    try:
        import dp_accounting as dp
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise ImportError("epsilon needs pip install 'fedjax_bn[privacy]'") from error
    # Without noise nothing is hidden, and without a round nothing is sent.
    if not noise or not rounds:
        return math.inf if rounds else 0.0
    if not cohort or cohort[0] == cohort[1]:
        return float(dp.get_epsilon_gaussian(noise / math.sqrt(rounds), delta))
    # Replaced data move the sum up to twice as far as left-out data, as with half the noise.
    drawn, population = cohort
    event = dp.SampledWithoutReplacementDpEvent(population, drawn, dp.GaussianDpEvent(noise / 2))
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(dp.SelfComposedDpEvent(event, rounds)).get_epsilon(delta))
