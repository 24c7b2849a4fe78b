"""Builds the `Experiment` that a configuration names, its random keys and its first state.

With `start_from` the first state has the model of a finished run. Only the arrays of its checkpoint
are read: no code that the other workdir names is imported.
"""

import hashlib
import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_bn.adaptation.choice import Choice, choose_adaptation
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.choices import naming
from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.clients import duplicate_notes
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.source import Source
from fedjax_bn.engine.images import standardize
from fedjax_bn.engine.privacy import epsilon
from fedjax_bn.federation import FederatedMethod, FederatedState
from fedjax_bn.models import pretrained
from fedjax_bn.normalization import Layer, Statistics
from fedjax_bn.normalization.calls import init_variables, normalize_with, shapes_of
from fedjax_bn.run.config import check, flatten
from fedjax_bn.run.config.choices import choice_of, closed_choice, participation_of, privacy_of
from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients, read_data
from fedjax_bn.run.experiment.method import (
    check_adaptations,
    choose_method,
    follows_rounds,
    has_own_weighing,
    local_epochs,
    method_maker,
    what_validates,
)
from fedjax_bn.run.experiment.model import (
    TASKS,
    choose_augmentation,
    choose_loading,
    choose_model,
    choose_task,
)
from fedjax_bn.sharing import Variables, filled, join, path_names
from fedjax_bn.training import checkpoint
from fedjax_bn.training.availability import read_trace
from fedjax_bn.training.experiment import (
    Evaluation,
    Experiment,
    LocalWork,
    Participation,
    Plan,
    check_labelled,
    personalization_of,
)
from fedjax_bn.training.mesh import choose_mesh, cpu_note, divide_cpu
from fedjax_bn.training.population import refuse_ensemble
from fedjax_bn.training.programs import keep_compiled
from fedjax_bn.training.start import (
    Keys,
    check_shapes,
    initial_variables,
    make_keys,
    make_start,
    sample_input,
)
from fedjax_bn.training.workdir import CLAIM, Record, read_json

_MOST_ON_DEVICE = 1000  # clients; with more, population=auto uses the host
HOLD_OUT = (
    "set config.data.validation above 0, for data that come divided config.data.split=official too"
)
TESTED_ON_VALIDATION = (
    "clients are tested on their validation samples, which also choose the round: data.test keeps "
    "others apart for the test"
)


def build(config: ConfigDict) -> Experiment:
    """Builds what a configuration names; nothing is compiled yet.

    A wrong key, and data that are missing, damaged or do not suit, are ConfigError, ValueError or
    OSError.
    """
    # All names are looked up before data are read, which may take minutes.
    check(config)
    choice_of("data.name", config.data.name, DATASETS, "config")
    for name in config.baselines:
        choose_method("baselines", name)
    model = choose_model(config.model, config.compute_dtype, config.seed, num_classes=2)
    choose_augmentation(config.data.augment, config.data.image_size)
    method_maker(config)
    closed_choice("task", config.task or "classification", TASKS, "classes")
    choose_adaptations(config, model)
    check_adaptations(config, config.adaptations)

    data = read_data(config)
    internal, unseen = configured_clients(data, config)
    notes = data.notes if isinstance(data, Source) else ()
    if any(domain.test is domain.validation for domain in internal.domains):
        notes += (TESTED_ON_VALIDATION,)
    _check_clients(internal, config)
    experiment = assemble(config, internal, unseen, notes + duplicate_notes(internal, unseen))
    check_labelled(experiment.evaluation.personalization, internal, unseen)
    if experiment.participation.on_host:
        refuse_ensemble(config.adaptations)
    trace = read_trace(participation_of(config).trace, len(internal.domains))
    # Not in `assemble`: a finished run is tested without its trace, which may be gone.
    experiment = experiment._replace(participation=experiment.participation._replace(trace=trace))
    with naming(f"config.model={brief(config.model)}"):
        _check_batch_sizes(experiment)
    return experiment


def assemble(
    config: ConfigDict,
    internal: Dataset,
    unseen: tuple[Domain, ...],
    notes: tuple[str, ...] = (),
    **options: Any,
) -> Experiment:
    """Builds what a configuration names except its data; raises ConfigError, ValueError.

    `options` are of the method, besides those that the configuration names.
    """
    # Clients that sit out a round are not shared out.
    rows = config.clients_per_round or len(internal.domains)
    divide_cpu(config.mesh.clients, config.mesh.batch, rows)  # before JAX starts
    model = choose_model(config.model, config.compute_dtype, config.seed, internal.num_classes)
    to_inputs = standardize(internal.mean, internal.std)
    load = choose_loading(config.data.augment, config.data.image_size, internal)
    images = sample_input(internal, to_inputs, 1)
    task = choose_task(config, model, internal, images)
    method = method_maker(config)(model, to_inputs, load, task, **options)
    spread = config.clients == "auto" and not method.combines
    mesh = choose_mesh(config.mesh.clients, config.mesh.batch, rows, config.batch_size, spread)
    on_cores = spread and not (config.mesh.clients or config.mesh.batch)
    notes += cpu_note(mesh, rows) if on_cores and mesh is None else ()
    replaced = (f"weigh={config.weigh} replaces the own weights of {config.method}",)
    replaced *= bool(config.weigh) and has_own_weighing(config.method)
    return Experiment(
        model=model,
        method=method,
        internal=internal,
        unseen=unseen,
        prepare=to_inputs,
        adaptations=choose_adaptations(config, model),
        notes=notes + method.notes + replaced,
        mesh=mesh,
        task=task,
        **read_values(config, method, len(internal.domains)),
    )


def choose_adaptations(config: ConfigDict, model: Any) -> dict[str, Choice]:
    """Returns how unseen clients predict, by the texts of `config.adaptations`."""
    size = config.adapt_batch_size
    return {text: choose_adaptation(text, model, size) for text in config.adaptations}


def read_values(config: ConfigDict, method: FederatedMethod, num_clients: int) -> dict[str, Any]:
    """Returns the fields of `Experiment` that come straight from the configuration, by name."""
    flat = dict(flatten(config))
    values = {name: flat[name] for name in Plan._fields if name in flat}
    values |= {"device_megabytes": config.data.device_megabytes, "keys": flat}
    values |= {"follows": follows_rounds(config)}
    values |= {"privacy": partial(describe_privacy, config, num_clients)}  # the key is a text
    return {
        "participation": choose_participation(config, num_clients),
        "work": LocalWork(config.batch_size, config.local_steps, local_epochs(config)),
        "plan": Plan(**values),
        "evaluation": read_evaluation(config, method),
        "validates": what_validates(config),
    }


def choose_participation(config: ConfigDict, num_clients: int) -> Participation:
    """Returns who takes part by `clients_per_round`, `participation` and `population`; no trace."""
    choice, drawn = participation_of(config), config.clients_per_round
    many = config.population == "auto" and num_clients > _MOST_ON_DEVICE
    # Without clients that sit out there are no rows to keep off the device.
    on_host = 0 < drawn < num_clients and (many or config.population == "host")
    return Participation(drawn, choice.draw, choice.dropout, None, on_host)


def read_evaluation(config: ConfigDict, method: FederatedMethod) -> Evaluation:
    """Returns how clients are tested; an empty `personalize_samples` takes the method's samples."""
    return Evaluation(
        batch_size=config.eval_batch_size,
        clients=config.eval_clients,
        seed=config.seed,
        eval_also=config.eval_also,
        validate_with=config.validate_with,
        statistics=config.statistics,
        personalization=personalization_of(method, config.seed, config.personalize_samples),
    )


def describe_privacy(config: ConfigDict, clients: int, rounds: int) -> Record:
    """Returns {"privacy": ...} for config.json and summary.json; {} if nothing is clipped.

    Without noise epsilon is unbounded, and its entry is null. Noise needs dp-accounting.
    """
    choice, drawn = privacy_of(config), config.clients_per_round
    if not choice:
        return {}
    # Sampling hides a client only if the cohort is drawn at random and the server does not know it.
    draw, dropout, trace = participation_of(config)
    random = draw == "uniform" and not dropout and not trace
    hides = random and choice.at == "server" and 0 < drawn < clients
    cohort = (drawn, clients) if hides else ()
    with as_config_errors():
        spent = epsilon(choice.noise, rounds, choice.delta, cohort) if choice.noise else None
    neighbours = "a client's data replaced" if cohort else "with or without a client"
    values = {key: getattr(choice, key) for key in ("clip", "noise", "at", "delta")}
    return {"privacy": values | {"epsilon": spent, "rounds": rounds, "neighbours": neighbours}}


def _check_clients(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if the configuration does not suit the clients and their samples."""
    domains, drawn, tested = internal.domains, config.clients_per_round, config.eval_clients
    total, images, size = len(domains), domains[0].train.images, config.data.image_size
    side = images.shape[1] if images.ndim == 4 else size
    epochs = len(config.client_epochs) or total
    without = next((domain.name for domain in domains if domain.validation is None), "")
    choosing = what_validates(config).removeprefix("config.")
    choosing = choosing or f"patience={config.patience}" * bool(config.patience)
    choosing = choosing or "validate_with=global" * (config.validate_with == "global")
    problems = {
        f"data.image_size={size}, but images have {side} pixels a side: set it to {side}, or "
        f"scale them": (side != size),
        f"client_epochs has {epochs} numbers for {total} clients": epochs != total,
        f"clients_per_round={drawn} is more than the {total} clients there are": drawn > total,
        f"eval_clients={tested} is more than the {total} clients there are": tested > total,
        f"population=host keeps clients off the device that sit out: clients_per_round={drawn} "
        f"must be above 0 and below {total}": config.population == "host" and not 0 < drawn < total,
        f"{choosing} needs validation samples, but client {without!r} has none: {HOLD_OUT}": (
            choosing and without
        ),
    }
    for problem, occurs in problems.items():
        if occurs:
            raise ConfigError(f"config.{problem}")


def _check_batch_sizes(experiment: Experiment) -> None:
    """Raises ConfigError if a batch of one sample gives a batch norm one value per channel."""
    batch_size, steps, _ = experiment.work
    # The last batch of an epoch holds what is left; steps repeat samples to fill every batch.
    alone = [
        domain.name
        for domain in experiment.internal.domains
        if ((not steps and len(domain.train.images) % batch_size) or batch_size) == 1
    ]
    if alone and (layer := _layer_of_one_value(experiment)):
        raise ConfigError(
            f"config.batch_size={batch_size} leaves client {alone[0]!r} a batch of one sample, "
            f"which the batch norm {layer!r} cannot normalize: choose another"
        )


def _layer_of_one_value(experiment: Experiment) -> str:
    """Returns a batch norm that has one value per channel of one sample; "" for none."""
    model, images = experiment.model, sample_input(experiment.internal, experiment.prepare, 1)
    variables = jax.eval_shape(partial(init_variables, model), jax.random.key(0), images)
    names = []

    # A statistics rule sees the input of every batch norm while the model is traced.
    def note(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        names.extend([layer.name] * (x.size == x.shape[-1]))
        return Statistics(layer.mean, layer.var)

    with normalize_with(note):
        shapes_of(model, variables, images)
    return next(iter(names), "")


def prepare(
    config: ConfigDict,
    make: Callable[[ConfigDict], Experiment] = build,
    traced: bool = True,
    clients: int = 0,
) -> tuple[Experiment, Keys, Callable[[], FederatedState]]:
    """Builds the experiment, the keys and a function that makes the state before the first round.

    `traced` checks the configuration by tracing a round, which takes a second or more. `clients` is
    K if the experiment has only one of them and the state only one row; else 0. What cannot be used
    is a ConfigError.
    """
    keep_compiled(config.compilation_cache)
    sizes = (min(clients, 1), clients)
    with as_config_errors():
        experiment = make(config)
        keys = make_keys(config.seed)
        if traced:
            check_shapes(experiment, make_start(experiment, keys, None, *sizes), clients)
        fixed, notes = _load_weights(experiment)
        start = make_start(experiment, keys, fixed, *sizes)
        if experiment.participation.on_host:
            _check_rows_alike(experiment, keys)
        return experiment._replace(notes=experiment.notes + notes), keys, start


def _check_rows_alike(experiment: Experiment, keys: Keys) -> None:
    # On the host all clients start with one row, which is right only if it is everybody's.
    start = make_start(experiment, keys, rows=len(experiment.internal.domains))
    for leaf in jax.tree.leaves(jax.jit(lambda: start().weighing)()):
        if (leaf != leaf[:1]).any():
            raise ConfigError("config.weigh has a memory by client: set population=device")


def _load_weights(experiment: Experiment) -> tuple[Variables | None, tuple[str, ...]]:
    """Returns the variables from `start_from` or `pretrained` (None for others), and notes."""
    network, plan = inspect.unwrap(experiment.model), experiment.plan
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    if plan.start_from:
        note = f"all clients start from the model of the run {plan.start_from} (start_from)"
        return _starting_model(plan.start_from, plan.model, like), (note,)
    if not plan.pretrained:
        return None, ()
    # Leaves that the weights lack, such as another head, stay forms, and are drawn by the seed.
    variables, notes = pretrained.load_pretrained(plan.pretrained, network, like)
    drawn = jax.ShapeDtypeStruct
    fixed = jax.tree.map(lambda x: None if isinstance(x, drawn) else jnp.asarray(x), variables)
    return fixed, notes


def _starting_model(start_from: str, model: str, like: Variables) -> Variables:
    """Returns the collections of `like` from the selected round of the run `config.start_from`."""
    # They are what an unseen client would receive: the shared leaves, and the mean of the personal
    # leaves with the last round's weights. The clients' memory, and what the other method trained
    # in addition to the model, are left out.
    tree = checkpoint.all_arrays(_selected_checkpoint(start_from))
    tree = tree.get("state", tree)  # a population has its rows in other files
    count = len(tree["weights"])
    personal = jax.tree.map(lambda leaf: jnp.asarray(leaf[:count]), tree["personal"])
    loaded = join(tree["shared"], weighted_mean(personal, tree["weights"]))
    loaded = filled(loaded, tree.get("frozen") or ())
    loaded = {name: loaded.get(name) for name in like}
    loaded_shapes, model_shapes = (
        {"/".join(path_names(p)): leaf.shape for p, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (loaded, like)
    )
    if differing := dict(loaded_shapes.items() ^ model_shapes.items()):
        name = min(differing)
        saved, needed = (shapes.get(name, "nothing") for shapes in (loaded_shapes, model_shapes))
        raise ConfigError(
            f"config.start_from={brief(start_from)} holds another model than "
            f"config.model={brief(model)}: {name} is {saved} there and {needed} here"
        )
    return jax.tree.map(lambda leaf, form: jnp.asarray(leaf, form.dtype), loaded, like)


def starting_record(start_from: str) -> Record:
    """Returns {"start_from": {"round", "sha256"}} for config.json, or {} without a start."""
    if not start_from:
        return {}
    folder = _selected_checkpoint(start_from)
    digest = hashlib.sha256((folder / checkpoint.CHECKSUMS).read_bytes()).hexdigest()
    return {"start_from": {"round": int(folder.name), "sha256": digest}}


def _selected_checkpoint(start_from: str) -> Path:
    """Returns the folder of a finished run's selected checkpoint, or of its latest one."""
    workdir = Path(os.path.expanduser(start_from))
    if (workdir / "summary.json").exists():
        read_json(workdir / "config.json", CLAIM)
        for kind in ("selected", "latest"):
            names = (path.name for path in (workdir / "checkpoints" / kind).glob("*"))
            if rounds := [int(name) for name in names if name.isdecimal()]:
                return workdir / "checkpoints" / kind / str(max(rounds))
    raise ConfigError(f"config.start_from: {workdir} is not a finished run with a checkpoint")
