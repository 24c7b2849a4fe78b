"""What `data.*` and `target` of a configuration name: datasets by name, and their clients."""

import inspect
from collections.abc import Callable
from pathlib import Path
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
    digits_dg,
    domainnet,
    morpho_mnist,
    office_caltech10,
    officehome,
    pacs,
    scanners,
    synthetic,
    tfds_source,
    vlcs,
)
from fedjax_bn.data.source import Source
from fedjax_bn.run.config import choose
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.spelling import nearest


def read_images(load: Callable[..., Source], *own: str) -> Callable[[ConfigDict], Source]:
    """Returns `read(config)` for a dataset whose images are decoded to `data.image_size`.

    Args:
      load: the reader.
      *own: keys of `data` that are arguments of this reader alone, given where they are not empty.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        options: dict[str, Any] = {key: data[key] for key in own if data[key]}
        return load(data.path, image_size=data.image_size, cache=cache_folder(config), **options)

    read.__doc__ = _about(load)
    return read


def read_embedded(load: Callable[..., Source]) -> Callable[[ConfigDict], Source]:
    """Returns `read(config)` for a dataset that needs no file, drawn with `seed`."""

    def read(config: ConfigDict) -> Source:
        return load(seed=config.seed)

    read.__doc__ = _about(load)
    return read


def _about(load: Callable[..., Source]) -> str | None:
    """What the reader's file says of the dataset; `list datasets` shows its first line."""
    return inspect.getdoc(inspect.getmodule(load))


def read_digits(config: ConfigDict) -> Dataset:
    """FedBN's digits benchmark: MNIST, SVHN, USPS, SynthDigits, MNIST-M, one domain each."""
    data = config.data
    targets = tuple(name.strip() for name in config.target.split(",") if name.strip())
    return digits.load(
        data.path, seed=config.seed, fraction=data.fraction, truncate=data.truncate, whole=targets
    )


def read_abide(config: ConfigDict) -> Source:
    """ABIDE I: connectomes of patients with autism and of controls; its keys are `abide.*`."""
    return abide.load(config.data.path, cache=cache_folder(config), **config.abide)


def read_morpho_mnist(config: ConfigDict) -> Dataset:
    """Morpho-MNIST: plain, thinned, thickened, swollen and broken strokes, as in its own parts."""
    return morpho_mnist.load(config.data.path)


def read_cifar10_c(config: ConfigDict) -> Source:
    """CIFAR-10's test photographs under 19 corruptions, as published or made from CIFAR-10."""
    return read_images(cifar10_c.load, "corruptions", "severities")(config)


def read_tfds(name: str) -> Callable[[ConfigDict], Source]:
    """Returns `read(config)` for a dataset that tensorflow-datasets has prepared.

    `data.path` is its data_dir; empty for the usual one.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        return tfds_source.load(
            data.path or None,
            name,
            image_size=data.image_size,
            domains=data.corruptions if name == "cifar10_c" else (),
            classes=data.classes or (domainnet.TEN if name == "domainnet" else ()),
            severity=int(data.severities[0]) if data.severities else 1,
            cache=cache_folder(config),
        )

    read.__doc__ = f"{name.removesuffix('_own')} as tensorflow-datasets has prepared it."
    return read


def cache_folder(config: ConfigDict) -> Path | None:
    """Where decoded images are kept; None where nowhere."""
    return Path(config.data.cache).expanduser() if config.data.cache else None


EMBEDDED = {
    "cow_on_beach": read_embedded(cow_on_beach.load),
    "scanners": read_embedded(scanners.load),
    "synthetic": read_embedded(synthetic.load),
}
DATASETS: dict[str, Callable[[ConfigDict], Source | Dataset]] = EMBEDDED | {
    "abide": read_abide,
    "camelyon17": read_images(camelyon17.load),
    "cifar10_c": read_cifar10_c,
    "digits": read_digits,
    "digits_dg": read_images(digits_dg.load),
    "domainnet": read_images(domainnet.load, "classes"),
    "morpho_mnist": read_morpho_mnist,
    "office_caltech10": read_images(office_caltech10.load),
    "officehome": read_images(officehome.load),
    "pacs": read_images(pacs.load),
    "vlcs": read_images(vlcs.load),
}
TFDS = {f"tfds_{name}": read_tfds(name) for name in tfds_source.NAMES}
DATASETS |= TFDS
# Datasets that have taken truncation and fraction themselves.
REDUCED = ("digits",)


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
