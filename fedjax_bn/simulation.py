"""Trains and tests a federation on arrays, without a config file.

    result = simulate(
        fedbn(DigitCNN(), optax.sgd(0.01)),
        clients={"a": (images, labels), "b": (more_images, more_labels)},
        unseen={"z": (new_images, new_labels)},
        adaptations=["running", "tsmobn"],
    )
    print(result)

It runs the loop of the command line (`training.loop`) and returns the same numbers for the same
data. A second call with the same method, and data of the same shapes, compiles nothing. So do the
second and third seed of `seeds=3`, which prints means and standard deviations.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.arguments import ranges
from fedjax_bn.arguments.ranges import Rounds, RoundsOr0, Seed, Steps, bounded
from fedjax_bn.data.division.clients import duplicate_notes, make_clients
from fedjax_bn.data.domain import check_labels
from fedjax_bn.data.labels import VOLUME, as_labels, has_masks, join
from fedjax_bn.data.source import PARTS, Pool, Source, numbered_names, parts_of
from fedjax_bn.engine.inputs import as_images
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.normalization.calls import init_variables, shapes_of
from fedjax_bn.sharing import Variables
from fedjax_bn.task import Task, require_classifier
from fedjax_bn.training.callbacks.evaluation import Patience, Scores, Selection
from fedjax_bn.training.callbacks.profile import Profile
from fedjax_bn.training.callbacks.progress import Progress
from fedjax_bn.training.evaluation.evaluate import batch_accuracy, evaluator
from fedjax_bn.training.experiment import (
    Evaluation,
    Experiment,
    LocalWork,
    Participation,
    Plan,
    personalization_of,
)
from fedjax_bn.training.loop import train
from fedjax_bn.training.mesh import cpu_mesh, cpu_note, on_first_device
from fedjax_bn.training.programs import made_once
from fedjax_bn.training.records import Record, have_trained, samples_a_round, summarize
from fedjax_bn.training.result import Result
from fedjax_bn.training.rounds import open_rounds, recorded_round
from fedjax_bn.training.start import make_keys, make_start, sample_input

_VALIDATION = 0.1  # of each class, as `config.data.validation`
Samples = tuple[np.ndarray, Any]
# A client's samples, or a dict of them with "train" and optionally "validation" and "test".
ClientSamples = Samples | Mapping[str, Samples]


@bounded
def simulate(
    method: FederatedMethod,
    *,
    clients: Mapping[str, ClientSamples],
    unseen: Mapping[str, ClientSamples] | None = None,
    adaptations: Sequence[str] = ("running",),
    statistics: Literal["running", "precise"] = "running",
    rounds: Rounds = 20,
    batch_size: ranges.Samples = 32,
    eval_every: Rounds = 5,
    patience: RoundsOr0 = 0,
    seed: Seed = 0,
    seeds: Steps = 1,
    variables: Variables | None = None,
    callbacks: Sequence[Any] = (),
    profile: tuple[int, str | os.PathLike[str]] | None = None,
    show_progress: bool = True,
) -> Result:
    """Trains a federation on arrays, tests it, and keeps the round with the best validation.

    A client given as (images, labels) is divided as the command line divides an `.npz`: a tenth of
    each class is for both validation and test. Slices of one volume are never separated.

    On a CPU clients train side by side, on devices that JAX gets here if it has not started. A
    method made with `clients="map"` trains one client after another.

    Args:
      method: a method of `fedjax_bn.methods`, for example `fedbn(model, optimizer)`, or
        `fedbn(UNet(), optimizer, task=segmentation(2))` for masks.
      clients: name -> (images, labels), or name -> {"train": ..., "validation": ..., "test": ...}
        with such a pair for each part. Images are u8[N, H, W, C] or f32[N, ...], labels whole
        numbers [N] from 0, or masks, see `data.labels.as_labels`.
      unseen: the same for clients that do not train; each is tested on all of its samples.
      adaptations: how unseen clients predict, such as "tsmobn" or "tsmobn:momentum=0.5".
      statistics: with which clients are tested and validated: "running", as training left them,
        or "precise", see `adaptation.precise_statistics`.
      rounds: rounds of the federation, at least 1.
      batch_size: samples of a local step.
      eval_every: rounds between evaluations; the last round is always evaluated.
      patience: if above 0, rounds without a better validation accuracy before training stops.
      seed: the seed of all random numbers.
      seeds: how many seeds train in turn, seed, seed + 1 and so on; see `Result` for several. Each
        divides what is not given in parts anew, and calls the callbacks.
      variables: the model's first variables, for example pretrained; random by default.
      callbacks: are called after each round, with its state and its record, to which they may add
        entries, such as a metric of your own: see `training.loop.train`.
      profile: (round, folder): `jax.profiler` writes its trace of that round, counted from 1.
      show_progress: whether progress is printed to standard error, and a note if tested samples are
        training samples too.

    Raises:
      ValueError: a sample, name or option is wrong; the message names it.
      fedjax_bn.arguments.errors.NotFiniteError: an update is not finite.
      fedjax_bn.arguments.errors.WorkdirError: the profile cannot be written.
    """
    if seeds > 1:
        options: dict[str, Any] = {
            **{"clients": clients, "unseen": unseen, "adaptations": adaptations},
            **{"rounds": rounds, "batch_size": batch_size, "eval_every": eval_every},
            **{"patience": patience, "variables": variables, "callbacks": callbacks},
            **{"profile": profile, "show_progress": show_progress, "statistics": statistics},
        }
        results = [simulate(method, seed=seed + i, **options) for i in range(seeds)]
        return results[0]._replace(seeds=tuple(results))
    profiling = Profile(*profile or (0, ""))
    if method.learned is None:
        raise ValueError("simulate needs a method with its model, made by fedjax_bn.methods")
    model, prepare, _, task = method.learned
    if not task.segments:
        require_classifier("simulate", task)
    unseen = unseen or {}
    named = (*clients.items(), *unseen.items())
    pools = tuple(_pool(name, samples, task) for name, samples in named)
    # Counted over all clients, because one of them may lack a class.
    highest = 0 if task.segments else max((int(p.labels.max(initial=0)) for p in pools), default=0)
    count = task.segments or 1 + highest
    # The method has its own preprocessing: the source's mean and deviation are not used.
    data = Source("arrays", tuple(map(str, range(count))), pools, (0.5,), (0.5,))
    internal, unseen_domains = make_clients(
        data, target=tuple(unseen), validation=_VALIDATION, seed=seed
    )
    side_by_side = method.mesh is None and method.clients == "auto" and not method.combines
    cores = cpu_mesh(len(clients)) if side_by_side else None
    mesh = cores or method.mesh
    notes = duplicate_notes(internal, unseen_domains)
    notes += cpu_note(cores, len(clients)) if side_by_side else ()
    for note in notes if show_progress else ():
        print(note, file=sys.stderr)
    # Kept, so that a second call does not compile the same adaptation again.
    choices = {
        text: made_once(("adaptation", text, model), partial(choose_adaptation, text, model))
        for text in adaptations
    }
    experiment = Experiment(
        *(model, method, internal, unseen_domains, prepare, choices, (), Participation()),
        mesh=mesh,
        work=LocalWork(batch_size, 0, (method.local_epochs,)),
        plan=Plan("simulated", seed, rounds, patience),
        evaluation=Evaluation(
            seed=seed, statistics=statistics, personalization=personalization_of(method, seed)
        ),
        task=task,
    )
    if task.classifies:
        _check_outputs(experiment, pools)
    keys = make_keys(seed)
    state = make_start(experiment, keys, variables)()
    names, evaluate = [*clients], evaluator(experiment)
    records: list[Record] = []
    selection = Selection(records)
    # Scores come first, because later callbacks may read them.
    calls = [
        profiling,
        Scores(lambda state: evaluate(state, have_trained(records, names)), eval_every, rounds),
        Patience(patience, records),
        *([_OneDevice(callback, cores) for callback in callbacks] if cores else callbacks),
        selection,
    ]
    if show_progress:
        title, samples = f"seed {seed}", samples_a_round(experiment)
        calls.append(Progress(title, rounds, 0, samples, task.score.name))
    round = recorded_round(open_rounds(experiment, keys, state).compile(state), experiment)
    train(round, state, rounds=rounds, records=records, callbacks=calls)
    trained = have_trained(records[: int(selection.state.round)], names)
    scores = batch_accuracy(experiment, selection.state, trained)
    entries = {"batch_statistics": scores} if scores else {}
    summary = summarize(experiment, records, 0.0, **entries)
    state = on_first_device(selection.state, cores) if cores else selection.state
    return Result(method, state, tuple(names), summary, records)


class _OneDevice(AbstractContextManager):
    """Shows a user's callback the state as it is without a mesh."""

    def __init__(self, callback: Any, mesh: Mesh) -> None:
        self._mesh, self._callback, self._context = mesh, callback, ExitStack()

    def __enter__(self) -> Any:
        if isinstance(self._callback, AbstractContextManager):
            self._context.enter_context(self._callback)

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

    def on_round_begin(self, round: int) -> None:
        getattr(self._callback, "on_round_begin", lambda round: None)(round)

    def on_round_end(self, round: int, state: Any, metrics: Record) -> bool | None:
        if hook := getattr(self._callback, "on_round_end", None):
            return hook(round, on_first_device(state, self._mesh), metrics)
        return None

    def on_train_end(self, round: int, state: Any, metrics: Record) -> None:
        if hook := getattr(self._callback, "on_train_end", None):
            hook(round, on_first_device(state, self._mesh), metrics)


def _check_outputs(experiment: Experiment, pools: Sequence[Pool]) -> None:
    """Raises ValueError if a label has no output of the model; nothing is computed."""
    model = experiment.model
    images = sample_input(experiment.internal, experiment.prepare, 1)
    variables = jax.eval_shape(partial(init_variables, model), jax.random.key(0), images)
    outputs = shapes_of(model, variables, images).shape[-1]
    for pool in pools:
        if (highest := int(pool.labels.max())) >= outputs:
            raise ValueError(
                f"client {pool.name!r} has label {highest}, and the model only {outputs} outputs"
            )


def _pool(name: str, samples: ClientSamples, task: Task) -> Pool:
    """Returns a client's samples as a `Pool`, as readers of data sets do."""
    parts = dict(samples) if isinstance(samples, Mapping) else {"": samples}
    if unknown := [part for part in parts if part and part not in PARTS]:
        raise ValueError(f"client {name!r} has a part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    pixels, labels, sizes = [], [], {}
    for part, (images, targets) in parts.items():
        place = f"client {name!r} ({part or 'all'})"
        pixels.append(as_images(images, f"the images of {place}"))
        targets = as_labels(targets, f"the labels of {place}")
        if has_masks(targets) != bool(task.segments):
            kind = "masks" if has_masks(targets) else "no masks"
            raise ValueError(f"{place} has {kind}, unlike the method's task {task.score.name}")
        if task.segments:
            check_labels(targets, pixels[-1], task.segments, place)
        labels.append(targets)
        sizes[part] = len(pixels[-1])
    joined, names = join(labels), numbered_names(name, sizes)
    if task.segments and VOLUME in joined:
        names = np.array([f"{name}/{volume}" for volume in joined[VOLUME]])
    divided = parts_of(sizes) if isinstance(samples, Mapping) else None
    return Pool(name, np.concatenate(pixels), joined, names, divided)
