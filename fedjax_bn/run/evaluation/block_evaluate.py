"""Evaluation of many clients, or of a sample of them: block after block, each as large as a cohort.

The numbers are those of `run.evaluate`, of which these are parts; what lies on the device at a time
does not grow with the number of clients.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.data.domain import Split
from fedjax_bn.data.seeds import generator
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.evaluation.answers import (
    Keep,
    answering,
    keep_answers,
    measures_by_client,
    percent,
)
from fedjax_bn.run.evaluation.groups import by_client, some_of
from fedjax_bn.run.evaluation.personalization import (
    adapt_rows,
    choose_personalization,
    set_aside_all,
    stack_labelled,
)
from fedjax_bn.run.evaluation.scoring import mean_loss, score_clients
from fedjax_bn.run.evaluation.scoring_data import TestData, batch_places, read_batch, shared_out
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.processes.mesh import clients_of, over_all, own_rows, place_own, place_rows
from fedjax_bn.run.training.population import Held, on_disk, rows_of_clients
from fedjax_bn.run.training.records import Record
from fedjax_bn.run.training.row_store import UNTOUCHED
from fedjax_bn.task import Task

_BLOCK = 64  # clients, or batches, at a time where no cohort says how many
_SAMPLE = 5  # of the generator's streams
_Score = Callable[[FederatedState, Sequence[Split]], list[float]]


def in_blocks(config: ConfigDict, experiment: Experiment) -> bool:
    """Whether clients are evaluated in blocks: where their rows lie on the disk, or by a sample."""
    return bool(config.eval_clients) or on_disk(config, len(experiment.internal.domains))


def clients_tested(config: ConfigDict, num_clients: int) -> np.ndarray:
    """The numbers of the clients that are evaluated, i[n], ascending.

    Args:
      config: `eval_clients` of them are drawn from `seed`, the same in every round; 0: all.
      num_clients: K.
    """
    if not config.eval_clients:
        return np.arange(num_clients)
    order = generator(config.seed, 0, 0, _SAMPLE).permutation(num_clients)
    return np.sort(order[: config.eval_clients])


def block_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Callable[..., Record]:
    """As `evaluate.internal_evaluator`, and train_loss too where `config.eval_train_loss`."""
    domains, task = experiment.internal.domains, answering(task or experiment.task)
    tested = clients_tested(config, len(domains))
    mine = [domains[k] for k in tested]
    parts = {"accuracy": [domain.test for domain in mine]}
    once = config.validate_with == "own" and all(d.test is d.validation for d in mine)
    if not once and all(domain.validation is not None for domain in mine):
        parts["validation"] = [domain.validation for domain in mine]
    score = {key: _scorer(config, experiment, task, splits) for key, splits in parts.items()}
    if config.eval_train_loss:
        parts["train_loss"] = [domain.train for domain in mine]
        loss = task._replace(score=mean_loss(task))
        score["train_loss"] = _scorer(config, experiment, loss, parts["train_loss"], adapt=False)
    own = {key: key != "validation" or config.validate_with == "own" for key in parts}
    size = _block_size(config, len(tested), experiment.mesh)

    def evaluate(
        state: FederatedState | Held, trained: np.ndarray | None = None, keep: Keep | None = None
    ) -> Record:
        values = {key: [] for key in parts}
        for places in np.split(np.arange(len(tested)), range(size, len(tested), size)):
            client = tested[np.resize(places, size)]  # the last block is filled up, for one shape
            models = {
                flag: _models_of(state, client, trained, own=flag, mesh=experiment.mesh)
                for flag in {*own.values()}
            }
            for key, splits in parts.items():
                values[key] += score[key](models[own[key]], [splits[k] for k in places])
        names = [domain.name for domain in mine]
        record = {
            key: by_client(names, [*map(percent, found)], config.clients_named)
            for key, found in values.items()
        }
        record |= measures_by_client(names, values["accuracy"], config.clients_named)
        shown = some_of(len(names), config.clients_named)
        given = [(names[k], values["accuracy"][k], parts["accuracy"][k]) for k in shown]
        keep_answers(keep, {(name, ""): (one, split) for name, one, split in given})
        return record | ({"validation": record["accuracy"]} if once else {})

    return evaluate


def _block_size(config: ConfigDict, tested: int, mesh: Mesh | None) -> int:
    return padded(min(config.clients_per_round or _BLOCK, tested), mesh)


def _models_of(
    state: FederatedState | Held,
    client: np.ndarray,
    trained: np.ndarray | None,
    own: bool,
    mesh: Mesh | None,
) -> FederatedState:
    """A state with the models of some clients: their own, or all the aggregated one.

    Who has never trained has what an unseen client receives.
    """
    if isinstance(state, Held):
        here = own_rows(len(client), clients_of(mesh))
        read = rows_of_clients(state, client[here], ("personal",))["personal"]
        rows = place_own(here, len(client), clients_of(mesh), read)
        known = np.asarray(state.slots)[client] != UNTOUCHED
        common = state.state
    else:
        rows = jax.tree.map(lambda leaf: leaf[client], state.personal)
        known = np.ones(len(client), bool) if trained is None else trained[client]
        common = state
    common = common._replace(memory=(), weighing=())
    return _joined(common, rows, known & own)


@jax.jit
def _joined(state: FederatedState, rows: Any, known: jax.Array) -> FederatedState:
    clients = state.weights.shape[0]
    personal = jax.tree.map(lambda leaf: leaf[:clients], state.personal)
    mean = weighted_mean(personal, state.weights)

    def chosen(rows: jax.Array, mean: jax.Array) -> jax.Array:
        return jnp.where(known.reshape(-1, *(1,) * mean.ndim), rows, mean)

    return state._replace(personal=jax.tree.map(chosen, rows, mean))


def _scorer(
    config: ConfigDict,
    experiment: Experiment,
    task: Task,
    splits: Sequence[Split],
    adapt: bool = True,
) -> _Score:
    """Returns `score(state, splits)`: of the clients of a block, whose rows the state begins with.

    Args:
      config: the run's.
      experiment: what it names.
      task: how outputs are judged.
      splits: of all clients that will be tested.
      adapt: whether they adapt first, where the configuration says so.
    """
    model, prepare, rule = experiment.model, experiment.prepare, experiment.method.statistics
    how, mesh = (
        choose_personalization(config, experiment.method) if adapt else None,
        experiment.mesh,
    )
    steps = adapt_rows(model, prepare, how, rule, mesh) if how else None
    size = _block_size(config, len(splits), mesh)
    score = score_clients(model, prepare, size, task, rule, mesh)
    batch = min(config.eval_batch_size, max(len(split.images) for split in splits))

    def of_block(state: FederatedState, splits: Sequence[Split]) -> list[float]:
        count = len(splits)
        splits = [splits[k % count] for k in range(size)]
        if how:
            labelled, splits = set_aside_all(splits, how)
            state = steps(state, *stack_labelled(labelled))
        return score(state, blocks_of_tests(splits[:count], batch, _BLOCK, size, mesh))[:count]

    return of_block


def blocks_of_tests(
    splits: Sequence[Split], batch_size: int, length: int, rows: int = 0, mesh: Mesh | None = None
) -> Iterator[TestData]:
    """Test batches in blocks of one shape on the device; the last one ends with empty batches.

    Args:
      splits: of the clients.
      batch_size: B.
      length: batches of a block, on each device.
      rows: of the state that answers, at least one a client; by default as many.
      mesh: the devices over which these rows are shared out; None for one.
    """
    parts = shared_out(batch_places(splits, batch_size), rows or len(splits), mesh, by_client=True)
    over = None if mesh is None else over_all(mesh)
    for start in range(0, max(map(len, parts)), length):

        def read(first: int, stop: int, start: int = start) -> TestData:
            some = parts[first // length][start : start + length]
            nothing = (0, splits[0], len(splits[0].images))
            filled = some + [nothing] * (stop - first - len(some))
            batches = [read_batch(split, place, batch_size) for _, split, place in filled]
            images, labels, valid = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
            client = np.array([k for k, _, _ in filled], np.int32)
            return TestData(images, labels, valid, client, np.arange(length, dtype=np.int32))

        yield place_rows(read, len(parts) * length, over)
