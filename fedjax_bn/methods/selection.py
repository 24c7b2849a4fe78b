"""Local training other than `client.run_steps`: in pieces, or with a choice of the uploaded state.

Local selection (FedIG, A.2): a client uploads its best state of the round, not its last.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.arguments.ranges import Steps, bounded
from fedjax_bn.client import Load, Train, Trained, run_steps
from fedjax_bn.engine.backend import where_tree
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.engine.keys import step_keys
from fedjax_bn.local_step import Batch, LocalStep
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.sharing import OWN, PyTree, Variables, without
from fedjax_bn.state import Received
from fedjax_bn.task import Task, classification, masked_mean

# score(variables, received) -> f[]; higher is better
Score = Callable[[Variables, Received], jax.Array]


@bounded
def best_of_round(score: Score, every: Steps = 20) -> Train:
    """Returns local training that keeps the variables with the best score of the round.

    The training makes the steps of `client.run_steps` and scores the variables after every `every`
    steps and after the last step; the first of equal scores wins. Steps without valid samples come
    last and are not counted. State, losses and counts are those of the whole round.
    """

    def train(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        key: jax.Array, load: Load | None = None,
    ) -> Trained:  # fmt: skip
        steps = batches["valid"].shape[0]
        chunks, leftover = divmod(steps, every)
        # Below every score, so that the first scored model is taken.
        worst = jnp.asarray(-jnp.inf, jnp.result_type(float))
        best = (variables, worst, jnp.zeros((), jnp.int32))
        inputs = without(batches, "source")

        def chunk(carry: tuple, chunk_inputs: tuple) -> tuple[tuple, tuple]:
            variables, state, best, passed = carry
            places, keys = chunk_inputs
            part = batches | jax.tree.map(lambda leaf: leaf[places], inputs)
            trained = run_steps(step, received, variables, state, part, keys, load)
            passed += (trained.counts > 0).sum(dtype=passed.dtype)
            value = score(received.with_frozen(trained.variables), received).astype(worst.dtype)
            # > is False for NaN, so that a model with score NaN is never kept.
            best = where_tree(value > best[1], (trained.variables, value, passed), best)
            carry = (trained.variables, trained.state, best, passed)
            return carry, (trained.losses, trained.counts)

        carry = (variables, state, best, jnp.zeros((), jnp.int32))
        # One split for all steps, so that the keys are those of a round without scores. Empty steps
        # come last, so that the scored steps do not depend on how many end the client's epochs.
        order = jnp.argsort(~batches["valid"].any(1))
        per_step = (order, jax.random.split(key, steps))
        in_chunks = jax.tree.map(
            lambda x: x[: chunks * every].reshape(chunks, every, *x.shape[1:]), per_step
        )
        carry, outputs = jax.lax.scan(chunk, carry, in_chunks)
        outputs = jax.tree.map(lambda x: x.reshape(-1), outputs)
        if leftover:
            leftover_steps = jax.tree.map(lambda x: x[chunks * every :], per_step)
            carry, leftover_outputs = chunk(carry, leftover_steps)
            outputs = jax.tree.map(lambda *x: jnp.concatenate(x), outputs, leftover_outputs)
        _, state, (variables, _, chosen), _ = carry
        back = jnp.argsort(order)
        losses, counts = (x[back] for x in outputs)
        return Trained(variables, state, losses, counts, chosen)

    return train


@bounded
def in_pieces(every: Steps) -> Train:
    """Returns local training that `FederatedMethod.train` makes in pieces of `every` steps.

    Between them a site can store it. In a round it is `client.run_steps`.
    """

    def train(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        key: jax.Array, load: Load | None = None,
    ) -> Trained:  # fmt: skip
        begun, count = received.begun, batches["valid"].shape[0]
        whole_round = partial(run_steps, step, received, variables, state, batches, key, load)
        if begun is None:
            return whole_round()
        if begun.trained is None:
            like = jax.eval_shape(whole_round)
            zeros = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in (like.losses, like.counts))
            return Trained(variables, state, *zeros)
        if begun.step is None:
            return begun.trained
        variables, state, losses, counts, _ = begun.trained
        places = begun.step + jnp.arange(every, dtype=jnp.int32)
        # JAX clamps an index that is too large: a short last piece repeats a step, as padding.
        part = batches | jax.tree.map(lambda leaf: leaf[places], without(batches, "source"))
        part["valid"] &= (places < count)[:, None]
        keys = step_keys(key, batches["valid"])[places]
        made = run_steps(step, received, variables, state, part, keys, load)
        losses, counts = (
            whole.at[places].set(steps, mode="drop")
            for whole, steps in ((losses, made.losses), (counts, made.counts))
        )
        return made._replace(losses=losses, counts=counts)

    return train


def validation_score(
    model: Any, prepare: Prepare, task: Task | None = None, statistics: StatisticsRule | None = None
) -> Score:
    """Returns the function that scores a client's model on its own validation samples.

    `received.validation` is {"image": [V, B, ...], "label": i32[V, B] or a tree, "valid":
    bool[V, B]}, as `data.drawing.validation_batches` makes it for all clients. `prepare` and `task`
    are as in `fedavg`; `statistics` is that of the `FederatedMethod`, by which its clients predict.
    """
    score = (task or classification()).score
    return _over_validation(model, prepare, statistics, score.of_batch, score.of_all)


def validation_loss(
    model: Any, prepare: Prepare, task: Task | None = None, statistics: StatisticsRule | None = None
) -> Score:
    """As `validation_score`, with the mean loss of the samples; lower is better."""
    task = task or classification()
    if score := task.mean_loss:
        return _over_validation(model, prepare, statistics, score.of_batch, score.of_all)

    def of_batch(outputs: PyTree, label: PyTree, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        return task.loss(outputs, label, valid), valid.sum(dtype=jnp.int32)

    return _over_validation(model, prepare, statistics, of_batch, lambda each: masked_mean(*each))


def _over_validation(
    model: Any,
    prepare: Prepare,
    statistics: StatisticsRule | None,
    of_batch: Callable[[PyTree, PyTree, jax.Array], PyTree],
    of_all: Callable[[PyTree], jax.Array],
) -> Score:
    """Returns `of_all` of `of_batch(outputs, label, valid)`, stacked over validation batches."""
    adaptation = of_clients(model, statistics)

    def passed(variables: Variables, received: Received) -> PyTree:
        variables = without(variables, OWN)  # the model that is uploaded, as in Ditto

        def passed_batch(batch: Batch) -> PyTree:
            images = prepare(batch["image"], parameter_dtype(variables))
            outputs, _ = adaptation.predict(variables, (), images, batch["valid"])
            return of_batch(outputs, batch["label"], batch["valid"])

        # One batch after another, because all samples at once might not fit in memory.
        return of_all(jax.lax.map(passed_batch, received.validation))

    return passed
