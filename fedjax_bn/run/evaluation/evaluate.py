"""The scores of a federation, between the rounds of a run and of a finished run alike.

Every internal client is tested with its own model, every unseen one by each adaptation. Where
`config.personalize` asks for it, each adapts to a few labelled samples first.

Internal clients predict by the method's rule (`FederatedMethod.statistics`). One that has never
taken part has no leaves of its own yet: it is tested with what an unseen client receives.
Validation, which selects a round, uses the clients' own models or the aggregated one
(`config.validate_with`), as FedIG's server does (A.2).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.adaptation import ensemble, with_clients
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.data.domain import Split, whole
from fedjax_bn.data.seeds import generator
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.run.evaluation.answers import (
    Answers,
    Keep,
    Kept,
    answering,
    measures_by_client,
    measures_of,
    percent,
)
from fedjax_bn.run.evaluation.groups import by_client, some_of
from fedjax_bn.run.evaluation.personalization import (
    adapt_rows,
    adapt_unseen,
    choose_personalization,
    set_aside,
)
from fedjax_bn.run.evaluation.scoring import (
    Blocks,
    as_stored,
    batches_of_tests,
    blocks_of_tests,
    in_order,
    mean_loss,
    score_clients,
    score_unseen,
)
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.files.workdir import Record
from fedjax_bn.run.processes.mesh import clients_of, copies_on, own_rows, place_own
from fedjax_bn.run.training.population import (
    UNTOUCHED,
    Held,
    refuse_ensemble,
    rows_of_clients,
)
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task

# evaluate(state, trained bool[K], keep) -> record. `trained` marks the clients that have taken part
# so far, None for all; `keep` is a dict that takes the answers of a classifier, or None.
Evaluate = Callable[..., Record]
_BLOCK = 64  # clients, or batches, at a time where no cohort gives their number
_SAMPLE = 5  # of the generator's streams


def evaluator(config: ConfigDict, experiment: Experiment, task: Task | None = None) -> Evaluate:
    """Returns `evaluate(state, trained, keep)`, the scores of all clients in percent.

    Test data that take at most `data.device_megabytes` stay on the device; others are streamed.
    Unseen clients are left out where the configuration tests them once, when the run has ended.
    """
    internal = internal_evaluator(config, experiment, task, config.eval_train_loss)
    if config.eval_unseen == "once":
        return internal
    unseen = unseen_evaluator(config, experiment, task)

    def evaluate(
        state: FederatedState | Held, trained: np.ndarray | None = None, keep: Keep | None = None
    ) -> Record:
        return internal(state, trained, keep) | unseen(state, keep)

    return evaluate


def clients_tested(config: ConfigDict, num_clients: int) -> np.ndarray:
    """Returns the numbers of the clients that are evaluated, i[n], ascending.

    Args:
      config: `eval_clients` of them are drawn from `seed`, the same in every round; 0: all.
      num_clients: K.
    """
    if not config.eval_clients:
        return np.arange(num_clients)
    order = generator(config.seed, 0, 0, _SAMPLE).permutation(num_clients)
    return np.sort(order[: config.eval_clients])


def internal_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None, train_loss: bool = False
) -> Evaluate:
    """Returns `evaluate(state, trained, keep)`, the scores of the internal clients.

    The record has "accuracy", "validation" where there is one, and "measures" of a classifier's
    answers to the test samples (`answers.measures_of`), which `keep` takes too.

    A sample of clients (`eval_clients`), and clients whose rows are on the disk, are evaluated in
    blocks as large as a cohort, so that what is on the device does not grow with their number.

    Args:
      config: the run's.
      experiment: what it names.
      task: how outputs are judged; by default the experiment's.
      train_loss: whether the record has "train_loss" too, the loss of FedBN's Fig. 3: over a
        client's training samples, after aggregation, with its own model in evaluation mode.
        Differs from the authors' code: a mean over samples, not over batches of which the last
        is smaller.
    """
    tested = clients_tested(config, len(experiment.internal.domains))
    domains = [experiment.internal.domains[k] for k in tested]
    names, limit = [domain.name for domain in domains], config.clients_named
    task, size = answering(task or experiment.task), 0
    if config.eval_clients or experiment.participation.on_disk:
        size = padded(min(config.clients_per_round or _BLOCK, len(tested)), experiment.mesh)
    how = choose_personalization(config, experiment.method)
    scoring = partial(_scoring, config, experiment, size)

    def aside(splits: list[Split]) -> tuple[Sequence[Split], Sequence[Split]]:
        return set_aside(splits, how) if how else ((), splits)

    own = config.validate_with == "own"
    # Where a split serves for both, it is evaluated once.
    once = own and all(domain.test is domain.validation for domain in domains)
    labelled, tests = aside([domain.test for domain in domains])
    # For each score: whether a client answers with its own model, or with the aggregated one.
    parts = {"accuracy": (True, scoring(task, tests, labelled))}
    if not once and all(domain.validation is not None for domain in domains):
        labelled, rest = aside([domain.validation for domain in domains])
        parts["validation"] = own, scoring(task, rest, labelled)
    if train_loss:
        loss = task._replace(score=mean_loss(task))
        parts["train_loss"] = True, scoring(loss, [domain.train for domain in domains])

    def evaluate(
        state: FederatedState | Held, trained: np.ndarray | None = None, keep: Keep | None = None
    ) -> Record:
        found: dict[str, list[float | Answers]] = {key: [] for key in parts}
        step = size or len(tested)
        for places in np.split(np.arange(len(tested)), range(step, len(tested), step)):
            # The last block is filled up, so that all blocks have one shape.
            client = tested[np.resize(places, size)] if size else None
            models = {
                of_own: _models_of(state, client, trained, of_own, experiment)
                for of_own in {of_own for of_own, _ in parts.values()}
            }
            for key, (of_own, score) in parts.items():
                found[key] += score(models[of_own], places)
        record = {k: by_client(names, [*map(percent, one)], limit) for k, one in found.items()}
        record |= measures_by_client(names, found["accuracy"], limit)
        if once:
            record["validation"] = record["accuracy"]
        if keep is not None:
            for k in some_of(len(names), limit) if size else range(len(names)):
                if isinstance(answers := found["accuracy"][k], Answers):
                    keep[names[k], ""] = Kept(answers, tests[k])
        return record

    return evaluate


def _scoring(
    config: ConfigDict,
    experiment: Experiment,
    size: int,
    task: Task,
    splits: Sequence[Split],
    labelled: Sequence[Split] = (),
) -> Callable[[FederatedState, np.ndarray], list[float | Answers]]:
    """Returns `score(state, places)`, of the clients at these places, in the rows of the state.

    Args:
      config, experiment: as of `internal_evaluator`.
      size: clients of a block; 0 for all at once.
      task: how outputs are judged.
      splits: of all tested clients.
      labelled: the samples that each adapts to first; () where no client adapts.
    """
    model, prepare, mesh = experiment.model, experiment.prepare, experiment.mesh
    rule, rows = experiment.method.statistics, size or padded(len(splits), mesh)
    if labelled:
        how = choose_personalization(config, experiment.method)
        adapt = adapt_rows(how, model, mesh, prepare=prepare, statistics=rule)
    score = score_clients(model, prepare, size or len(splits), task, rule, mesh)
    batch = min(config.eval_batch_size, max(len(split.images) for split in splits))
    if not size:
        limit = config.data.device_megabytes
        resident = batches_of_tests(splits, batch, limit, mesh)

    def tests_of(places: np.ndarray) -> Blocks:
        if not size:
            return resident()
        return blocks_of_tests([splits[k] for k in places], batch, _BLOCK, mesh, rows=size)

    def of_places(state: FederatedState, places: np.ndarray) -> list[float | Answers]:
        if labelled:
            state = adapt(state, [labelled[k] for k in np.resize(places, rows)])
        return score(state, tests_of(places))[: len(places)]

    return of_places


def _models_of(
    state: FederatedState | Held,
    client: np.ndarray | None,
    trained: np.ndarray | None,
    own: bool,
    experiment: Experiment,
) -> FederatedState:
    """Returns a state with the models of some clients (None: all), their own or the aggregated one.

    Clients that have never trained have what an unseen client receives.
    """
    if isinstance(state, Held):
        spread = clients_of(experiment.mesh)
        here = own_rows(len(client), spread)
        read = rows_of_clients(state, client[here], ("personal",))["personal"]
        rows = place_own(here, len(client), spread, read)
        known = np.asarray(state.slots)[client] != UNTOUCHED
        common = state.state
    else:
        common, rows = state, state.personal
        known = np.ones(len(state.weights), bool) if trained is None else trained
        if client is not None:
            rows, known = jax.tree.map(lambda leaf: leaf[client], rows), known[client]
        elif not jax.tree.leaves(rows) or (own and known.all()):
            return state
        else:  # on a mesh the rows are padded
            known = np.pad(known, (0, len(jax.tree.leaves(rows)[0]) - len(known)))
    return _with_rows(common._replace(memory=(), weighing=()), rows, known & own)


@jax.jit
def _with_rows(state: FederatedState, rows: Any, known: jax.Array) -> FederatedState:
    """Returns the state whose clients have these rows where known bool[C], else their mean."""
    personal = jax.tree.map(lambda leaf: leaf[: state.weights.shape[0]], state.personal)
    mean = weighted_mean(personal, state.weights)

    def chosen(rows: jax.Array, mean: jax.Array) -> jax.Array:
        return jnp.where(known.reshape(-1, *(1,) * mean.ndim), rows, mean)

    return state._replace(personal=jax.tree.map(chosen, rows, mean))


def unseen_evaluator(
    config: ConfigDict, experiment: Experiment, task: Task | None = None
) -> Callable[..., Record]:
    """Returns `evaluate(state, keep)`: what unseen domains score by each adaptation.

    The record is {"unseen": {domain: {adaptation: percent}}}, for classifiers with
    "unseen_measures" too, {domain: {adaptation: {name: value}}}; {} without unseen domains.
    """
    if not experiment.unseen:
        return lambda state, keep=None: {}
    model, prepare, mesh = experiment.model, experiment.prepare, experiment.mesh
    choices, task = experiment.adaptations, answering(task or experiment.task)
    names, splits = [one.name for one in experiment.unseen], [*map(whole, experiment.unseen)]
    if how := choose_personalization(config, experiment.method):
        rule, (labelled, splits) = experiment.method.statistics, set_aside(splits, how)
        steps = adapt_unseen(how, model, labelled, prepare=prepare, statistics=rule)
        adapt = dict(zip(names, steps, strict=True))
    tested = dict(zip(names, map(as_stored, splits), strict=True))
    score = {
        text: score_unseen(one.adaptation, prepare, task, mesh) for text, one in choices.items()
    }

    @cache  # adaptations with the same stream share its batches
    def batches(name: str, size: int, order: int, where: str) -> Callable[[], Blocks]:
        split = in_order(tested[name], order)
        return batches_of_tests([split], size, config.data.device_megabytes, mesh, where)

    serve = partial(served_variables, choices=choices)
    if mesh is not None:  # every device needs the mean of rows that are spread over all
        serve = jax.jit(serve, out_shardings=copies_on(mesh))

    def evaluate(state: FederatedState, keep: Keep | None = None) -> Record:
        received, scores, measures = serve(state), {}, {}
        for name, split in tested.items():
            variables, found = adapt[name](received) if how else received, {}
            for text, choice in choices.items():
                # Where a batch depends on those before it, all devices judge all: a batch is too
                # small to divide.
                carry = jax.eval_shape(choice.adaptation.init, variables)
                where = "copies" if mesh is not None and jax.tree.leaves(carry) else "parts"
                parts = batches(name, choice.batch_size, choice.order, where)
                found[text] = score[text](variables, parts())
                if isinstance(found[text], Answers):
                    found[text] = _in_split_order(found[text], choice.order)
                    if keep is not None:
                        keep[name, text] = Kept(found[text], split)
            scores[name] = {text: percent(one) for text, one in found.items()}
            measures[name] = measures_of(found)
        measured = {"unseen_measures": measures} if any(measures.values()) else {}
        return {"unseen": scores} | measured

    return evaluate


def _in_split_order(answers: Answers, order: int) -> Answers:
    """Returns the answers to a split that was streamed `in_order`, in the split's own order."""
    places = in_order(Split(np.arange(len(answers.label)), answers.label), order).images
    return Answers(*(leaf[np.argsort(places)] for leaf in answers))


def served_variables(state: FederatedState | Held, choices: Iterable[str]) -> Variables:
    """Returns what an unseen client receives; with the clients' batch norms for `ensemble`.

    Raises:
      ConfigError: `ensemble` is chosen, but the clients' rows are on the disk.
    """
    if isinstance(state, Held):
        refuse_ensemble(choices)
    variables = global_variables(state)
    if any(text.partition(":")[0] == ensemble.__name__ for text in choices):
        return with_clients(variables, client_variables(state))
    return variables
