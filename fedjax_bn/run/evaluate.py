"""What is evaluated, between the rounds of a run and of a finished run alike.

Every internal client with its own model, every unseen one by each adaptation. Where the
configuration says so (`config.personalize`), each adapts to a few labelled samples first.

Internal clients predict as the method says (`FederatedMethod.statistics`). One that has never taken
part has nothing of its own yet: it is tested with what an unseen client receives. Validation, by
which a round is selected, is by the clients' own models as well, or by the aggregated one
(`config.validate_with`), as FedIG's server does (A.2).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.adaptation import ensemble, with_clients
from fedjax_bn.adaptation.choice import Choice
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.data.domain import Split, whole
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.run.block_evaluate import block_evaluator, in_blocks
from fedjax_bn.run.experiment import Experiment
from fedjax_bn.run.groups import by_client
from fedjax_bn.run.mesh import copies_on, over_all, own_rows, place_copies, place_own
from fedjax_bn.run.personalization import (
    adapt_clients,
    adapt_unseen,
    choose_personalization,
    set_aside,
    set_aside_all,
)
from fedjax_bn.run.population import Held, refuse_ensemble
from fedjax_bn.run.records import Record
from fedjax_bn.run.scoring import carries, mean_loss, score_clients, score_unseen
from fedjax_bn.run.scoring_data import TestData, in_order, stack_batches
from fedjax_bn.run.stream import megabytes, stream_tests
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task

# evaluate(state, trained bool[K]) -> record: who has taken part so far; all, where nobody says
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
    return _both(internal, lambda state, trained: unseen(state))


def _both(one: Evaluate, other: Evaluate) -> Evaluate:
    return lambda state, trained=None: one(state, trained) | other(state, trained)


def internal_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Evaluate:
    """Returns `evaluate(state, trained) -> {"accuracy", "validation"}`, each client with its model.

    `trained` bool[K] says who has taken part in a round so far; None for all. Where clients are
    evaluated in blocks, the record has train_loss too if `config.eval_train_loss`.
    """
    if in_blocks(config, experiment):
        return block_evaluator(config, experiment, task)
    domains, method, mesh = experiment.internal.domains, experiment.method, experiment.mesh
    task = task or experiment.task
    score = score_clients(
        experiment.model, experiment.prepare, len(domains), task, method.statistics, mesh
    )
    view = {"validation": _aggregated if config.validate_with == "global" else _unchanged}
    # Where a split serves for both, it is evaluated once.
    once = view["validation"] is _unchanged
    once = once and all(domain.test is domain.validation for domain in domains)
    splits = {"accuracy": [domain.test for domain in domains]}
    if not once and all(domain.validation is not None for domain in domains):
        splits["validation"] = [domain.validation for domain in domains]
    adapt = dict.fromkeys(splits, _unchanged)
    if how := choose_personalization(config):
        for key, parts in splits.items():
            labelled, splits[key] = set_aside_all(parts, how)
            adapt[key] = adapt_clients(
                experiment.model, experiment.prepare, how, labelled, method.statistics, mesh
            )
    limit, names = config.data.device_megabytes, [domain.name for domain in domains]
    blocks = {
        key: _blocks(part, config.eval_batch_size, limit, mesh) for key, part in splits.items()
    }

    def evaluate(state: FederatedState, trained: np.ndarray | None = None) -> Record:
        record, state = {}, _known(state, trained)
        for key, parts in blocks.items():
            values = score(adapt[key](view.get(key, _unchanged)(state)), parts())
            record[key] = by_client(names, values, config.clients_named)
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
    parts = _blocks(splits, config.eval_batch_size, config.data.device_megabytes, mesh)
    names = [domain.name for domain in domains]

    def evaluate(state: FederatedState, trained: np.ndarray | None = None) -> Record:
        state = _known(state, trained)
        values = score(state, parts())
        return {"train_loss": by_client(names, values, config.clients_named)}

    return evaluate


def unseen_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Callable[[FederatedState], Record]:
    """Returns `evaluate(state) -> {"unseen": {domain: {adaptation: percent}}}`, or {} for none."""
    if not experiment.unseen:
        return lambda state: {}
    tested = {domain.name: whole(domain) for domain in experiment.unseen}
    adapt = dict.fromkeys(tested, _unchanged)
    if how := choose_personalization(config):
        for name, split in tested.items():
            labelled, tested[name] = set_aside(split, how)
            rule = experiment.method.statistics
            adapt[name] = adapt_unseen(experiment.model, experiment.prepare, how, labelled, rule)
    limit, mesh = config.data.device_megabytes, experiment.mesh
    choices, task = experiment.adaptations, task or experiment.task
    score = adaptation_scorer(experiment.prepare, choices, tested, limit, task, mesh)
    serve = partial(served_variables, choices=choices)
    if mesh is not None:
        serve = jax.jit(serve, out_shardings=copies_on(mesh))

    def evaluate(state: FederatedState) -> Record:
        received = serve(state)
        return {"unseen": score({name: adapt[name](received) for name in tested})}

    return evaluate


def adaptation_scorer(
    prepare: Prepare,
    choices: Mapping[str, Choice],
    splits: Mapping[str, Split],
    device_megabytes: float,
    task: Task | None = None,
    mesh: Mesh | None = None,
) -> Callable[[Mapping[str, Variables]], dict[str, dict[str, float]]]:
    """Returns `score({client: variables}) -> {client: {adaptation: percent}}`.

    Args:
      prepare: stored images -> what the model reads.
      choices: text -> adaptation, with the batch size and the order of its stream.
      splits: client -> the samples it is tested on.
      device_megabytes: larger splits are streamed from the host.
      task: how outputs are judged; by default `task.classification`.
      mesh: the devices over which a client's batches are shared out; None for one. Where one
        batch depends on those before it, all devices judge all: a batch is too small to divide.
    """
    scores = {
        text: score_unseen(one.adaptation, prepare, task, mesh) for text, one in choices.items()
    }

    @cache
    def blocks(name: str, size: int, order: int, where: str) -> Callable[[], Iterable[TestData]]:
        return _blocks([in_order(splits[name], order)], size, device_megabytes, mesh, where)

    def of_client(name: str, variables: Variables) -> dict[str, float]:
        found = {}
        for text, choice in choices.items():
            where = "copies" if carries(choice.adaptation, variables) else "parts"
            where = where if mesh is not None else ""
            parts = blocks(name, choice.batch_size, choice.order, where)
            found[text] = scores[text](variables, parts())
        return found

    return lambda received: {name: of_client(name, received[name]) for name in splits}


def served_variables(state: FederatedState | Held, choices: Iterable[str]) -> Variables:
    """What an unseen client receives; the clients' batch norms too where `ensemble` is chosen.

    Raises:
      ConfigError: it is, but the clients' rows lie on the disk.
    """
    if isinstance(state, Held):
        refuse_ensemble(choices)
    variables = global_variables(state)
    if any(text.partition(":")[0] == ensemble.__name__ for text in choices):
        return with_clients(variables, client_variables(state))
    return variables


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


def _unchanged(received: Any) -> Any:
    """What a client does with its model where nothing is adapted."""
    return received


def _blocks(
    splits: Sequence[Split],
    batch_size: int,
    device_megabytes: float,
    mesh: Mesh | None = None,
    where: str = "clients",
) -> Callable[[], Iterable[TestData]]:
    """Returns `parts()`, the test batches: all of them on the device, or block after block.

    On a mesh they lie where their clients' models do ("clients"), each device has as many
    ("parts"), or all have all ("copies").
    """
    over, by_client = (None if where == "copies" else mesh), where == "clients"
    fits = megabytes(splits) <= device_megabytes * (1 if over is None else over.size)
    put = partial(place_copies, mesh=mesh) if over is None else partial(_put, over)
    if fits:
        resident = stack_batches(splits, batch_size, over, by_client)
        resident = resident if over is not None else put(resident)
        return lambda: (resident,)
    return lambda: map(put, stream_tests(splits, batch_size, device_megabytes, over, by_client))


def _put(mesh: Mesh, block: TestData) -> TestData:
    """A block of a stream, with the batches of this process's devices, on the mesh."""
    over = over_all(mesh)
    own = own_rows(mesh.size, over)
    length = len(block.client) // len(own)
    rows = (own[:, None] * length + np.arange(length)).reshape(-1)
    return place_own(rows, mesh.size * length, over, block)
