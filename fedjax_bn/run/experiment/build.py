"""Builds what a configuration names and checks it: data, model, method and adaptations.

A run reads the configuration's values from the resulting `Experiment`.
"""

from functools import partial

import jax
from ml_collections import ConfigDict

from fedjax_bn import sharing
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.arguments.choices import naming
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.duplicates import duplicate_notes
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.source import Source
from fedjax_bn.engine.devices import check_strategy
from fedjax_bn.engine.images import standardize
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import Layer, Statistics, calls
from fedjax_bn.run.config.keys import check, choice_of
from fedjax_bn.run.experiment.datasets import DATASETS, check_data_keys, configured_clients
from fedjax_bn.run.experiment.method import (
    check_adaptations,
    choose_method,
    local_epochs,
    method_maker,
    what_validates,
)
from fedjax_bn.run.experiment.read_values import read_values
from fedjax_bn.run.experiment.task import (
    choose_augmentation,
    choose_loading,
    choose_task,
    model_maker,
)
from fedjax_bn.tasks.detection import Recipe
from fedjax_bn.training.availability import kept_on_host, read_trace
from fedjax_bn.training.experiment import Experiment, check_labelled
from fedjax_bn.training.mesh import choose_mesh
from fedjax_bn.training.population import refuse_ensemble
from fedjax_bn.training.start import sample_input

_MOST_DRAWS = 2**28  # samples in a round: 2 GB of numbers
HOLD_OUT = (
    "set config.data.validation above 0, for data that come divided config.data.split=official too"
)
TESTED_ON_VALIDATION = (
    "clients are tested on their validation samples, which also choose the round: data.test keeps "
    "others apart for the test"
)


def build(config: ConfigDict) -> Experiment:
    """Builds what a configuration names; nothing is compiled yet.

    Raises:
      ConfigError: a key has an unknown name or an impossible value.
      ValueError, FileNotFoundError: the data are missing, damaged or do not suit.
    """
    # All names are looked up before data are read, which may take minutes.
    check(config)
    load, options = choice_of("data.name", config.data.name, DATASETS, ("config",))
    check_data_keys(config)
    for name in config.baselines:
        choose_method("baselines", name)
    model = model_maker(config.model, config.compute_dtype, config.seed)(num_classes=2)
    choose_augmentation(config.data.augment, config.data.image_size)
    method_maker(config)
    for adaptation in config.adaptations:
        choose_adaptation(adaptation, model, config.adapt_batch_size)
    check_adaptations(config, config.adaptations)

    data = load(config, **options)
    internal, unseen = configured_clients(data, config)
    notes = data.notes if isinstance(data, Source) else ()
    if config.data.truncate:
        notes += (
            "the training and validation samples of every domain are cut to those of the smallest "
            "(data.truncate)",
        )
    if any(domain.test is domain.validation for domain in internal.domains):
        notes += (TESTED_ON_VALIDATION,)
    notes += duplicate_notes(internal, unseen)
    _check_clients(internal, config)
    experiment = assemble(config, internal, unseen, notes)
    check_labelled(experiment.evaluation.personalization, internal, unseen)
    trace = read_trace(config.participation.trace, len(internal.domains))
    # Not in `assemble`: a finished run is tested without its trace, which may be gone.
    experiment = experiment._replace(participation=experiment.participation._replace(trace=trace))
    with naming(f"config.model={brief(config.model)}"):
        _check_batch_sizes(experiment)
    return experiment


def assemble(
    config: ConfigDict, internal: Dataset, unseen: tuple[Domain, ...], notes: tuple[str, ...] = ()
) -> Experiment:
    """Builds what a configuration names except its data, for these clients and unseen domains.

    Raises:
      ConfigError, ValueError: as `build`.
    """
    model = model_maker(config.model, config.compute_dtype, config.seed)(internal.num_classes)
    prepare = standardize(internal.mean, internal.std)
    load = choose_loading(config.data.augment, config.data.image_size, internal)
    images = sample_input(internal, prepare, 1)
    gains = Recipe(classes=config.detection.classes)
    nested = config.segmentation.nested
    task = choose_task(config.model, model, internal, images, gains, nested)
    rows = config.clients_per_round or len(internal.domains)
    mesh = choose_mesh(config.mesh.clients, config.mesh.batch, rows, config.batch_size)
    method = method_maker(config)(model, prepare, load, task, mesh)
    choices = {
        adaptation: choose_adaptation(adaptation, model, config.adapt_batch_size)
        for adaptation in config.adaptations
    }
    notes += method.notes
    sizes = {domain.name: len(domain.train.images) for domain in internal.domains}
    small_clients = [f"{name} ({size})" for name, size in sizes.items() if size < config.batch_size]
    if config.local_steps and small_clients:
        notes += (
            f"a step's batch of {config.batch_size} repeats samples of clients that have fewer: "
            f"{first_few(small_clients)}",
        )
    values = read_values(config, method, len(internal.domains))
    return Experiment(
        model, method, internal, unseen, prepare, choices, notes, mesh=mesh, task=task, **values
    )


def _check_clients(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if the configuration does not suit the clients and their samples."""
    domains, total, drawn = internal.domains, len(internal.domains), config.clients_per_round
    images = domains[0].train.images
    if images.ndim == 4 and images.shape[1] != config.data.image_size:
        raise ConfigError(
            f"config.data.image_size={config.data.image_size}, but images of {internal.name} have "
            f"{images.shape[1]} pixels a side: set it to {images.shape[1]}"
        )
    check_strategy(config.clients, total)
    if config.client_epochs and len(config.client_epochs) != total:
        raise ConfigError(
            f"config.client_epochs has {len(config.client_epochs)} numbers for {total} clients: "
            "give one for each"
        )
    for key in ("clients_per_round", "eval_clients"):
        if config[key] > total:
            raise ConfigError(
                f"config.{key}={config[key]} is more than the {total} clients there are: use 0 for "
                "all of them"
            )
    if config.population == "host" and not 0 < drawn < total:
        raise ConfigError(
            "config.population='host' keeps clients off the device that sit out, but with "
            f"clients_per_round={drawn} all {total} take part: lower clients_per_round, or set "
            "population=device"
        )
    if kept_on_host(config.population, drawn, total):
        refuse_ensemble(config.adaptations)
    longest = max(len(domain.train.images) for domain in domains)
    samples = config.local_steps * config.batch_size or max(local_epochs(config)) * longest
    samples *= drawn or total
    if samples > _MOST_DRAWS:
        raise ConfigError(
            f"a round of {drawn or total} clients would draw {samples} samples, but it can draw "
            f"{_MOST_DRAWS} at most: lower config.local_steps, config.local_epochs, "
            "config.client_epochs or config.batch_size"
        )
    without = [domain.name for domain in domains if domain.validation is None]
    choosing = {
        what_validates(config): "leave that key out",
        f"config.patience={config.patience}" * bool(config.patience): "patience=0",
        "config.validate_with=global" * (config.validate_with == "global"): "validate_with=own",
    }
    for key, remedy in choosing.items():
        if key and without:
            raise ConfigError(
                f"{key} needs validation samples, but client {without[0]!r} of {internal.name} has "
                f"none: {HOLD_OUT}, or {remedy}"
            )


def _check_batch_sizes(experiment: Experiment) -> None:
    """Raises ConfigError if a batch of one sample gives a batch norm one value per channel."""
    internal, (batch_size, steps, _) = experiment.internal, experiment.work
    for domain in internal.domains:
        size = len(domain.train.images)
        last_batch = batch_size if steps else (size % batch_size or batch_size)
        if last_batch == 1:
            break
    else:
        return

    def refuse_one(layer: Layer, x: jax.Array, valid: None) -> Statistics:
        if x.size == x.shape[-1]:
            raise ConfigError(
                f"client {domain.name!r} has {size} training samples, so with config.batch_size="
                f"{batch_size} a batch holds one sample, which the batch norm "
                f"{layer.name!r} cannot normalize: choose another batch_size"
            )
        return Statistics(layer.mean, layer.var)

    model, images = experiment.model, sample_input(internal, experiment.prepare, 1)
    make_variables = partial(calls.initial_variables, model)
    variables = jax.eval_shape(make_variables, jax.random.key(0), images)
    if sharing.batch_norm_paths(variables):
        passed = partial(forward, model, statistics=refuse_one)
        jax.eval_shape(lambda *inputs: passed(*inputs).outputs, variables, images)
