"""The clients and unseen domains of `data.*` and `target`, and checks of these keys."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from fedjax_bn.arguments.text import brief, nearest
from fedjax_bn.data.division.clients import make_clients, pool_clients
from fedjax_bn.data.domain import Dataset, Domain, check_names_differ
from fedjax_bn.data.source import Source
from fedjax_bn.run.config.keys import choose
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.readers import BOXES, DATASETS, EMBEDDED, TFDS

# Datasets that have taken truncation and fraction themselves.
_REDUCED = ("digits", "digits_morpho")
# Keys that stand beside names of clients and domains in the files of a run.
_BESIDE_NAMES = {"mean", "method", "adaptation"}
# Keys of `data` that choose something, and the datasets that have it to choose.
_CHOICES = {
    "domains": {"folders", "npz", "bdd100k", "boxes", "cityscapes", "driving", *TFDS},
    "classes": {"domainnet", "folders", *BOXES, *TFDS},
    "corruptions": {"cifar10_c", "tfds_cifar10_c"},
    "severities": {"cifar10_c", "tfds_cifar10_c"},
}


def configured_clients(
    data: Source | Dataset, config: ConfigDict
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the clients and the unseen domains, see `data.division.clients.make_clients`.

    With `data.partition="pooled"` one client owns all samples, and the test samples of each domain
    are an unseen domain (FedBN, Table 12).
    """
    keys = config.data
    check_target(data, config)
    pooled = keys.partition == "pooled"
    if pooled and config.target:
        raise ConfigError(
            f"config.target={config.target!r} does not go with config.data.partition='pooled', "
            "which tests on every domain: leave target empty, or choose iid or dirichlet"
        )
    reduced = keys.name in _REDUCED  # which have taken fraction and truncation already
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
    internal, unseen = pool_clients(internal) if pooled else (internal, unseen)
    _check_names([domain.name for domain in (*internal.domains, *unseen)], data.name)
    return internal, unseen


def _check_names(names: Sequence[str], dataset: str) -> None:
    """Raises ValueError unless names of clients and domains differ, also from keys of files."""
    check_names_differ(names, dataset)
    for name in _BESIDE_NAMES & {*names}:
        raise ConfigError(
            f"{dataset} has a client or domain {name!r}, which in summary.json or targets.json is "
            "the key of something else: rename it"
        )


def domain_names(config: ConfigDict) -> tuple[str, ...]:
    """Returns the names of all domains of the configured data, in order.

    Raises:
      ConfigError: the data are missing, or wrong.
    """
    data = _read_data(config, target="")
    names = tuple(part.name for part in (data.pools if isinstance(data, Source) else data.domains))
    _check_names(names, data.name)
    return names


def clients_without_validation(config: ConfigDict) -> tuple[str, ...]:
    """Returns the names of clients that have no samples by which to choose a round or a rate.

    Raises:
      ConfigError: the data are missing, or wrong.
    """
    data = _read_data(config, target=config.target)
    try:
        internal, _ = configured_clients(data, config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return tuple(domain.name for domain in internal.domains if domain.validation is None)


def _read_data(config: ConfigDict, target: str) -> Source | Dataset:
    """The data of a configuration with this target; raises ConfigError if they are wrong."""
    with config.unlocked():
        config = config.copy_and_resolve_references()
    config.target = target
    load = choose(DATASETS, config.data.name, "data.name")
    check_data_keys(config)
    try:
        return load(config)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


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
                f"config.target={brief(name)} is no domain of {data.name}{nearest(name, valid)}"
            )


def check_data_keys(config: ConfigDict) -> None:
    """Checks the keys of `data` before anything is read.

    Raises:
      ConfigError: a dataset that needs a path has none, an embedded one has one, or a key chooses
        among what the dataset does not have.
    """
    name = config.data.name
    if name in EMBEDDED and config.data.path:
        raise ConfigError(
            f"config.data.path={brief(config.data.path)} has no effect, because config.data.name="
            f"{name!r} is embedded: choose another data.name, or leave data.path empty"
        )
    if name not in EMBEDDED | TFDS and not config.data.path:
        raise ConfigError(
            f"config.data.name={name!r} is not embedded: give its file or folder, "
            f"--config.data.path=PATH; {_describe_folder(config)}"
        )
    for key, able in _CHOICES.items():
        if config.data[key] and name not in able:
            raise ConfigError(
                f"config.data.{key}={brief(','.join(config.data[key]))} has no effect with "
                f"config.data.name={name!r}: leave it empty; it is for {', '.join(sorted(able))}"
            )


def _describe_folder(config: ConfigDict) -> str:
    """The message of a dataset's reader for a missing folder: its layout, and where to get it."""
    with config.unlocked():
        missing = config.copy_and_resolve_references()
    missing.data.path = "PATH"
    try:
        DATASETS[config.data.name](missing)
    except (ValueError, OSError) as error:
        return str(error)
    return "see the file of that name in fedjax_bn/data/sets"


def check_image_size(dataset: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if the images have another size than the configuration says."""
    images = dataset.domains[0].train.images
    if images.ndim == 4 and images.shape[1] != config.data.image_size:
        raise ConfigError(
            f"config.data.image_size={config.data.image_size}, but images of {dataset.name} have "
            f"{images.shape[1]} pixels a side: set it to {images.shape[1]}"
        )
