"""What is evaluated, between the rounds of a run and of a finished run alike.

Every internal client with its own model, every unseen one by each adaptation. Where the
configuration says so (`config.personalize`), each adapts to a few labelled samples first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.adaptation import ensemble, with_clients
from fedjax_bn.adaptation.choice import Choice
from fedjax_bn.data.domain import Split, whole
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.run.experiment import Experiment
from fedjax_bn.run.personalization import (
    adapt_clients,
    adapt_unseen,
    choose_personalization,
    set_aside,
    set_aside_all,
)
from fedjax_bn.run.records import Record
from fedjax_bn.run.scoring import score_clients, score_unseen
from fedjax_bn.run.scoring_data import TestData, in_order, stack_batches
from fedjax_bn.run.stream import megabytes, stream_tests
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task


def evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Callable[[FederatedState], Record]:
    """Returns `evaluate(state)`: scores in percent, of validation where there is one.

    Test data stay on the device where they fit (`data.device_megabytes`) and are streamed else.
    """
    internal = internal_evaluator(config, experiment, task)
    unseen = unseen_evaluator(config, experiment, task)
    return lambda state: internal(state) | unseen(state)


def internal_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Callable[[FederatedState], Record]:
    """Returns `evaluate(state) -> {"accuracy", "validation"}`, each client with its own model."""
    domains = experiment.internal.domains
    names = [domain.name for domain in domains]
    score = score_clients(experiment.model, experiment.prepare, len(domains), task)
    # Where a split serves for both, it is evaluated once.
    once = all(domain.test is domain.validation for domain in domains)
    splits = {"accuracy": [domain.test for domain in domains]}
    if not once and all(domain.validation is not None for domain in domains):
        splits["validation"] = [domain.validation for domain in domains]
    adapt = dict.fromkeys(splits, _unchanged)
    if how := choose_personalization(config):
        for key, parts in splits.items():
            labelled, splits[key] = set_aside_all(parts, how)
            adapt[key] = adapt_clients(experiment.model, experiment.prepare, how, labelled)
    limit = config.data.device_megabytes
    blocks = {key: _blocks(part, config.eval_batch_size, limit) for key, part in splits.items()}

    def evaluate(state: FederatedState) -> Record:
        record = {}
        for key, parts in blocks.items():
            values = score(adapt[key](state), parts())
            record[key] = dict(zip(names, values, strict=True)) | {"mean": float(np.mean(values))}
        if once:
            record["validation"] = record["accuracy"]
        return record

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
            adapt[name] = adapt_unseen(experiment.model, experiment.prepare, how, labelled)
    limit = config.data.device_megabytes
    score = adaptation_scorer(experiment.prepare, experiment.adaptations, tested, limit, task)

    def evaluate(state: FederatedState) -> Record:
        received = served_variables(state, experiment.adaptations)
        return {"unseen": score({name: adapt[name](received) for name in tested})}

    return evaluate


def adaptation_scorer(
    prepare: Prepare,
    choices: Mapping[str, Choice],
    splits: Mapping[str, Split],
    device_megabytes: float,
    task: Task | None = None,
) -> Callable[[Mapping[str, Variables]], dict[str, dict[str, float]]]:
    """Returns `score({client: variables}) -> {client: {adaptation: percent}}`.

    Args:
      prepare: stored images -> what the model reads.
      choices: text -> adaptation, with the batch size and the order of its stream.
      splits: client -> the samples it is tested on.
      device_megabytes: larger splits are streamed from the host.
      task: how outputs are judged; by default `task.classification`.
    """
    streams = {(choice.batch_size, choice.order) for choice in choices.values()}
    blocks = {
        (name, size, order): _blocks([in_order(split, order)], size, device_megabytes)
        for name, split in splits.items()
        for size, order in streams
    }
    scores = {text: score_unseen(one.adaptation, prepare, task) for text, one in choices.items()}

    def of_client(name: str, variables: Variables) -> dict[str, float]:
        return {
            text: scores[text](variables, blocks[name, choice.batch_size, choice.order]())
            for text, choice in choices.items()
        }

    return lambda received: {name: of_client(name, received[name]) for name in splits}


def served_variables(state: FederatedState, choices: Iterable[str]) -> Variables:
    """What an unseen client receives; the clients' batch norms too where `ensemble` is chosen."""
    variables = global_variables(state)
    if any(text.partition(":")[0] == ensemble.__name__ for text in choices):
        return with_clients(variables, client_variables(state))
    return variables


def _unchanged(received: Any) -> Any:
    """What a client does with its model where nothing is adapted."""
    return received


def _blocks(
    splits: Sequence[Split], batch_size: int, device_megabytes: float
) -> Callable[[], Iterable[TestData]]:
    """Returns `parts()`, the test batches: all of them on the device, or block after block."""
    if megabytes(splits) <= device_megabytes:
        resident = stack_batches(splits, batch_size)
        return lambda: (resident,)
    return lambda: map(jax.device_put, stream_tests(splits, batch_size, device_megabytes))
