"""From a configuration to what it names: data, model, method, adaptations; all checks come here.

The tables below are the only place where a name becomes a function.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from fedjax_bn import adaptation, aggregation, methods, models, sharing
from fedjax_bn.clients import group_size
from fedjax_bn.config import check, choose, nearest
from fedjax_bn.data import digits, scanners
from fedjax_bn.data.batches import ClientData, by_epochs, by_steps, stack_clients
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.images import Prepare, standardize
from fedjax_bn.data.partition import clients_of, leave_out
from fedjax_bn.errors import ConfigError
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.normalization import BatchNorm, normalize_with

METHODS = {name: getattr(methods, name) for name in methods.__all__}
MODELS = {name: getattr(models, name) for name in models.__all__}
SHARING = {
    rule.__name__: rule
    for rule in (
        sharing.everything,
        sharing.nothing,
        sharing.all_but_batch_norm,
        sharing.all_but_statistics,
    )
}
WEIGHING = {rule.__name__: rule for rule in (aggregation.by_size, aggregation.uniform)}
ADAPTATIONS = {"running": adaptation.running, "batch": adaptation.batch}
OPTIMIZERS = {
    "sgd": lambda config: optax.sgd(config.learning_rate, config.momentum or None),
    "adam": lambda config: optax.adam(config.learning_rate),
}
DATASETS = {
    "scanners": lambda config: scanners.load(seed=config.seed),
    "digits": lambda config: digits.load(
        Path(config.data.path), seed=config.seed, fraction=config.data.fraction
    ),
}
EMBEDDED = ("scanners",)


class Experiment(NamedTuple):
    """Everything a run needs, built and checked.

    Attributes:
      model: the linen module.
      method: the federated method.
      internal: the clients, as the domains of a dataset.
      unseen: the domain that trains nobody, or None.
      prepare: stored images -> what the model reads.
      adaptations: name -> how the unseen client predicts.
    """

    model: nn.Module
    method: FederatedMethod
    internal: Dataset
    unseen: Domain | None
    prepare: Prepare
    adaptations: dict[str, adaptation.Adaptation]


def build(config: ConfigDict) -> Experiment:
    """Builds what a configuration names; nothing is compiled yet.

    Raises:
      ConfigError: a key has an unknown name or an impossible value.
      ValueError, FileNotFoundError: the data are missing, damaged or do not suit.
    """
    check(config)
    load = choose(DATASETS, config.data.name, "data.name")
    check_path(config)
    for name in config.baselines:
        choose(METHODS, name, "baselines")
    make_model = choose(MODELS, config.model, "model")
    adaptations = {name: choose(ADAPTATIONS, name, "adaptations") for name in config.adaptations}
    make_method = method_maker(config)
    dataset = load(config)
    check_image_size(dataset, config)
    internal, unseen = split_clients(dataset, config)

    model = make_model(num_classes=dataset.num_classes)
    prepare = standardize(dataset.mean, dataset.std)
    check_batch_sizes(model, internal, prepare, config)
    return Experiment(
        model=model,
        method=make_method(model, prepare),
        internal=internal,
        unseen=unseen,
        prepare=prepare,
        adaptations={name: make(model) for name, make in adaptations.items()},
    )


def check_path(config: ConfigDict) -> None:
    """Raises ConfigError if a dataset that needs a path has none, or an embedded one has one."""
    if config.data.name in EMBEDDED and config.data.path:
        raise ConfigError(
            f"config.data.path={config.data.path!r} is of no use, because config.data.name="
            f"{config.data.name!r} is embedded: choose another data.name, or leave data.path empty"
        )
    if config.data.name not in EMBEDDED and not config.data.path:
        raise ConfigError(
            f"config.data.name={config.data.name!r} is not embedded: give its file or folder, "
            "--config.data.path=PATH"
        )


def check_image_size(dataset: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if the images have another size than the configuration says."""
    images = dataset.domains[0].train.images
    if images.ndim == 4 and images.shape[1] != config.data.image_size:
        raise ConfigError(
            f"config.data.image_size={config.data.image_size}, but images of {dataset.name} have "
            f"{images.shape[1]} pixels a side: set it to {images.shape[1]}"
        )


def method_maker(config: ConfigDict) -> Callable[[nn.Module, Prepare], FederatedMethod]:
    """Returns `make(model, prepare)` for the configured method.

    A method's own arguments are the configuration's keys under its name, such as `fedprox.mu`.
    """
    method = choose(METHODS, config.method, "method")
    options = dict(config.get(config.method, {}))
    if config.share:
        options["share"] = choose(SHARING, config.share, "share")
    options["weigh"] = choose(WEIGHING, config.weigh, "weigh")
    make_optimizer = choose(OPTIMIZERS, config.optimizer.name, "optimizer.name")
    optimizer = make_optimizer(config.optimizer)
    if config.optimizer.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(config.optimizer.weight_decay), optimizer)
    options |= {"clients": config.clients, "local_epochs": config.local_epochs}
    return lambda model, prepare: method(model, optimizer, prepare=prepare, **options)


def split_clients(dataset: Dataset, config: ConfigDict) -> tuple[Dataset, Domain | None]:
    """The internal clients and the unseen domain.

    Raises:
      ConfigError: the target, or a number of clients, does not suit the data.
    """
    names = [domain.name for domain in dataset.domains]
    if config.target and config.target not in names:
        raise ConfigError(
            f"config.target={config.target!r} is no domain of {dataset.name}"
            f"{nearest(config.target, names)}"
        )
    internal, unseen = leave_out(dataset, config.target or None)
    # Sources with originals to choose from have taken the fraction already.
    fraction = (config.data.fraction or 1.0) if config.data.name in EMBEDDED else 1.0
    internal = clients_of(internal, config.data.clients_per_domain, fraction, config.seed)
    num_clients = len(internal.domains)
    group_size(config.clients, num_clients)
    if config.clients_per_round > num_clients:
        raise ConfigError(
            f"config.clients_per_round={config.clients_per_round} is more than the {num_clients} "
            "clients there are: use 0 for all of them"
        )
    return internal, unseen


def sampler(config: ConfigDict, internal: Dataset) -> Callable:
    """The function (data, key) -> batches of one round."""
    if not config.local_steps:
        return by_epochs(config.batch_size, config.local_epochs)
    smallest = min(len(domain.train.labels) for domain in internal.domains)
    return by_steps(config.batch_size, config.local_steps, smallest)


def client_data(internal: Dataset) -> ClientData:
    """The training data of all clients on the device."""
    return stack_clients([domain.train for domain in internal.domains])


def initial_variables(experiment: Experiment, key: jax.Array) -> sharing.Variables:
    """The common start of all clients."""
    return experiment.model.init(key, sample_input(experiment.internal, experiment.prepare, 2))


def sample_input(dataset: Dataset, prepare: Prepare, batch_size: int) -> jax.Array:
    """Zeros in the form that the model reads, f[B, ...]."""
    images = dataset.domains[0].train.images
    return prepare(jnp.zeros((batch_size, *images.shape[1:]), images.dtype), jnp.float32)


def check_batch_sizes(
    model: nn.Module, internal: Dataset, prepare: Prepare, config: ConfigDict
) -> None:
    """Checks that no batch norm would see a single value a channel.

    Raises:
      ConfigError: a client has a batch of one sample and a batch norm sees one value of it.
    """
    batch_size = config.batch_size
    for domain in internal.domains:
        size = len(domain.train.labels)
        last = batch_size if config.local_steps else (size % batch_size or batch_size)
        if last == 1:
            break
    else:
        return

    def refuse_one(layer: BatchNorm, x: jax.Array, valid: None) -> tuple[jax.Array, jax.Array]:
        if x.size == x.shape[-1]:
            raise ConfigError(
                f"client {domain.name!r} has {size} training samples, so with config.batch_size="
                f"{batch_size} a batch holds one sample, which the batch norm "
                f"{'/'.join(layer.path)!r} cannot normalize: choose another batch_size"
            )
        return layer.running()

    with normalize_with(refuse_one):
        jax.eval_shape(model.init, jax.random.key(0), sample_input(internal, prepare, 1))
