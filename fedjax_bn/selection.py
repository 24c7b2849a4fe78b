"""Local selection of FedIG (A.2): a client uploads its best state of the round, not its last."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_bn import local
from fedjax_bn.local import Batch, LocalStep, PyTree, Received, Trained, select
from fedjax_bn.sharing import Variables

Train = Callable[..., Trained]
# score(variables, received) -> f[], the greater the better
Score = Callable[[Variables, Received], jax.Array]


def best_of_round(score: Score, every: int = 20) -> Train:
    """Local training that keeps the variables with the best score, in place of `local.train`.

    The score is taken after every `every` steps and after the last one; the first of equals wins.
    The local step's state, losses and counts are those of the whole round.

    Args:
      score: usually the client's accuracy on its own validation data.
      every: steps between scores, at least 1.

    Raises:
      ValueError: `every` is below 1.
    """
    if every < 1:
        raise ValueError(f"best_of_round: every={every} must be at least 1")

    def train(
        step: LocalStep,
        received: Received,
        variables: Variables,
        state: PyTree,
        batches: Batch,
        key: jax.Array,
    ) -> Trained:
        steps = batches["valid"].shape[0]
        chunks, rest = divmod(steps, every)
        best = (variables, jnp.asarray(-jnp.inf, jnp.result_type(float)))

        def chunk(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
            variables, state, best = carry
            batches, key = inputs
            done = local.train(step, received, variables, state, batches, key)
            value = score(done.variables, received).astype(best[1].dtype)
            best = select(value > best[1], (done.variables, value), best)
            return (done.variables, done.state, best), (done.losses, done.counts)

        keys = jax.random.split(key, chunks + 1)
        whole = jax.tree.map(
            lambda x: x[: chunks * every].reshape(chunks, every, *x.shape[1:]), batches
        )
        carry, (losses, counts) = jax.lax.scan(
            chunk, (variables, state, best), (whole, keys[:chunks])
        )
        losses, counts = losses.reshape(-1), counts.reshape(-1)
        if rest:
            last = jax.tree.map(lambda x: x[chunks * every :], batches)
            carry, (more, seen) = chunk(carry, (last, keys[-1]))
            losses, counts = jnp.concatenate([losses, more]), jnp.concatenate([counts, seen])
        _, state, (variables, _) = carry
        return Trained(variables, state, losses, counts)

    return train
