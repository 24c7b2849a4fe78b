"""The table of datasets: the names for `data.name`, and how a configuration reads each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from fedjax_bn.data.boxes import bdd100k, cityscapes, driving, own, vistas
from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.sets import (
    abide,
    camelyon17,
    cifar10_c,
    cow_on_beach,
    digits,
    domainnet,
    folders,
    image_folders,
    morpho_mnist,
    npz,
    scanners,
    signs,
    synthetic,
    tfds_source,
)
from fedjax_bn.data.source import Source

_Read = Callable[[ConfigDict], Source | Dataset]


def _read_images(load: Callable[..., Source], *own: str) -> _Read:
    """Returns `read(config)` for a dataset whose images are decoded to `data.image_size`.

    Args:
      load: the reader.
      *own: keys of `data` that are arguments of this reader alone, given where they are not empty.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        options: dict[str, Any] = {key: data[key] for key in own if data[key]}
        if load is not cifar10_c.load:  # whose images are arrays
            options |= {"max_megapixels": data.max_megapixels, "orientation": data.orientation}
        return load(data.path, image_size=data.image_size, cache=_cache_folder(config), **options)

    return read


def _read_boxes(load: Callable[..., Source]) -> _Read:
    """Returns `read(config)` for images with boxes."""
    return _read_images(load, "domains", "classes", "max_boxes")


def _read_digits(load: Callable[..., Dataset], targets: str) -> _Read:
    """Returns `read(config)` for the digits, which draw their own fraction; `targets` is a name."""

    def read(config: ConfigDict) -> Dataset:
        keys, names = config.data, filter(None, map(str.strip, config.target.split(",")))
        own = {"fraction": keys.fraction, "truncate": keys.truncate, targets: tuple(names)}
        return load(keys.path, seed=config.seed, orientation=keys.orientation, **own)

    return read


def _read_own(config: ConfigDict) -> Source:
    """Reads a user's own data: a tree of image folders, or an archive where the path is `.npz`."""
    if Path(config.data.path).suffix == ".npz":
        if config.data.classes:
            raise ValueError(
                f"config.data.classes={tuple(config.data.classes)} does not go with an archive, "
                "whose labels are numbers already: leave it out"
            )
        return npz.load(config.data.path, domains=config.data.domains)
    return _read_images(folders.load, "domains", "classes")(config)


def _read_tfds(name: str) -> _Read:
    """Returns `read(config)` for a dataset that tensorflow-datasets has prepared.

    `data.path` is its data_dir; empty for the usual one.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        if len(data.severities) > 1:
            raise ValueError(
                f"config.data.severities={tuple(data.severities)}, but tfds_{name} is read at one: "
                "name one, or use data.name=cifar10_c"
            )
        return tfds_source.load(
            data.path or None,
            "/".join([name, *map(str, data.severities)]),
            image_size=data.image_size,
            domains=data.domains or data.corruptions,
            classes=data.classes or (domainnet.TEN if name == "domainnet" else ()),
            cache=_cache_folder(config),
            max_megapixels=data.max_megapixels,
            orientation=data.orientation,
        )

    return read


def decoding(config: ConfigDict) -> dict[str, Any]:
    """Returns how image files are decoded, as arguments of `folders.to_source`."""
    return {
        "cache": _cache_folder(config),
        "progress": True,
        "max_megapixels": config.data.max_megapixels,
        "orientation": config.data.orientation,
    }


def _cache_folder(config: ConfigDict) -> Path | None:
    """Where decoded images are kept; None where nowhere."""
    return Path(config.data.cache).expanduser() if config.data.cache else None


EMBEDDED: dict[str, _Read] = {
    "cow_on_beach": lambda config: cow_on_beach.load(seed=config.seed),
    "scanners": lambda config: scanners.load(seed=config.seed),
    "signs": lambda config: signs.load(seed=config.seed),
    "signs_shortcut": lambda config: signs.load(seed=config.seed, shortcut=True),
    "synthetic": lambda config: synthetic.load(seed=config.seed),
}
BOXES: dict[str, ModuleType] = {
    "bdd100k": bdd100k,
    "boxes": own,
    "cityscapes": cityscapes,
    "driving": driving,
    "vistas": vistas,
}
TFDS = {f"tfds_{name}": _read_tfds(name) for name in tfds_source.NAMES}
DATASETS: dict[str, _Read] = {
    **EMBEDDED,
    **{
        name: _read_images(partial(image_folders.load, name))
        for name in image_folders.IMAGE_FOLDERS
    },
    **{name: _read_boxes(module.load) for name, module in BOXES.items()},
    "abide": lambda config: abide.load(
        config.data.path, cache=_cache_folder(config), **config.abide
    ),
    "camelyon17": _read_images(camelyon17.load),
    "cifar10_c": _read_images(cifar10_c.load, "corruptions", "severities"),
    "digits": _read_digits(digits.load, "whole"),
    "digits_morpho": _read_digits(morpho_mnist.load_beside_digits, "target"),
    "domainnet": _read_images(domainnet.load, "classes"),
    "folders": _read_own,
    "morpho_mnist": lambda config: morpho_mnist.load(config.data.path),
    "npz": lambda config: npz.load(config.data.path, domains=config.data.domains),
    **TFDS,
}
_MODULES: dict[str, ModuleType] = {
    **BOXES,
    "abide": abide,
    "camelyon17": camelyon17,
    "cifar10_c": cifar10_c,
    "cow_on_beach": cow_on_beach,
    "digits": digits,
    "domainnet": domainnet,
    "folders": folders,
    "morpho_mnist": morpho_mnist,
    "npz": npz,
    "scanners": scanners,
    "signs": signs,
    "synthetic": synthetic,
}


def describe_datasets() -> dict[str, str]:
    """Returns one line on each name of `DATASETS`."""
    lines = {name: f"{row.title}: {row.about}" for name, row in image_folders.IMAGE_FOLDERS.items()}
    lines |= {name: module.__doc__.splitlines()[0] for name, module in _MODULES.items()}
    lines["digits_morpho"] = "FedBN's digits with Morpho-MNIST as two unseen domains (its Table 17)"
    lines["signs_shortcut"] = "signs whose rims mostly reveal the digit, but not in dusk"
    lines |= {name: f"{name[5:]} as tensorflow-datasets has prepared it" for name in TFDS}
    return {name: lines[name].rstrip(".") for name in DATASETS}
