"""What `data.*` and `target` of a configuration name: datasets by name, and their clients."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.data.division.clients import make_clients
from fedjax_bn.data.division.pooled import pool_clients
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.data.sets import (
    abide,
    camelyon17,
    cifar10_c,
    cow_on_beach,
    digits,
    digits_morpho,
    domainnet,
    image_folders,
    morpho_mnist,
    npz,
    own_folders,
    scanners,
    synthetic,
    tfds_source,
)
from fedjax_bn.data.source import Source
from fedjax_bn.run.config import choose, nearest
from fedjax_bn.run.errors import ConfigError

Read = Callable[[ConfigDict], Source | Dataset]


def _read_images(load: Callable[..., Source], *own: str) -> Read:
    """Returns `read(config)` for a dataset whose images are decoded to `data.image_size`.

    Args:
      load: the reader.
      *own: keys of `data` that are arguments of this reader alone, given where they are not empty.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        options: dict[str, Any] = {key: data[key] for key in own if data[key]}
        return load(data.path, image_size=data.image_size, cache=_cache_folder(config), **options)

    return read


def _digits_options(config: ConfigDict) -> dict[str, Any]:
    """What the digits benchmark takes of a configuration, its own fraction included."""
    return {
        "seed": config.seed,
        "fraction": config.data.fraction,
        "truncate": config.data.truncate,
    }


def _targets(config: ConfigDict) -> tuple[str, ...]:
    return tuple(name.strip() for name in config.target.split(",") if name.strip())


def _read_digits(config: ConfigDict) -> Dataset:
    return digits.load(config.data.path, whole=_targets(config), **_digits_options(config))


def _read_digits_morpho(config: ConfigDict) -> Dataset:
    return digits_morpho.load(config.data.path, target=_targets(config), **_digits_options(config))


def _read_abide(config: ConfigDict) -> Source:
    """ABIDE's connectomes; its own keys are the group `abide`."""
    return abide.load(config.data.path, cache=_cache_folder(config), **config.abide)


def _read_tfds(name: str) -> Read:
    """Returns `read(config)` for a dataset that tensorflow-datasets has prepared.

    `data.path` is its data_dir; empty for the usual one.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        return tfds_source.load(
            data.path or None,
            name,
            image_size=data.image_size,
            domains=data.domains or data.corruptions,
            classes=data.classes or (domainnet.TEN if name == "domainnet" else ()),
            severity=int(data.severities[0]) if data.severities else 1,
            cache=_cache_folder(config),
        )

    return read


def _cache_folder(config: ConfigDict) -> Path | None:
    """Where decoded images are kept; None where nowhere."""
    return Path(config.data.cache).expanduser() if config.data.cache else None


_EMBEDDED: dict[str, Read] = {
    "cow_on_beach": lambda config: cow_on_beach.load(seed=config.seed),
    "scanners": lambda config: scanners.load(seed=config.seed),
    "synthetic": lambda config: synthetic.load(seed=config.seed),
}
_TFDS = {f"tfds_{name}": _read_tfds(name) for name in tfds_source.NAMES}
DATASETS: dict[str, Read] = {
    **_EMBEDDED,
    **{
        name: _read_images(partial(image_folders.load, name))
        for name in image_folders.IMAGE_FOLDERS
    },
    "abide": _read_abide,
    "camelyon17": _read_images(camelyon17.load),
    "cifar10_c": _read_images(cifar10_c.load, "corruptions", "severities"),
    "digits": _read_digits,
    "digits_morpho": _read_digits_morpho,
    "domainnet": _read_images(domainnet.load, "classes"),
    "folders": _read_images(own_folders.load, "domains", "classes"),
    "morpho_mnist": lambda config: morpho_mnist.load(config.data.path),
    "npz": lambda config: npz.load(config.data.path, domains=config.data.domains),
    **_TFDS,
}
_MODULES: dict[str, ModuleType] = {
    "abide": abide,
    "camelyon17": camelyon17,
    "cifar10_c": cifar10_c,
    "cow_on_beach": cow_on_beach,
    "digits": digits,
    "digits_morpho": digits_morpho,
    "domainnet": domainnet,
    "folders": own_folders,
    "morpho_mnist": morpho_mnist,
    "npz": npz,
    "scanners": scanners,
    "synthetic": synthetic,
}
# Datasets that have taken truncation and fraction themselves.
_REDUCED = ("digits", "digits_morpho")
# Keys of `data` that choose something, and the datasets that have it to choose.
_CHOICES = {
    "domains": {"folders", "npz", *_TFDS},
    "classes": {"domainnet", "folders", *_TFDS},
    "corruptions": {"cifar10_c", "tfds_cifar10_c"},
    "severities": {"cifar10_c", "tfds_cifar10_c"},
}


def describe_datasets() -> dict[str, str]:
    """What each name of `DATASETS` is, in one line."""
    lines = {name: f"{row.title}: {row.about}" for name, row in image_folders.IMAGE_FOLDERS.items()}
    lines |= {name: module.__doc__.splitlines()[0] for name, module in _MODULES.items()}
    lines |= {name: f"{name[5:]} as tensorflow-datasets has prepared it" for name in _TFDS}
    return {name: lines[name].rstrip(".") for name in sorted(lines)}


def configured_clients(
    data: Source | Dataset, config: ConfigDict
) -> tuple[Dataset, tuple[Domain, ...]]:
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
    return pool_clients(internal) if pooled else (internal, unseen)


def domain_names(config: ConfigDict) -> tuple[str, ...]:
    """The names of all domains of the configured data, in order.

    Raises:
      ConfigError: the data are not there, or wrong.
    """
    load = choose(DATASETS, config.data.name, "data.name")
    check_data_keys(config)
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


def check_data_keys(config: ConfigDict) -> None:
    """Checks what can be said of `data` before anything is read.

    Raises:
      ConfigError: a dataset that needs a path has none, an embedded one has one, or a key chooses
        among what the dataset does not have.
    """
    name = config.data.name
    if name in _EMBEDDED and config.data.path:
        raise ConfigError(
            f"config.data.path={config.data.path!r} is of no use, because config.data.name="
            f"{name!r} is embedded: choose another data.name, or leave data.path empty"
        )
    if name not in _EMBEDDED | _TFDS and not config.data.path:
        raise ConfigError(
            f"config.data.name={name!r} is not embedded: give its file or folder, "
            f"--config.data.path=PATH; {_describe_folder(config)}"
        )
    for key, able in _CHOICES.items():
        if config.data[key] and name not in able:
            raise ConfigError(
                f"config.data.{key}={','.join(config.data[key])} is of no use with "
                f"config.data.name={name!r}: leave it empty; it is for {', '.join(sorted(able))}"
            )


def _describe_folder(config: ConfigDict) -> str:
    """What the reader of a dataset says of a folder that is not there: the layout, and its home."""
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
