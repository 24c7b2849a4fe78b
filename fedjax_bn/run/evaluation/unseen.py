"""Scores of unseen domains by each adaptation, with what an unseen client receives."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.adaptation import ensemble, with_clients
from fedjax_bn.adaptation.choice import Choice
from fedjax_bn.data.domain import Split, whole
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.run.evaluation.answers import (
    Answers,
    Keep,
    answering,
    as_they_lie,
    keep_answers,
    measures_of,
    percent,
)
from fedjax_bn.run.evaluation.blocks import batches_of_tests
from fedjax_bn.run.evaluation.personalization import (
    adapt_unseen,
    choose_personalization,
    set_aside,
    unchanged,
)
from fedjax_bn.run.evaluation.scoring import carries, score_unseen
from fedjax_bn.run.evaluation.scoring_data import TestData, as_stored, in_order
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.processes.mesh import copies_on
from fedjax_bn.run.training.population import Held, refuse_ensemble
from fedjax_bn.run.training.records import Record
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task


def unseen_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Callable[..., Record]:
    """Returns `evaluate(state, keep)`: what unseen domains score by each adaptation.

    The record is {"unseen": {domain: {adaptation: percent}}}, of classifiers "unseen_measures"
    too, {domain: {adaptation: {name: value}}}, see `run.answers`; or {} where nobody is unseen.
    """
    if not experiment.unseen:
        return lambda state, keep=None: {}
    tested = {domain.name: whole(domain) for domain in experiment.unseen}
    adapt = dict.fromkeys(tested, unchanged)
    if how := choose_personalization(config, experiment.method):
        for name, split in tested.items():
            labelled, tested[name] = set_aside(split, how)
            rule = experiment.method.statistics
            adapt[name] = adapt_unseen(experiment.model, experiment.prepare, how, labelled, rule)
    tested = {name: as_stored(split) for name, split in tested.items()}
    limit, mesh = config.data.device_megabytes, experiment.mesh
    choices, task = experiment.adaptations, answering(task or experiment.task)
    score = adaptation_scorer(experiment.prepare, choices, tested, limit, task, mesh)
    serve = partial(served_variables, choices=choices)
    if mesh is not None:
        serve = jax.jit(serve, out_shardings=copies_on(mesh))

    def evaluate(state: FederatedState, keep: Keep | None = None) -> Record:
        received = serve(state)
        told = score({name: adapt[name](received) for name in tested})
        for name, row in told.items():
            keep_answers(keep, {(name, text): (one, tested[name]) for text, one in row.items()})
        scores = {name: {t: percent(one) for t, one in row.items()} for name, row in told.items()}
        measures = {name: measures_of(row) for name, row in told.items()}
        return {"unseen": scores} | (
            {"unseen_measures": measures} if any(measures.values()) else {}
        )

    return evaluate


def adaptation_scorer(
    prepare: Prepare,
    choices: Mapping[str, Choice],
    splits: Mapping[str, Split],
    device_megabytes: float,
    task: Task | None = None,
    mesh: Mesh | None = None,
) -> Callable[[Mapping[str, Variables]], dict[str, dict[str, float | Answers]]]:
    """Returns `score({client: variables}) -> {client: {adaptation: percent}}`.

    Of a task of `answers.answering` it gives answers, in the order in which the samples lie.

    Args:
      prepare: stored images -> what the model reads.
      choices: text -> adaptation, with the batch size and the order of its stream.
      splits: client -> the samples it is tested on, as `scoring_data.as_stored` gives them.
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
        split = in_order(splits[name], order)
        return batches_of_tests([split], size, device_megabytes, mesh, where)

    def of_client(name: str, variables: Variables) -> dict[str, float | Answers]:
        found = {}
        for text, choice in choices.items():
            where = "copies" if carries(choice.adaptation, variables) else "parts"
            where = where if mesh is not None else ""
            parts = blocks(name, choice.batch_size, choice.order, where)
            found[text] = as_they_lie(scores[text](variables, parts()), choice.order)
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
