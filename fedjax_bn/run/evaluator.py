"""What a run evaluates between rounds: every internal client, every unseen one.

Where the configuration says so (`config.personalize`), each adapts to a few labelled samples first.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.data.domain import Split, whole
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.evaluate import TestData, count_clients, count_unseen, stack_batches
from fedjax_bn.run.evaluate_run import in_order, served_variables
from fedjax_bn.run.experiment import Experiment
from fedjax_bn.run.personalization import (
    adapt_clients,
    adapt_unseen,
    choose_personalization,
    set_aside,
    set_aside_all,
)
from fedjax_bn.run.stream import megabytes, stream_tests
from fedjax_bn.run.summary import Record


def evaluator(config: ConfigDict, experiment: Experiment) -> Callable[[FederatedState], Record]:
    """Returns `evaluate(state)`: accuracies in percent, of validation where there is one.

    Test data stay on the device where they fit (`data.device_megabytes`) and are streamed else.
    """
    internal = internal_evaluator(config, experiment)
    unseen = unseen_evaluator(config, experiment)
    return lambda state: internal(state) | unseen(state)


def internal_evaluator(
    config: ConfigDict, experiment: Experiment
) -> Callable[[FederatedState], Record]:
    """Returns `evaluate(state) -> {"accuracy", "validation"}`, each client with its own model."""
    domains = experiment.internal.domains
    names = [domain.name for domain in domains]
    count = count_clients(experiment.model, experiment.prepare, len(domains))
    # Where a split serves for both, it is evaluated once.
    once = all(domain.test is domain.validation for domain in domains)
    splits = {"accuracy": [domain.test for domain in domains]}
    if not once and all(domain.validation is not None for domain in domains):
        splits["validation"] = [domain.validation for domain in domains]
    adapt = dict.fromkeys(splits, unchanged)
    if how := choose_personalization(config):
        for key, parts in splits.items():
            labelled, splits[key] = set_aside_all(parts, how)
            adapt[key] = adapt_clients(experiment.model, experiment.prepare, how, labelled)
    data = {key: blocks(config, parts, config.eval_batch_size) for key, parts in splits.items()}

    def evaluate(state: FederatedState) -> Record:
        record = {}
        for key, parts in data.items():
            tested = adapt[key](state)
            right, samples = sum(np.asarray(count(tested, block)) for block in parts())
            values = [100 * r / n for r, n in zip(right.tolist(), samples.tolist(), strict=True)]
            record[key] = dict(zip(names, values, strict=True)) | {"mean": float(np.mean(values))}
        if once:
            record["validation"] = record["accuracy"]
        return record

    return evaluate


def unseen_evaluator(
    config: ConfigDict, experiment: Experiment
) -> Callable[[FederatedState], Record]:
    """Returns `evaluate(state) -> {"unseen": {domain: {adaptation: percent}}}`, or {} for none."""
    if not experiment.unseen:
        return lambda state: {}
    kinds = {(choice.batch_size, choice.order) for choice in experiment.adaptations.values()}
    tested = {domain.name: whole(domain) for domain in experiment.unseen}
    adapt = dict.fromkeys(tested, unchanged)
    if how := choose_personalization(config):
        for name, split in tested.items():
            labelled, tested[name] = set_aside(split, how)
            adapt[name] = adapt_unseen(experiment.model, experiment.prepare, how, labelled)
    streams = {
        name: {
            (batch_size, order): blocks(config, [in_order(split, order)], batch_size)
            for batch_size, order in kinds
        }
        for name, split in tested.items()
    }
    counts = {
        text: count_unseen(choice.adaptation, experiment.prepare)
        for text, choice in experiment.adaptations.items()
    }

    def evaluate(state: FederatedState) -> Record:
        received = served_variables(state, list(counts))
        return {"unseen": {name: score_all(adapt[name](received), name) for name in streams}}

    def score_all(variables: dict, name: str) -> dict[str, float]:
        return {
            text: score(variables, text, streams[name][choice.batch_size, choice.order])
            for text, choice in experiment.adaptations.items()
        }

    def score(variables: dict, text: str, parts: Callable[[], Iterable[TestData]]) -> float:
        carry, total = experiment.adaptations[text].adaptation.init(variables), np.zeros(2)
        for block in parts():
            carry, one = counts[text](variables, carry, block)
            total = total + np.asarray(one)
        return float(100 * total[0] / total[1])

    return evaluate


def unchanged(received: Any) -> Any:
    """What a client does with its model where nothing is adapted."""
    return received


def blocks(
    config: ConfigDict, splits: Sequence[Split], batch_size: int
) -> Callable[[], Iterable[TestData]]:
    """Returns `parts()`, the test batches: all of them on the device, or block after block."""
    limit = config.data.device_megabytes
    if megabytes(splits) <= limit:
        resident = stack_batches(splits, batch_size)
        return lambda: (resident,)
    return lambda: map(jax.device_put, stream_tests(splits, batch_size, limit))
