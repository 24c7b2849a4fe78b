"""What is evaluated, between the rounds of a run and of a finished run alike.

Every internal client with its own model, every unseen one by each adaptation. Where the
configuration says so (`config.personalize`), each adapts to a few labelled samples first.

Internal clients predict as the method says (`FederatedMethod.statistics`). One that has never taken
part has nothing of its own yet: it is tested with what an unseen client receives. Validation, by
which a round is selected, is by the clients' own models as well, or by the aggregated one
(`config.validate_with`), as FedIG's server does (A.2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.federation import FederatedState, global_variables
from fedjax_bn.run.evaluation.answers import (
    Keep,
    answering,
    keep_answers,
    measures_by_client,
    percent,
)
from fedjax_bn.run.evaluation.block_evaluate import block_evaluator, in_blocks
from fedjax_bn.run.evaluation.blocks import batches_of_tests
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.evaluation.personalization import (
    adapt_clients,
    choose_personalization,
    set_aside_all,
    unchanged,
)
from fedjax_bn.run.evaluation.scoring import mean_loss, score_clients
from fedjax_bn.run.evaluation.unseen import unseen_evaluator
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.training.records import Record
from fedjax_bn.task import Task

# evaluate(state, trained bool[K], keep) -> record: who has taken part so far, all where nobody
# says, and a dict that takes what a classifier answered
Evaluate = Callable[..., Record]


def evaluator(config: ConfigDict, experiment: Experiment, task: Task | None = None) -> Evaluate:
    """Returns `evaluate(state, trained)`: scores in percent, of validation where there is one.

    Test data stay on the device where they fit (`data.device_megabytes`) and are streamed else.
    Unseen clients are left out where the configuration tests them once, when the run has ended.
    """
    internal = internal_evaluator(config, experiment, task)
    if config.eval_train_loss and not in_blocks(config, experiment):
        internal = _both(internal, _train_loss_evaluator(config, experiment, task))
    if config.eval_unseen == "once":
        return internal
    unseen = unseen_evaluator(config, experiment, task)
    return _both(internal, lambda state, trained, keep: unseen(state, keep))


def _both(one: Evaluate, other: Evaluate) -> Evaluate:
    def evaluate(
        state: FederatedState, trained: np.ndarray | None = None, keep: Keep | None = None
    ) -> Record:
        return one(state, trained, keep) | other(state, trained, keep)

    return evaluate


def internal_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Evaluate:
    """Returns `evaluate(state, trained, keep)`, each client with its model.

    The record has "accuracy", "validation" where there is one, and of classifiers "measures", see
    `run.answers`, of the test samples; `keep` takes what was answered to those.

    `trained` bool[K] says who has taken part in a round so far; None for all. Where clients are
    evaluated in blocks, the record has train_loss too if `config.eval_train_loss`.
    """
    if in_blocks(config, experiment):
        return block_evaluator(config, experiment, task)
    domains, method, mesh = experiment.internal.domains, experiment.method, experiment.mesh
    task = answering(task or experiment.task)
    score = score_clients(
        experiment.model, experiment.prepare, len(domains), task, method.statistics, mesh
    )
    view = {"validation": _aggregated if config.validate_with == "global" else unchanged}
    # Where a split serves for both, it is evaluated once.
    once = view["validation"] is unchanged
    once = once and all(domain.test is domain.validation for domain in domains)
    splits = {"accuracy": [domain.test for domain in domains]}
    if not once and all(domain.validation is not None for domain in domains):
        splits["validation"] = [domain.validation for domain in domains]
    adapt = dict.fromkeys(splits, unchanged)
    if how := choose_personalization(config, method):
        for key, parts in splits.items():
            labelled, splits[key] = set_aside_all(parts, how)
            adapt[key] = adapt_clients(
                experiment.model, experiment.prepare, how, labelled, method.statistics, mesh
            )
    limit, names = config.data.device_megabytes, [domain.name for domain in domains]
    blocks = {
        key: batches_of_tests(part, config.eval_batch_size, limit, mesh)
        for key, part in splits.items()
    }

    def evaluate(
        state: FederatedState, trained: np.ndarray | None = None, keep: Keep | None = None
    ) -> Record:
        record, state = {}, _known(state, trained)
        for key, parts in blocks.items():
            told = score(adapt[key](view.get(key, unchanged)(state)), parts())
            record[key] = by_client(names, [*map(percent, told)], config.clients_named)
            if key == "accuracy":
                record |= measures_by_client(names, told, config.clients_named)
                given = zip(names, told, splits[key], strict=True)
                keep_answers(keep, {(name, ""): (one, split) for name, one, split in given})
        if once:
            record["validation"] = record["accuracy"]
        return record

    return evaluate


def _train_loss_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None
) -> Evaluate:
    """Returns `evaluate(state, trained) -> {"train_loss": {client: mean, "mean": ...}}`.

    It is the loss that FedBN's Fig. 3 plots: over a client's training samples, after aggregation,
    with its own model in evaluation mode. Differs from the authors' code: a mean over samples, not
    over batches of which the last is smaller.
    """
    domains = experiment.internal.domains
    task = task or experiment.task
    model, prepare, rule = experiment.model, experiment.prepare, experiment.method.statistics
    task, mesh = task._replace(score=mean_loss(task)), experiment.mesh
    score = score_clients(model, prepare, len(domains), task, rule, mesh)
    splits = [domain.train for domain in domains]
    parts = batches_of_tests(splits, config.eval_batch_size, config.data.device_megabytes, mesh)
    names = [domain.name for domain in domains]

    def evaluate(
        state: FederatedState, trained: np.ndarray | None = None, keep: Keep | None = None
    ) -> Record:
        state = _known(state, trained)
        values = score(state, parts())
        return {"train_loss": by_client(names, values, config.clients_named)}

    return evaluate


@jax.jit
def _aggregated(state: FederatedState) -> FederatedState:
    """The state in which every client has the aggregated model and nothing of its own."""
    nothing = jax.tree.map(lambda leaf: None, state.personal)
    return state._replace(shared=global_variables(state), personal=nothing)


def _known(state: FederatedState, trained: np.ndarray | None) -> FederatedState:
    """The state with a model for clients that have never trained, see `_with_newcomers`."""
    return state if trained is None or trained.all() else _with_newcomers(state, trained)


@jax.jit
def _with_newcomers(state: FederatedState, trained: jax.Array) -> FederatedState:
    """The state in which clients that have never trained own what an unseen client receives."""
    num_clients = state.weights.shape[0]
    mine = jax.tree.map(lambda leaf: leaf[:num_clients], state.personal)
    mean = weighted_mean(mine, state.weights)

    def chosen(rows: jax.Array, mean: jax.Array) -> jax.Array:
        known = jnp.pad(trained, (0, rows.shape[0] - num_clients))
        return jnp.where(known.reshape(-1, *(1,) * mean.ndim), rows, mean)

    return state._replace(personal=jax.tree.map(chosen, state.personal, mean))
