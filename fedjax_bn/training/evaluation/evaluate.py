"""Scores a federation, between rounds or after the run.

Every internal client is tested with its own model, by the method's rule, every unseen client with
each adaptation. Validation, which selects a round, uses the clients' own models or the aggregated
one (`config.validate_with`), as FedIG's server does (A.2). Both are with the statistics that
`config.statistics` names.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.adaptation import ensemble, with_clients
from fedjax_bn.adaptation.precise import batch_rule
from fedjax_bn.data.domain import Split, scored_part, whole
from fedjax_bn.data.seeds import generator
from fedjax_bn.engine.devices import apart, padded
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.models.hooks import predicting
from fedjax_bn.sharing import Variables, join, with_frozen
from fedjax_bn.state import unseen_personal
from fedjax_bn.task import Score, Task
from fedjax_bn.training.evaluation import scoring
from fedjax_bn.training.evaluation.answers import AnyAnswers, Keep, answering
from fedjax_bn.training.evaluation.statistics import reestimation
from fedjax_bn.training.experiment import Evaluation, Experiment, set_aside
from fedjax_bn.training.mesh import (
    clients_of,
    copies_on,
    on_one_device,
    own_rows,
    place_own,
    shares_memory,
)
from fedjax_bn.training.population import AnyState, PopulationState, refuse_ensemble
from fedjax_bn.training.programs import made_once
from fedjax_bn.training.records import by_client, some_of
from fedjax_bn.training.workdir import Record

# evaluate(state, trained, keep) -> record. `trained` bool[K] marks the clients that have taken part
# so far, None for all; `keep` is a dict to which answers are added, or None.
Evaluate = Callable[..., Record]
_Trained = np.ndarray | None
_BLOCK = 64  # clients, or batches, at a time, if no cohort sets the number
_SAMPLE = 5  # which of the generator's streams draws the sample


def evaluator(experiment: Experiment) -> Evaluate:
    """Returns `evaluate(state, trained, keep)`, the scores of all clients in percent."""
    measured = experiment.evaluation.eval_also
    internal = internal_evaluator(experiment, "train_loss" in measured)
    if "unseen" not in measured:  # they are tested after the run
        return internal
    unseen = unseen_evaluator(experiment)

    def evaluate(state: AnyState, trained: _Trained = None, keep: Keep | None = None) -> Record:
        return internal(state, trained, keep) | unseen(state, keep)

    return evaluate


def clients_tested(evaluation: Evaluation, num_clients: int) -> np.ndarray:
    """Returns the numbers of the clients that are evaluated, i[n], the same in every round."""
    if not evaluation.clients:
        return np.arange(num_clients)
    order = generator(evaluation.seed, 0, 0, _SAMPLE).permutation(num_clients)
    return np.sort(order[: evaluation.clients])


def internal_evaluator(experiment: Experiment, train_loss: bool = False) -> Evaluate:
    """Returns `evaluate(state, trained, keep)`, the scores of the internal clients.

    The record has "accuracy", "validation" if clients have validation samples, and "measures" of
    the answers to the test samples, which `keep` takes too; "measures_over" says over how many
    clients a measure's mean is, those where it is defined. With `train_loss` it has "train_loss",
    the loss of FedBN's Fig. 3: over a client's training samples, after aggregation, with its own
    model in evaluation mode. Differs from the authors' code: the mean is over samples, not over
    batches, of which the last is smaller.
    """
    evaluation, limit = experiment.evaluation, experiment.plan.clients_named
    tested = clients_tested(evaluation, len(experiment.internal.domains))
    domains = [experiment.internal.domains[k] for k in tested]
    names, task, size = [domain.name for domain in domains], _answering(experiment), 0
    if evaluation.clients or experiment.participation.on_host:
        # Blocks as large as a cohort, so that the device's memory does not grow with the clients.
        size = padded(min(experiment.participation.drawn or _BLOCK, len(tested)), experiment.mesh)
    scoring_of = partial(_scoring, experiment, size)
    own_models = evaluation.validate_with == "own"
    # If every client is tested on its validation samples, these are evaluated once.
    tests_validate = own_models and all(domain.test is domain.validation for domain in domains)
    tests, score = scoring_of(task, [domain.test for domain in domains])
    reestimate = None
    if evaluation.statistics == "precise":
        reestimate = reestimation(experiment, [domain.train for domain in domains], size)
    # For each score: whether clients answer with their own models, not the aggregated one.
    parts = {"accuracy": (True, score)}
    if not tests_validate and all(domain.validation is not None for domain in domains):
        parts["validation"] = own_models, scoring_of(task, [d.validation for d in domains])[1]
    if train_loss:
        mean_loss = made_once(("mean loss", experiment.task), lambda: _mean_loss(task))
        loss, train = task._replace(score=mean_loss), [domain.train for domain in domains]
        parts["train_loss"] = True, scoring_of(loss, train, adapts=False)[1]

    def tested_models(
        state: AnyState, trained: _Trained, places: np.ndarray, own_models: bool
    ) -> FederatedState:
        # The last block repeats clients, so that all blocks have one shape.
        client = tested[np.resize(places, size)] if size else None
        models = _models_of(state, client, trained, experiment.mesh, own_models)
        return reestimate(models, places) if reestimate else models

    def evaluate(state: AnyState, trained: _Trained = None, keep: Keep | None = None) -> Record:
        scores: dict[str, list[float | AnyAnswers]] = {part: [] for part in parts}
        step = size or len(tested)
        for places in np.split(np.arange(len(tested)), range(step, len(tested), step)):
            model_of = cache(partial(tested_models, state, trained, places))
            for part, (with_own_models, score) in parts.items():
                scores[part] += score(model_of(with_own_models), places)
        record: Record = {
            part: by_client(names, [getattr(score, "percent", score) for score in values], limit)
            for part, values in scores.items()
        }
        answers = scores["accuracy"]
        if isinstance(answers[0], AnyAnswers):
            rows = [answer.measures(test) for answer, test in zip(answers, tests, strict=True)]
            record["measures"], record["measures_over"] = {}, {}
            for name in rows[0]:
                values = np.array([row[name] for row in rows])
                defined = np.isfinite(values)
                if values.ndim > 1:  # counts, and limits, which have no mean
                    named = [x if all(np.isfinite(x)) else None for x in values.tolist()]
                    named = dict(zip(names, named, strict=True)) if len(names) <= limit else {}
                    record["measures"][name] = named
                    continue
                mean = {"mean": float(values[defined].mean()) if defined.any() else None}
                record["measures"][name] = by_client(names, values, limit, mean=False) | mean
                record["measures_over"][name] = int(defined.sum())
            if keep is not None:
                for k in some_of(len(names), limit) if size else range(len(names)):
                    keep[names[k], ""] = answers[k], tests[k], scored_part([domains[k]])
        if tests_validate:
            record["validation"] = record["accuracy"]
        return record

    return evaluate


def batch_accuracy(
    experiment: Experiment, state: AnyState, trained: _Trained = None
) -> Record | None:
    """Returns the internal clients' accuracy with the statistics of their test batches, if any."""
    # In random order, because batches of one class would mislead.
    domains = tuple(
        domain._replace(validation=None, test=scoring.in_order(domain.test, 0))
        for domain in experiment.internal.domains
    )
    changed = experiment._replace(
        internal=experiment.internal._replace(domains=domains),
        method=experiment.method._replace(statistics=batch_rule(experiment.method.statistics)),
        evaluation=experiment.evaluation._replace(statistics="running"),
    )
    try:
        return internal_evaluator(changed)(state, trained)["accuracy"]
    except ValueError:  # of `forward`, without batch norm, or with one that no rule reaches
        return None


def _answering(experiment: Experiment) -> Task:
    return made_once(("answering", experiment.task), lambda: answering(experiment.task))


def _steps(experiment: Experiment) -> Callable[..., Variables]:
    """Returns `steps(variables, images, labels)`: the model after a client's gradient step."""
    choice, model = experiment.evaluation.personalization, experiment.model
    options = {"prepare": experiment.prepare, "statistics": experiment.method.statistics}
    steps = partial(personalize, model, inner_rate=choice.rate, **options)
    return made_once(("steps", choice, model, *options.values()), lambda: steps)


def _mean_loss(task: Task) -> Score:
    if task.mean_loss:
        return task.mean_loss

    def of_batch(outputs: Any, label: Any, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = task.loss(outputs, label, valid)
        count = valid.sum().astype(loss.dtype)
        return loss * count, count

    return Score("loss", of_batch, lambda sums: sums[0].sum() / sums[1].sum().clip(1))


def _adapted_rows(
    steps: Callable[..., Variables], mesh: Mesh | None
) -> Callable[[FederatedState, Sequence[Split]], FederatedState]:
    """Returns `adapt(state, labelled)`, the state after each client's `steps`, on the mesh."""

    # All its leaves but frozen ones are personal. There is one labelled split for each row.
    def on_device(common: tuple, rows: tuple, _: None) -> Variables:
        shared, frozen = common

        def adapted(row: tuple) -> Variables:
            variables = steps(with_frozen(join(shared, row[0]), frozen), *row[1:])
            return with_frozen(variables, None)

        # One client after another: side by side their gradients would need K times the memory.
        return jax.lax.map(adapted, rows)

    @jax.jit
    def adapted(state: FederatedState, images: jax.Array, labels: Any) -> FederatedState:
        rows = state.personal, images, labels
        personal = apart(on_device, mesh, (state.shared, state.frozen), rows)
        nothing = jax.tree.map(lambda leaf: None, state.shared)
        return state._replace(shared=nothing, personal=personal)

    def adapt(state: FederatedState, labelled: Sequence[Split]) -> FederatedState:
        rows = [(np.asarray(split.images), split.labels) for split in labelled]
        return adapted(state, *jax.tree.map(lambda *leaves: np.stack(leaves), *rows))

    return adapt


def _scoring(
    experiment: Experiment, size: int, task: Task, splits: Sequence[Split], adapts: bool = True
) -> tuple[Sequence[Split], Callable[[FederatedState, np.ndarray], list[float | AnyAnswers]]]:
    """Returns the tested samples, and `score(state, places)` of the clients at `places`."""
    # Their models are the rows of `state`. A block has `size` clients; 0 for all at once. With
    # personalization each client `adapts` first, to samples that are not tested.
    mesh, rule, adapt = experiment.mesh, experiment.method.statistics, None
    if adapts and (personalization := experiment.evaluation.personalization):
        labelled, splits = set_aside(splits, personalization)
        steps = _steps(experiment)
        adapt = made_once(("adapt", steps, mesh), lambda: _adapted_rows(steps, mesh))
    model, prepare, rows = experiment.model, experiment.prepare, size or padded(len(splits), mesh)
    score = scoring.score_clients(model, prepare, size or len(splits), task, rule, mesh)
    batch = min(experiment.evaluation.batch_size, max(len(split.images) for split in splits))
    if not size:
        limit = experiment.plan.device_megabytes
        resident = scoring.SplitBatches(splits, batch, mesh).kept_within(limit)

    def of_places(state: FederatedState, places: np.ndarray) -> list[float | AnyAnswers]:
        if adapt:
            state = adapt(state, [labelled[k] for k in np.resize(places, rows)])
        if not size:
            return score(state, resident())
        batches = scoring.SplitBatches([splits[k] for k in places], batch, mesh, rows=size)
        return score(state, batches.blocks(_BLOCK))[: len(places)]

    return splits, of_places


def _models_of(
    state: AnyState,
    client: np.ndarray | None,
    trained: _Trained,
    mesh: Mesh | None,
    own_models: bool,
) -> FederatedState:
    """Returns a state with the models of clients (None: all), their own or the aggregated one."""
    # Clients that have never trained have what an unseen client receives.
    if isinstance(state, PopulationState):
        spread, count = clients_of(mesh), len(client)
        local_rows = own_rows(count, spread)
        read = state.rows_of(client[local_rows], ("personal",))["personal"]
        rows = place_own(local_rows, count, spread, read)
        state, has_trained = state.state, state.trained[client]
    else:
        rows = state.personal
        has_trained = np.ones(len(state.weights), bool) if trained is None else trained
        if client is not None:
            rows, has_trained = jax.tree.map(lambda leaf: leaf[client], rows), has_trained[client]
        elif not jax.tree.leaves(rows) or (own_models and has_trained.all()):
            return state
        else:  # on a mesh the rows are padded
            has_trained = np.pad(has_trained, (0, len(jax.tree.leaves(rows)[0]) - len(has_trained)))
    return _with_rows(state._replace(memory=(), weighing=()), rows, has_trained & own_models)


def variables_of_client(
    state: AnyState, client: int, trained: _Trained = None, experiment: Experiment | None = None
) -> Variables:
    """Returns the model with which an internal client is tested, before any personalization.

    It has running statistics, or precise ones of the client's training samples in `experiment`.
    """
    model = _models_of(state, np.array([client]), trained, None, True)
    if experiment:
        model = reestimation(experiment, [experiment.internal.domains[client].train], 1)(model, [0])
    return predicting(client_variables(model, 0))


@jax.jit
def _with_rows(state: FederatedState, rows: Any, has_trained: jax.Array) -> FederatedState:
    """Returns the state with the `rows` that have trained, else the mean of `state.personal`."""
    personal = jax.tree.map(lambda leaf: leaf[: state.weights.shape[0]], state.personal)
    mean = unseen_personal(personal, state.weights)

    def chosen(rows: jax.Array, mean: jax.Array) -> jax.Array:
        return jnp.where(has_trained.reshape(-1, *(1,) * mean.ndim), rows, mean)

    return state._replace(personal=jax.tree.map(chosen, rows, mean))


def unseen_evaluator(experiment: Experiment) -> Callable[..., Record]:
    """Returns `evaluate(state, keep)`, the scores of unseen domains with each adaptation.

    The record is {"unseen": {domain: {adaptation: percent}}}, and with answers "unseen_measures",
    {domain: {adaptation: {name: value}}}; or {} without unseen domains.
    """
    if not experiment.unseen:
        return lambda state, keep=None: {}
    choices, mesh, task = experiment.adaptations, experiment.mesh, _answering(experiment)
    domains = {domain.name: domain for domain in experiment.unseen}
    splits, adapt = [whole(domain) for domain in experiment.unseen], {}
    if personalization := experiment.evaluation.personalization:
        labelled, splits = set_aside(splits, personalization)
        one_client = _steps(experiment)
        steps = made_once(("adapt unseen", one_client), lambda: jax.jit(one_client))
        for name, split in zip(domains, labelled, strict=True):
            images, labels = jax.tree.map(jnp.asarray, (np.asarray(split.images), split.labels))
            adapt[name] = partial(steps, images=images, labels=labels)
    tested = dict(zip(domains, map(scoring.as_stored, splits), strict=True))
    # If each batch depends on earlier ones, every device scores the whole stream; those of a CPU
    # would take each other's time by that, so one does.
    in_order = None if shares_memory(mesh) else mesh
    score = partial(scoring.score_unseen, prepare=experiment.prepare, task=task)

    @cache  # adaptations with the same stream share its batches
    def batches(name: str, size: int, order: int, streams: bool) -> Callable[[], scoring.Blocks]:
        split, over = scoring.in_order(tested[name], order), in_order if streams else mesh
        placement: Literal["copies", "parts"] = "copies" if streams and over else "parts"
        batches = scoring.SplitBatches([split], size, over, placement)
        return batches.kept_within(experiment.plan.device_megabytes)

    serve = partial(served_variables, choices=tuple(choices))
    if mesh is not None:  # every device needs the mean of rows that are spread over all
        made = partial(jax.jit, serve, out_shardings=copies_on(mesh))
        serve = made_once(("serve", mesh, *choices), made)

    def evaluate(state: AnyState, keep: Keep | None = None) -> Record:
        received, scores, measures = serve(state), {}, {}
        for name, split in tested.items():
            variables = received
            if adapt:
                model, frozen = on_one_device((received, state.frozen), mesh)
                variables = adapt[name](model, frozen=frozen)
                if shares_memory(mesh):
                    variables = jax.device_put(variables, copies_on(mesh))
            scores[name] = {}
            for adaptation, choice in choices.items():
                streams = bool(jax.tree.leaves(jax.eval_shape(choice.adaptation.init, variables)))
                blocks = batches(name, choice.batch_size, choice.order, streams)()
                over = in_order if streams else mesh
                placed = on_one_device(variables, mesh) if over is not mesh else variables
                answer = score(choice.adaptation, mesh=over)(placed, blocks)
                if isinstance(answer, AnyAnswers):  # back in the split's own order
                    number = np.arange(len(split.images))
                    order = scoring.in_order(Split(number, number), choice.order).images
                    answer = answer.ordered(np.argsort(order))
                    if keep is not None:
                        keep[name, adaptation] = answer, split, scored_part([domains[name]])
                    values = answer.measures(split).items()
                    rows = measures.setdefault(name, {})
                    rows[adaptation] = {n: x if np.all(np.isfinite(x)) else None for n, x in values}
                scores[name][adaptation] = getattr(answer, "percent", answer)
        return {"unseen": scores} | ({"unseen_measures": measures} if measures else {})

    return evaluate


def served_variables(state: AnyState, choices: Iterable[str] = ()) -> Variables:
    """Returns what an unseen client receives, with the clients' batch norms for `ensemble`.

    ConfigError: `ensemble` is among the `choices`, but the clients' rows are on the host.
    """
    if isinstance(state, PopulationState):
        refuse_ensemble(choices)
        state = state.state
    variables = global_variables(state)
    if any(adaptation.partition(":")[0] == ensemble.__name__ for adaptation in choices):
        return with_clients(variables, client_variables(state))
    return variables
