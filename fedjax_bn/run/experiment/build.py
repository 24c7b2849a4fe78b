"""Builds what a configuration names and checks it: data, model, method and adaptations."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn import models, sharing
from fedjax_bn.adaptation.choice import Choice, choose_adaptation
from fedjax_bn.arguments.choices import call_chosen, naming
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.images import Prepare, standardize
from fedjax_bn.data.sampling import Sampler, by_epochs, by_steps
from fedjax_bn.data.source import Source
from fedjax_bn.engine.devices import check_strategy
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.models.forward import forward
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.normalization import Layer, Statistics
from fedjax_bn.run.config.keys import check, choice_of, choose
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.evaluation.personalization import (
    Personalization,
    check_labelled,
    choose_personalization,
)
from fedjax_bn.run.experiment.availability import Participation, choose_participation, read_trace
from fedjax_bn.run.experiment.datasets import check_data_keys, check_image_size, configured_clients
from fedjax_bn.run.experiment.method import (
    check_adaptations,
    choose_method,
    follows_rounds,
    is_told,
    local_epochs,
    method_maker,
    what_validates,
)
from fedjax_bn.run.experiment.privacy import describe_privacy
from fedjax_bn.run.experiment.readers import DATASETS
from fedjax_bn.run.experiment.task import choose_augmentation, choose_loading, choose_task
from fedjax_bn.run.processes.mesh import choose_mesh
from fedjax_bn.run.training.records import Record
from fedjax_bn.task import Task, classification

MODELS = {name: getattr(models, name) for name in models.__all__}
OF_CALLER = ("num_classes", "rngs", "name", "parent")  # given by us; the last two by linen
_MOST_DRAWS = 2**28  # samples a round: 2 GB of numbers
HOLD_OUT = (
    "set config.data.validation above 0, for data that come divided config.data.split=official too"
)
TESTED_ON_VALIDATION = (
    "the data keep no test samples of the clients (data.test): their accuracy is of the validation "
    "samples, which also choose the round"
)


class LocalWork(NamedTuple):
    """What a client does in a round.

    Attributes:
      batch_size: samples of a step.
      steps: if above 0, the steps that a client makes, instead of epochs.
      epochs: passes over its own data: of each client, or one number for all.
    """

    batch_size: int
    steps: int
    epochs: tuple[int, ...]

    def sampler(self, smallest: int, longest: int) -> Sampler:
        """Returns what draws the samples of a round.

        Args:
          smallest, longest: training samples of the smallest and of the largest client.
        """
        if self.steps:
            return by_steps(self.batch_size, self.steps, smallest)
        return by_epochs(min(self.batch_size, longest), self.epochs)


class Plan(NamedTuple):
    """What the loop over rounds does, and what it writes; the meanings are those of the keys.

    Attributes:
      follows: the key whose plan follows from the number of rounds, see `method.follows_rounds`.
      privacy: `privacy(rounds)` is the record of `describe_privacy` after so many rounds.
    """

    method: str
    seed: int
    rounds: int
    patience: int
    eval_every: int
    checkpoint_every: int
    on_nonfinite: str
    clients_named: int
    predictions: str
    wandb: str
    device_megabytes: int
    follows: str
    privacy: Callable[[int], Record]


class Evaluation(NamedTuple):
    """How clients are tested; the meanings are those of the keys.

    Attributes:
      clients: how many are evaluated, drawn from `seed`; 0 for all.
      personalization: how a client adapts first; None where none does.
    """

    batch_size: int
    clients: int
    seed: int
    eval_unseen: str
    eval_train_loss: bool
    validate_with: str
    personalization: Personalization | None


class Experiment(NamedTuple):
    """Everything a run needs, built and checked: no other room reads the configuration.

    Attributes:
      model: a linen module, or what `models.from_nnx` makes; in `models.precision.in_dtype` where
        it computes in another dtype.
      method: the federated method, whose batches hold images or numbers of samples in a source.
      internal: the clients, as the domains of a dataset.
      unseen: the domains that train nobody.
      prepare: stored images -> what the model reads.
      adaptations: text -> how unseen clients predict.
      notes: sentences for the user on the data and the start.
      participation: who takes part in a round.
      work: what a client does in a round.
      plan: the rounds, and what is written.
      evaluation: how clients are tested.
      mesh: the devices over which the method's clients are shared out; None for one.
      task: what is learned and reported.
      validates: the key for which clients need validation samples while they train; "" for none.
    """

    model: Any
    method: FederatedMethod
    internal: Dataset
    unseen: tuple[Domain, ...]
    prepare: Prepare
    adaptations: dict[str, Choice]
    notes: tuple[str, ...]
    participation: Participation
    work: LocalWork
    plan: Plan
    evaluation: Evaluation
    mesh: Mesh | None = None
    task: Task = classification()
    validates: str = ""

    def sampler(self) -> Sampler:
        """Returns what draws the samples of a round."""
        sizes = [len(domain.train.images) for domain in self.internal.domains]
        return self.work.sampler(min(sizes), max(sizes))


def build(config: ConfigDict) -> Experiment:
    """Builds what a configuration names; nothing is compiled yet.

    Raises:
      ConfigError: a key has an unknown name or an impossible value.
      ValueError, FileNotFoundError: the data are missing, damaged or do not suit.
    """
    check(config)
    load = choose(DATASETS, config.data.name, "data.name")
    check_data_keys(config)
    for name in config.baselines:
        choose_method("baselines", name)
    make_model = _model_maker(config)
    choose_augmentation(config)
    method_maker(config)
    for text in config.adaptations:  # before data are read
        choose_adaptation(text, make_model(num_classes=2), config.adapt_batch_size)
    check_adaptations(config, config.adaptations)
    data = load(config)
    internal, unseen = configured_clients(data, config)
    notes = data.notes if isinstance(data, Source) else ()
    if config.data.truncate:
        notes += (
            "the training and validation samples of every domain are cut to those of the smallest "
            "(data.truncate)",
        )
    if any(domain.test is domain.validation for domain in internal.domains):
        notes += (TESTED_ON_VALIDATION,)
    check_image_size(internal, config)
    _check_clients(internal, config)
    _check_validation(internal, config)
    experiment = assemble(config, internal, unseen, notes)
    check_labelled(experiment.evaluation.personalization, internal, unseen)
    trace = read_trace(config.participation.trace, len(internal.domains))
    experiment = experiment._replace(participation=experiment.participation._replace(trace=trace))
    with naming(f"config.model={brief(config.model)}"):
        _check_batch_sizes(experiment.model, internal, experiment.prepare, config)
    return experiment


def assemble(
    config: ConfigDict, internal: Dataset, unseen: tuple[Domain, ...], notes: tuple[str, ...] = ()
) -> Experiment:
    """Builds what a configuration names besides its data, for these clients and unseen domains.

    Raises:
      ConfigError, ValueError: as `build`.
    """
    model = _model_maker(config)(num_classes=internal.num_classes)
    prepare = standardize(internal.mean, internal.std)
    make_method = method_maker(config)
    load, task = choose_loading(config, internal), choose_task(config, model, internal)
    rows = config.clients_per_round or len(internal.domains)
    mesh = choose_mesh(config.mesh, rows, config.batch_size)
    method = make_method(model, prepare, load, task, mesh)
    return Experiment(
        model=model,
        method=method,
        internal=internal,
        unseen=unseen,
        prepare=prepare,
        adaptations={
            text: choose_adaptation(text, model, config.adapt_batch_size)
            for text in config.adaptations
        },
        notes=notes + method.notes + _repetition_notes(internal, config),
        mesh=mesh,
        task=task,
        **read_values(config, method, len(internal.domains)),
    )


def read_values(config: ConfigDict, method: FederatedMethod, num_clients: int) -> dict[str, Any]:
    """Returns the fields of `Experiment` that are values of a configuration, by their names."""
    return {
        "participation": choose_participation(config, num_clients),
        "work": LocalWork(config.batch_size, config.local_steps, local_epochs(config)),
        "plan": Plan(
            method=config.method,
            seed=config.seed,
            rounds=config.rounds,
            patience=config.patience,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            on_nonfinite=config.on_nonfinite,
            clients_named=config.clients_named,
            predictions=config.predictions,
            wandb=config.wandb,
            device_megabytes=config.data.device_megabytes,
            follows=follows_rounds(config),
            privacy=partial(describe_privacy, config, num_clients),
        ),
        "evaluation": Evaluation(
            batch_size=config.eval_batch_size,
            clients=config.eval_clients,
            seed=config.seed,
            eval_unseen=config.eval_unseen,
            eval_train_loss=config.eval_train_loss,
            validate_with=config.validate_with,
            personalization=choose_personalization(config, method),
        ),
        "validates": what_validates(config),
    }


def _model_maker(config: ConfigDict) -> Callable[..., Any]:
    """Returns `make(num_classes=...)` for `config.model`, such as `ResNet18:width=16`.

    A user's own model is `package.module:Class`, a linen module with a field `num_classes` or an
    nnx module that takes `num_classes` and `rngs`.

    Raises:
      ConfigError: there is no such model, or it has no such field.
    """
    make, fields = choice_of("model", config.model, MODELS, OF_CALLER)
    what = f"config.model={brief(config.model)}"

    def make_model(num_classes: int) -> Any:
        given: dict[str, Any] = {"num_classes": num_classes}
        if isinstance(make, type) and _is_nnx(make):
            from flax.nnx import Rngs

            given["rngs"] = Rngs(config.seed)
        model = call_chosen(what, make, **given, **fields)
        if _is_nnx(type(model)):
            model = models.from_nnx(model)
        elif not isinstance(inspect.unwrap(model), nn.Module):
            raise ConfigError(
                f"{what} gives {type(model).__name__}, not a flax.linen.Module or flax.nnx.Module"
            )
        return model if config.compute_dtype == "float32" else in_dtype(model, config.compute_dtype)

    return make_model


def _is_nnx(kind: type) -> bool:
    """Whether a class is a module of nnx, which is imported for nobody else: it takes long."""
    if issubclass(kind, nn.Module):
        return False
    from flax.nnx import Module

    return issubclass(kind, Module)


def _check_validation(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if anything is chosen by validation and a client has no samples for it."""
    without = [domain.name for domain in internal.domains if domain.validation is None]
    unused = {"local_selection": 0, "patience": 0, "validate_with": "own"}
    if is_told(config) and without:
        raise ConfigError(
            f"config.weigh={brief(config.weigh)} needs validation samples, but client "
            f"{without[0]!r} of {internal.name} has none: {HOLD_OUT}, or choose another weigh"
        )
    for key, nothing in unused.items():
        if config[key] != nothing and without:
            raise ConfigError(
                f"config.{key}={config[key]} needs validation samples, but client {without[0]!r} "
                f"of {internal.name} has none: {HOLD_OUT}, or {key}={nothing}"
            )


def _check_clients(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if a number of clients, or of samples a round, does not suit them."""
    num_clients = len(internal.domains)
    check_strategy(config.clients, num_clients)
    if config.client_epochs and len(config.client_epochs) != num_clients:
        raise ConfigError(
            f"config.client_epochs has {len(config.client_epochs)} numbers for {num_clients} "
            "clients: give one for each"
        )
    for key in ("clients_per_round", "eval_clients"):
        if config[key] > num_clients:
            raise ConfigError(
                f"config.{key}={config[key]} is more than the {num_clients} clients there are: use "
                "0 for all of them"
            )
    longest = max(len(domain.train.images) for domain in internal.domains)
    drawn = config.local_steps * config.batch_size or max(local_epochs(config)) * longest
    drawn *= (clients := config.clients_per_round or num_clients)
    if drawn > _MOST_DRAWS:
        raise ConfigError(
            f"a round of {clients} clients would draw {drawn} samples, but it can draw "
            f"{_MOST_DRAWS} at most: lower config.local_steps, config.local_epochs, "
            "config.client_epochs or config.batch_size"
        )


def _repetition_notes(internal: Dataset, config: ConfigDict) -> tuple[str, ...]:
    """A note on the clients that have fewer samples than the full batches of their steps."""
    sizes = {domain.name: len(domain.train.images) for domain in internal.domains}
    few = [f"{name} ({size})" for name, size in sizes.items() if size < config.batch_size]
    if not config.local_steps or not few:
        return ()
    return (
        f"a step's batch of {config.batch_size} repeats samples of clients that have fewer: "
        f"{first_few(few)}",
    )


def sampler(config: ConfigDict, internal: Dataset) -> Sampler:
    """Returns what draws the samples of a round."""
    sizes = [len(domain.train.images) for domain in internal.domains]
    return sampler_of(config, min(sizes), max(sizes))


def sampler_of(config: ConfigDict, smallest: int, longest: int) -> Sampler:
    """Returns the same for clients of which only the sizes are known.

    Args:
      config: batches, and epochs or steps.
      smallest, longest: training samples of the smallest and of the largest client.
    """
    work = LocalWork(config.batch_size, config.local_steps, local_epochs(config))
    return work.sampler(smallest, longest)


def initial_variables(experiment: Experiment, key: jax.Array) -> sharing.Variables:
    """Returns the common start of all clients, at random."""
    return experiment.model.init(key, sample_input(experiment.internal, experiment.prepare, 2))


def sample_input(dataset: Dataset, prepare: Prepare, batch_size: int) -> jax.Array:
    """Returns zeros in the form that the model reads, f[B, ...]."""
    images = dataset.domains[0].train.images
    return prepare(jnp.zeros((batch_size, *images.shape[1:]), images.dtype), jnp.float32)


def _check_batch_sizes(model: Any, internal: Dataset, prepare: Prepare, config: ConfigDict) -> None:
    """Checks that no batch norm would see a single value a channel.

    Raises:
      ConfigError: a client has a batch of one sample and a batch norm sees one value of it.
    """
    batch_size = config.batch_size
    for domain in internal.domains:
        size = len(domain.train.images)
        last = batch_size if config.local_steps else (size % batch_size or batch_size)
        if last == 1:
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

    images = sample_input(internal, prepare, 1)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    if sharing.STATISTICS in variables:
        passed = partial(forward, model, statistics=refuse_one)
        jax.eval_shape(lambda *given: passed(*given).outputs, variables, images)
