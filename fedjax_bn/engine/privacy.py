"""Differential privacy of clients: updates are clipped, and the sum gets noise.

    Delta_k <- Delta_k min(1, C / ||Delta_k||),   Delta_k = y_k - x over all shared leaves
    x' = x + (sum_k Delta_k + z C N(0, I)) / n

(McMahan, Ramage, Talwar & Zhang, "Learning differentially private recurrent language models", ICLR
2018, Algorithm 1 with flat clipping and equal weights; n clients count in the round.) Any method
takes it as an option, `fedbn(model, optimizer, privacy=gaussian(clip=1.0, noise=1.0))`, and so do a
deployment's client and server, which are the method's.

It covers what a method shares each round, for the number of rounds given to `accounting.epsilon`.
It does not cover other reports: sizes, losses, accuracies, the round selected by them, and personal
leaves that are passed on (`global_variables` averages the clients' batch norms for an unseen one).
The noise comes from JAX's generator: with its key anyone can subtract the noise.
"""

import math
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    Weighing,
    WeighingRule,
    by_size,
    uniform,
)
from fedjax_bn.arguments.ranges import SEED, refusal
from fedjax_bn.client import Client, LocalUpdate
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.keys import stream
from fedjax_bn.sharing import STATISTICS, join, path_names, split_like
from fedjax_bn.state import Received

PyTree = Any
_AMPLITUDE = "amplitude"  # the collection of `rivals.amplitude`, which the engine does not import


class Privacy(NamedTuple):
    """A Gaussian mechanism over clients; made by `gaussian`. Clip and noise may be traced.

    Attributes:
      clip: C, the largest norm of a client's update; infinity for any.
      noise: z, the noise's standard deviation in units of `clip`.
      at: who adds it: the server once to the sum, or every client to its own update.
      seed: of the noise.
    """

    clip: float | jax.Array
    noise: float | jax.Array
    at: str
    seed: int


class Noise(NamedTuple):
    """What the server keeps of a mechanism.

    Attributes:
      inner: what the method's own step keeps.
      key: u32[...], the words of the noise's random key.
      rounds: i32[], rounds that had noise.
    """

    inner: PyTree
    key: jax.Array
    rounds: jax.Array


def gaussian(
    clip: float,
    noise: float = 0.0,
    *,
    at: Literal["server", "client"] = "server",
    seed: int = 0,
) -> Privacy:
    """The option `privacy` of a method.

    Args:
      clip: C, the norm to which a client's update is clipped, above 0; infinity for none.
      noise: z, at least 0. The server adds N(0, (z C)^2) to the sum of the updates; clients that do
        it themselves add as much each, so that the server sees no update without noise.
      at: who adds it.
      seed: of the noise, 0 to 2**32 - 1, by which runs are repeated. Who knows it takes the noise
        away: in a deployment it is a secret of the server, or of each client its own, which
        `fedjax_bn.flower` draws by itself.

    Raises:
      ValueError: an argument is out of its range, or there is noise without a clip.
    """
    wrong = {
        "clip must be above 0": not clip > 0,
        "noise must be at least 0 and finite": not 0 <= noise < math.inf,
        "at must be server or client": at not in ("server", "client"),
        f"seed must be {SEED.text}": bool(refusal(seed, SEED)),
        "noise needs a finite clip, which bounds what a client adds": noise and clip == math.inf,
    }
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"gaussian(clip={clip}, noise={noise}, at={at!r}): {sentence}")
    return Privacy(float(clip), float(noise), at, seed)


def guarded(
    privacy: Privacy | None,
    client: Client,
    server: ServerUpdate,
    weigh: WeighingRule | Weighing | None,
) -> tuple[Client, ServerUpdate, WeighingRule | Weighing]:
    """Returns a method's client, server and weighing rule with a mechanism; unchanged for None.

    Args:
      privacy: the mechanism.
      client: of any method that sends nothing but its shared leaves.
      server: its server's step.
      weigh: `uniform`, or None for the default.

    Raises:
      ValueError: `weigh` is another rule, by which one client could count more than others.
    """
    if privacy is None:
        return client, server, weigh or by_size
    if weigh not in (None, uniform):
        raise ValueError(
            "privacy needs weigh=uniform, which it takes by default: under another rule one client "
            "would count more than the noise is made for"
        )
    return clipping(client, privacy), noising(server, privacy), uniform


def clipping(client: Client, privacy: Privacy) -> Client:
    """Returns the client with its upload clipped, and noised if clients add the noise.

    Its personal leaves stay as trained.

    Raises:
      ValueError: at `run`, where it sends a message besides.
    """

    def run(received: Received, batches: Batches, key: jax.Array) -> LocalUpdate:
        update = client.run(received, batches, key)
        if sent := len(jax.tree.leaves(update.message)):
            raise ValueError(
                f"this method's clients send {sent} arrays beside their shared leaves, which "
                "privacy would neither clip nor noise: choose one that sends none, such as fedavg, "
                "fedbn, fedprox or fedadam"
            )
        shared, personal = split_like(update.variables, received.shared)
        shared = clipped(shared, received.shared, privacy.clip)
        if privacy.at == "client":
            key = jax.random.fold_in(stream(key, "privacy"), privacy.seed)
            shared = with_noise(shared, key, privacy.noise * privacy.clip)
        return update._replace(variables=join(shared, personal))

    return client._replace(run=run)


def noising(server: ServerUpdate, privacy: Privacy) -> ServerUpdate:
    """Returns the server that adds noise to the mean before its own step, if clients add none.

    Raises:
      ValueError: at `init`, where running statistics or leaves that are no floats are shared.
    """

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        _check_shared(shared)
        state = server.init(shared, personal)
        key = jax.random.key_data(jax.random.key(privacy.seed))
        return state._replace(kept=Noise(state.kept, key, jnp.zeros((), jnp.int32)))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        noise, mean = state.kept, aggregate.mean
        if privacy.at == "server" and not _is(privacy.noise, 0):
            key = jax.random.fold_in(jax.random.wrap_key_data(noise.key), noise.rounds)
            # The mean is the sum over n: noise z C on the sum is z C / n on the mean.
            count = cast(jax.Array, aggregate.count)
            mean = with_noise(mean, key, privacy.noise * privacy.clip / count)
        state = state._replace(kept=noise.inner)
        shared, state = server.update(shared, aggregate._replace(mean=mean), state)
        kept = noise._replace(inner=state.kept, rounds=noise.rounds + 1)
        return shared, state._replace(kept=kept)

    return server._replace(init=init, update=update)


def clipped(leaves: PyTree, start: PyTree, norm: float | jax.Array) -> PyTree:
    """start + Delta min(1, norm / ||Delta||), Delta = leaves - start; the norm is that of all.

    Leaves within the norm come back with the bits that they have.

    Args:
      leaves: a tree of floating arrays.
      start: likewise.
      norm: above 0.
    """
    if _is(norm, math.inf) or not jax.tree.leaves(leaves):
        return leaves
    delta = jax.tree.map(lambda y, x: _wide(y) - _wide(x), leaves, start)
    squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(delta)]
    dtype = promote(*{x.dtype for x in squares})
    length, norm = jnp.sqrt(sum(x.astype(dtype) for x in squares)), jnp.asarray(norm, dtype)
    scale = norm / jnp.where(length > 0, length, 1)

    def shorten(y: jax.Array, x: jax.Array, d: jax.Array) -> jax.Array:
        short = (_wide(x) + scale.astype(d.dtype) * d).astype(y.dtype)
        # The leaf itself and not x + (y - x), which rounds.
        return jnp.where(length <= norm, y, short)

    return jax.tree.map(shorten, leaves, start, delta)


def with_noise(leaves: PyTree, key: jax.Array, scale: float | jax.Array) -> PyTree:
    """leaves + scale N(0, I), each leaf with a key of its own; as they are for the number 0.

    Args:
      leaves: a tree of floating arrays.
      key: random key.
      scale: standard deviation, at least 0.
    """
    if _is(scale, 0):
        return leaves
    given, form = jax.tree.flatten(leaves)

    def add(number: int, leaf: jax.Array) -> jax.Array:
        dtype = _wide(leaf).dtype
        drawn = jax.random.normal(jax.random.fold_in(key, number), leaf.shape, dtype)
        return (leaf.astype(dtype) + jnp.asarray(scale, dtype) * drawn).astype(leaf.dtype)

    return jax.tree.unflatten(form, [add(i, leaf) for i, leaf in enumerate(given)])


def _is(given: float | jax.Array, number: float) -> bool:
    """Returns whether a number is known before compilation and equals this one."""
    return isinstance(given, float | int) and given == number


def _wide(leaf: jax.Array) -> jax.Array:
    """Returns a leaf in at least float32, the dtype of norms and noise."""
    return leaf.astype(promote(leaf.dtype, jnp.float32))


def _check_shared(shared: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(shared):
        if path_names(path)[0] == STATISTICS:
            raise ValueError(
                "privacy does not go with a sharing rule that shares running statistics, whose "
                "variances noise would make negative: use share=all_but_statistics or "
                "all_but_batch_norm, such as of fedbn and silobn"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"privacy cannot noise the shared leaf {'/'.join(path_names(path))} of "
                f"{leaf.dtype}: keep it with its client by a sharing rule"
            )
