"""From a configuration to what it names: data, model, method, adaptations; all checks come here.

The tables below are the only place where a name becomes a function.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from fedjax_bn import aggregation, methods, models, sharing
from fedjax_bn.adaptation.choice import ADAPTATIONS, Choice, choose_adaptation
from fedjax_bn.clients import group_size
from fedjax_bn.config import check, choose, nearest
from fedjax_bn.data import augment
from fedjax_bn.data.batches import by_epochs, by_steps
from fedjax_bn.data.clients import make_clients
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.images import Prepare, standardize
from fedjax_bn.data.pooled import pool_clients
from fedjax_bn.data.source import Source
from fedjax_bn.datasets import DATASETS, EMBEDDED, REDUCED, TFDS
from fedjax_bn.errors import ConfigError
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local import Load
from fedjax_bn.method_parts import check_adaptations
from fedjax_bn.models import pretrained
from fedjax_bn.normalization import BatchNorm, normalize_with
from fedjax_bn.personal import check_labelled
from fedjax_bn.selection import Find, best_of_round, validation_accuracy
from fedjax_bn.spelling import spelled_change

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
WEIGHING = {
    "by_size": lambda: aggregation.by_size,
    "uniform": lambda: aggregation.uniform,
    "risk_extrapolation": aggregation.risk_extrapolation,
}
OPTIMIZERS = {
    "sgd": lambda config: optax.sgd(
        config.learning_rate, config.momentum or None, nesterov=config.nesterov
    ),
    "adam": lambda config: optax.adam(config.learning_rate),
}
AUGMENTATIONS = {
    "none": lambda size: None,
    "domainbed": augment.domainbed,
    "office": lambda size: augment.office(),
}


class Experiment(NamedTuple):
    """Everything a run needs, built and checked.

    Attributes:
      model: the linen module.
      method: the federated method, for batches that hold images.
      method_with: `method_with(load, find)`, the same with what a step does to its images first,
        and with what finds validation images by their numbers (None: the batches hold them).
      internal: the clients, as the domains of a dataset.
      unseen: the domains that train nobody.
      prepare: stored images -> what the model reads.
      augment: `augment(key, images)` of training images, or None.
      adaptations: text -> how unseen clients predict.
      notes: sentences for the user on the data.
    """

    model: nn.Module
    method: FederatedMethod
    method_with: Callable[[Load | None, Find | None], FederatedMethod]
    internal: Dataset
    unseen: tuple[Domain, ...]
    prepare: Prepare
    augment: Load | None
    adaptations: dict[str, Choice]
    notes: tuple[str, ...]


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
    make_model = model_maker(config)
    choose(AUGMENTATIONS, config.data.augment, "data.augment")
    method_maker(config)
    for text in config.adaptations:  # before data are read
        choose(ADAPTATIONS, text.partition(":")[0], "adaptations")
        choose_adaptation(text, make_model(num_classes=2), config.adapt_batch_size)
    check_adaptations(config, config.adaptations)
    data = load(config)
    internal, unseen = divide(data, config)
    check_image_size(internal, config)
    check_clients(internal, config)
    check_labelled(config, internal, unseen)
    check_validation(internal, config)
    experiment = assemble(config, internal, unseen, data.notes if isinstance(data, Source) else ())
    check_batch_sizes(experiment.model, internal, experiment.prepare, config)
    return experiment


def assemble(
    config: ConfigDict, internal: Dataset, unseen: tuple[Domain, ...], notes: tuple[str, ...] = ()
) -> Experiment:
    """What a configuration names besides its data, for these clients and unseen domains.

    Raises:
      ConfigError, ValueError: as `build`.
    """
    model = model_maker(config)(num_classes=internal.num_classes)
    prepare = standardize(internal.mean, internal.std)
    make_method = method_maker(config)
    make_augment = choose(AUGMENTATIONS, config.data.augment, "data.augment")
    return Experiment(
        model=model,
        method=make_method(model, prepare, None, None),
        method_with=partial(make_method, model, prepare),
        internal=internal,
        unseen=unseen,
        prepare=prepare,
        augment=make_augment(config.data.image_size),
        adaptations={
            text: choose_adaptation(text, model, config.adapt_batch_size)
            for text in config.adaptations
        },
        notes=notes,
    )


def model_maker(config: ConfigDict) -> Callable[..., nn.Module]:
    """The class or function that `config.model` names, such as `ResNet18` or `ResNet18:width=16`.

    Raises:
      ConfigError: there is no such model, or it has no such field.
    """
    name, *changes = config.model.split(":")
    make = choose(MODELS, name, "model")
    fields = vars(make(num_classes=2)).items()
    numbers = {k: v for k, v in fields if isinstance(v, int) and k != "num_classes"}
    what = f"config.model={config.model!r}"
    try:
        return partial(make, **dict(spelled_change(what, change, numbers) for change in changes))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def divide(data: Source | Dataset, config: ConfigDict) -> tuple[Dataset, tuple[Domain, ...]]:
    """The clients and the unseen domains, as `data.clients.make_clients` makes them.

    With `data.partition="pooled"` one client owns all samples, and each domain's test samples are
    an unseen domain's (FedBN, Table 12).
    """
    keys = config.data
    check_target(data, config)
    pooled = keys.partition == "pooled"
    if pooled and config.target:
        raise ConfigError(
            f"config.target={config.target!r} does not go with config.data.partition='pooled', "
            "which tests on every domain: leave target empty, or choose iid or dirichlet"
        )
    reduced = keys.name in REDUCED  # which have taken fraction and truncation already
    internal, unseen = make_clients(
        data,
        target=config.target,
        split=keys.split,
        validation=keys.validation,
        test=keys.test,
        truncate=False if reduced else bool(keys.truncate),
        fraction=1.0 if reduced or keys.fraction is None else keys.fraction,
        partition="iid" if pooled else keys.partition,
        num_clients=keys.num_clients,
        alpha=keys.alpha,
        clients_per_domain=keys.clients_per_domain,
        sizes=keys.sizes,
        seed=config.seed,
    )
    return pool_clients(internal) if pooled else (internal, unseen)


def domain_names(config: ConfigDict) -> tuple[str, ...]:
    """The names of all domains of the configured data, in order.

    Raises:
      ConfigError: the data are not there, or wrong.
    """
    load = choose(DATASETS, config.data.name, "data.name")
    check_path(config)
    with config.unlocked():
        config = config.copy_and_resolve_references()
    config.target = ""
    try:
        data = load(config)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    return tuple(part.name for part in (data.pools if isinstance(data, Source) else data.domains))


def check_target(data: Source | Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if a target is neither a domain nor a group of domains."""
    domains = data.pools if isinstance(data, Source) else data.domains
    valid = {domain.name for domain in domains}
    valid |= set(data.groups) if isinstance(data, Source) else set()
    if config.target in valid:
        return
    for name in filter(None, map(str.strip, config.target.split(","))):
        if name not in valid:
            raise ConfigError(
                f"config.target={name!r} is no domain of {data.name}{nearest(name, valid)}"
            )


def check_path(config: ConfigDict) -> None:
    """Raises ConfigError if a dataset that needs a path has none, or an embedded one has one."""
    if config.data.name in EMBEDDED and config.data.path:
        raise ConfigError(
            f"config.data.path={config.data.path!r} is of no use, because config.data.name="
            f"{config.data.name!r} is embedded: choose another data.name, or leave data.path empty"
        )
    if config.data.name not in EMBEDDED | TFDS and not config.data.path:
        raise ConfigError(
            f"config.data.name={config.data.name!r} is not embedded: give its file or folder, "
            f"--config.data.path=PATH; {describe_folder(config)}"
        )


def describe_folder(config: ConfigDict) -> str:
    """What the reader of a dataset says of a folder that is not there: the layout, and its home."""
    with config.unlocked():
        missing = config.copy_and_resolve_references()
    missing.data.path = "PATH"
    try:
        DATASETS[config.data.name](missing)
    except (ValueError, OSError) as error:
        return str(error)
    return "see the file of that name in fedjax_bn/data"


def check_image_size(dataset: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if the images have another size than the configuration says."""
    images = dataset.domains[0].train.images
    if images.ndim == 4 and images.shape[1] != config.data.image_size:
        raise ConfigError(
            f"config.data.image_size={config.data.image_size}, but images of {dataset.name} have "
            f"{images.shape[1]} pixels a side: set it to {images.shape[1]}"
        )


def method_maker(
    config: ConfigDict,
) -> Callable[[nn.Module, Prepare, Load | None, Find | None], FederatedMethod]:
    """Returns `make(model, prepare, load, find)` for the configured method.

    A method's own arguments are the configuration's keys under its name, such as `fedprox.mu`;
    FedIG-A has those of FedIG.
    """
    method = choose(METHODS, config.method, "method")
    options = dict(config.get({"fediga": "fedig"}.get(config.method, config.method), {}))
    if config.share:
        options["share"] = choose(SHARING, config.share, "share")
    if config.weigh:
        options["weigh"] = choose_weighing(config.weigh)
    make_optimizer = choose(OPTIMIZERS, config.optimizer.name, "optimizer.name")
    optimizer = make_optimizer(config.optimizer)
    if config.optimizer.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(config.optimizer.weight_decay), optimizer)
    options |= {"clients": config.clients, "local_epochs": max(local_epochs(config))}
    if config.optimizer.keep:
        options["keep_optimizer"] = True

    def make(
        model: nn.Module, prepare: Prepare, load: Load | None, find: Find | None
    ) -> FederatedMethod:
        train = {}
        if config.local_selection:
            score = validation_accuracy(model, prepare, find)
            train["train"] = best_of_round(score, config.local_selection)
        return method(model, optimizer, prepare=prepare, load=load, **train, **options)

    return make


def check_validation(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if clients are to select their best state and one has no validation."""
    without = [domain.name for domain in internal.domains if domain.validation is None]
    if config.local_selection and without:
        raise ConfigError(
            f"config.local_selection={config.local_selection} needs validation samples, but client "
            f"{without[0]!r} of {internal.name} has none: set config.data.validation above 0 (a "
            "dataset that comes divided may have none to give), or local_selection=0"
        )


def choose_weighing(text: str) -> aggregation.WeighingRule:
    """The rule that `name:key=value:key=value` spells, such as `risk_extrapolation:eta=0.3`.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type or out of its range.
    """
    name, *changes = text.split(":")
    make = choose(WEIGHING, name, "weigh")
    parameters = inspect.signature(make).parameters.items()
    defaults = {key: parameter.default for key, parameter in parameters}
    if changes and not defaults:
        raise ConfigError(f"config.weigh={text!r}: {name} takes no arguments")
    return make(**dict(spelled_change(f"config.weigh={text!r}", c, defaults) for c in changes))


def check_clients(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if a number of clients does not suit the federation."""
    num_clients = len(internal.domains)
    group_size(config.clients, num_clients)
    if config.client_epochs and len(config.client_epochs) != num_clients:
        raise ConfigError(
            f"config.client_epochs has {len(config.client_epochs)} numbers for {num_clients} "
            "clients: give one for each"
        )
    if config.clients_per_round > num_clients:
        raise ConfigError(
            f"config.clients_per_round={config.clients_per_round} is more than the {num_clients} "
            "clients there are: use 0 for all of them"
        )


def local_epochs(config: ConfigDict) -> tuple[int, ...]:
    """The local epochs of each client, or one number for all."""
    return tuple(map(int, config.client_epochs)) or (config.local_epochs,)


def sampler(config: ConfigDict, internal: Dataset) -> Callable:
    """The function (sizes, longest, key) -> which samples a round trains on."""
    if not config.local_steps:
        return by_epochs(config.batch_size, local_epochs(config))
    smallest = min(len(domain.train.labels) for domain in internal.domains)
    return by_steps(config.batch_size, config.local_steps, smallest)


def initial_variables(experiment: Experiment, key: jax.Array) -> sharing.Variables:
    """The common start of all clients, at random."""
    return experiment.model.init(key, sample_input(experiment.internal, experiment.prepare, 2))


def load_pretrained(
    config: ConfigDict, experiment: Experiment
) -> tuple[sharing.Variables | None, tuple[str, ...]]:
    """What of the start comes from `config.pretrained`, None elsewhere, and sentences on it.

    Raises:
      ValueError, OSError, ImportError: the weights are missing or do not fit.
    """
    if not config.pretrained:
        return None, ()
    like = jax.eval_shape(lambda key: initial_variables(experiment, key), jax.random.key(0))
    variables, notes = pretrained.load(config.pretrained, experiment.model, like)
    fixed = jax.tree.map(
        lambda leaf: None if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf),
        variables,
    )
    return fixed, notes


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
