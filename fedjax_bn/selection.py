"""Local selection of FedIG (A.2): a client uploads its best state of the round, not its last."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn import client as local
from fedjax_bn.adaptation import running
from fedjax_bn.client import (
    Batch,
    Load,
    LocalStep,
    PyTree,
    Received,
    Trained,
    parameter_dtype,
    select,
)
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.sharing import Variables

Train = Callable[..., Trained]
# score(variables, received) -> f[], the greater the better
Score = Callable[[Variables, Received], jax.Array]
# find(numbers i32[B]) -> images [B, ...]
Find = Callable[[jax.Array], jax.Array]


def best_of_round(score: Score, every: int = 20) -> Train:
    """Local training that keeps the variables with the best score, in place of `local.train`.

    The score is taken after every `every` steps and after the last one; the first of equals wins.
    The steps are those of `local.train`; the local step's state, losses and counts are those of the
    whole round, `Trained.chosen` are the steps behind the variables.

    Args:
      score: usually `validation_accuracy`.
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
        load: Load | None = None,
    ) -> Trained:
        steps = batches["valid"].shape[0]
        chunks, rest = divmod(steps, every)
        worst = jnp.asarray(-jnp.inf, jnp.result_type(float))
        best = (variables, worst, jnp.zeros((), jnp.int32))

        def chunk(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
            variables, state, best, passed = carry
            done = local.run_steps(step, received, variables, state, *inputs, load)
            passed += len(done.counts)
            value = score(done.variables, received).astype(worst.dtype)
            best = select(value > best[1], (done.variables, value, passed), best)
            return (done.variables, done.state, best, passed), (done.losses, done.counts)

        carry = (variables, state, best, jnp.zeros((), jnp.int32))
        inputs = (batches, jax.random.split(key, steps))
        whole = jax.tree.map(
            lambda x: x[: chunks * every].reshape(chunks, every, *x.shape[1:]), inputs
        )
        carry, (losses, counts) = jax.lax.scan(chunk, carry, whole)
        losses, counts = losses.reshape(-1), counts.reshape(-1)
        if rest:
            carry, (more, seen) = chunk(carry, jax.tree.map(lambda x: x[chunks * every :], inputs))
            losses, counts = jnp.concatenate([losses, more]), jnp.concatenate([counts, seen])
        _, state, (variables, _, chosen), _ = carry
        return Trained(variables, state, losses, counts, chosen)

    return train


def validation_accuracy(model: nn.Module, prepare: Prepare, find: Find | None = None) -> Score:
    """The client's accuracy f[] in [0, 1] on its own validation samples, its running statistics.

    `received.validation` is {"image": [V, B, ...], "label": i32[V, B], "valid": bool[V, B]}, as
    `data.batches.point_to_validation` makes it for all clients.

    Args:
      model: linen module, images -> logits.
      prepare: stored images -> what the model reads.
      find: what turns "image" into stored images, where it holds numbers of samples.
    """
    adaptation, find = running(model), find or (lambda images: images)

    def score(variables: Variables, received: Received) -> jax.Array:
        def right(batch: Batch) -> jax.Array:
            images = prepare(find(batch["image"]), parameter_dtype(variables))
            logits, _ = adaptation.predict(variables, (), images)
            hits = logits.argmax(-1).astype(batch["label"].dtype) == batch["label"]
            return (hits & batch["valid"]).sum(dtype=jnp.int32)

        samples = received.validation["valid"].sum(dtype=jnp.int32)
        return jax.lax.map(right, received.validation).sum() / jnp.maximum(samples, 1)

    return score
