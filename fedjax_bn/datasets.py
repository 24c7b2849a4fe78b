"""Datasets by their names in a configuration, and how each is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.data import (
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
from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.source import Source


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

    return read


def read_digits(config: ConfigDict) -> Dataset:
    """The digits benchmark, which takes its own fraction."""
    data = config.data
    targets = tuple(name.strip() for name in config.target.split(",") if name.strip())
    return digits.load(
        data.path, seed=config.seed, fraction=data.fraction, truncate=data.truncate, whole=targets
    )


def read_abide(config: ConfigDict) -> Source:
    """ABIDE's connectomes; its own keys are the group `abide`."""
    return abide.load(config.data.path, cache=cache_folder(config), **config.abide)


def read_cifar10_c(config: ConfigDict) -> Source:
    """CIFAR-10-C as published, or made from CIFAR-10."""
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

    return read


def cache_folder(config: ConfigDict) -> Path | None:
    """Where decoded images are kept; None where nowhere."""
    return Path(config.data.cache).expanduser() if config.data.cache else None


EMBEDDED = {
    "cow_on_beach": lambda config: cow_on_beach.load(seed=config.seed),
    "scanners": lambda config: scanners.load(seed=config.seed),
    "synthetic": lambda config: synthetic.load(seed=config.seed),
}
DATASETS: dict[str, Callable[[ConfigDict], Source | Dataset]] = EMBEDDED | {
    "abide": read_abide,
    "camelyon17": read_images(camelyon17.load),
    "cifar10_c": read_cifar10_c,
    "digits": read_digits,
    "digits_dg": read_images(digits_dg.load),
    "domainnet": read_images(domainnet.load, "classes"),
    "morpho_mnist": lambda config: morpho_mnist.load(config.data.path),
    "office_caltech10": read_images(office_caltech10.load),
    "officehome": read_images(officehome.load),
    "pacs": read_images(pacs.load),
    "vlcs": read_images(vlcs.load),
}
TFDS = {f"tfds_{name}": read_tfds(name) for name in tfds_source.NAMES}
DATASETS |= TFDS
# Datasets that have taken truncation and fraction themselves.
REDUCED = ("digits",)
