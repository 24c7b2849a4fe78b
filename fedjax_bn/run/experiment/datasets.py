"""Lists the datasets, and makes the clients and unseen domains of `data.*` and `target`."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.ranges import Steps
from fedjax_bn.arguments.text import brief, nearest
from fedjax_bn.data.boxes import box_folders
from fedjax_bn.data.division.clients import make_clients, pool_clients
from fedjax_bn.data.domain import Dataset, Domain, check_names_differ
from fedjax_bn.data.label_trees import SPACING
from fedjax_bn.data.masks import mask_folders, prostate
from fedjax_bn.data.masks.volumes import Slices
from fedjax_bn.data.sets import (
    abide,
    camelyon17,
    cifar10_c,
    cow_on_beach,
    digits,
    folders,
    image_folders,
    npz,
    scanners,
    signs,
    stains,
    synthetic,
    tfds_source,
)
from fedjax_bn.data.source import Source
from fedjax_bn.run.config.defaults import keys
from fedjax_bn.run.config.key_ranges import WINDOW
from fedjax_bn.run.config.keys import choice_of, choose

_Read = Callable[..., Source | Dataset]  # (config) with the options of `data.name`


def decoding(config: ConfigDict) -> dict[str, Any]:
    """Returns how image files are decoded, as arguments of `folders.folder_source`."""
    return {
        "cache": _cache_folder(config),
        "progress": True,
        "max_megapixels": config.data.max_megapixels,
        "orientation": config.data.orientation,
    }


def _cache_folder(config: ConfigDict) -> Path | None:
    return Path(config.data.cache).expanduser() if config.data.cache else None


def _path(config: ConfigDict) -> str:
    """Returns `data.path`, in which ~ is the home folder."""
    return os.path.expanduser(config.data.path)


def _read_images(load: Callable[..., Source], *data_keys: str) -> _Read:
    """Returns `read(config)` for a dataset whose images are decoded to `data.image_size`.

    Args:
      load: the reader.
      *own: keys of `data` that only this reader takes, passed if they are not empty.
    """

    def read(config: ConfigDict) -> Source:
        data = config.data
        options: dict[str, Any] = {key: data[key] for key in data_keys if data[key]}
        if load is not _load_cifar10_c:  # whose images are arrays, not files to decode
            options |= {"max_megapixels": data.max_megapixels, "orientation": data.orientation}
        options |= {"image_size": data.image_size, "cache": _cache_folder(config)}
        return load(_path(config) or None, **options)

    return read


def _read_digits(config: ConfigDict) -> Dataset:
    """Returns the digits; targets are whole."""
    data, target = config.data, tuple(filter(None, map(str.strip, config.target.split(","))))
    reduced = {"fraction": data.fraction, "truncate": data.truncate}
    return digits.load_digits(_path(config), seed=config.seed, target=target, **reduced)


def _read_own(config: ConfigDict) -> Source:
    """Reads a user's own data: a tree of image folders, or an archive if the path is `.npz`."""
    if Path(_path(config)).suffix == ".npz":
        if config.data.classes:
            raise ValueError(
                f"config.data.classes={tuple(config.data.classes)} does not go with an archive, "
                "whose labels are numbers already: leave it out"
            )
        if config.data.groups:
            raise ValueError(
                f"config.data.groups={config.data.groups} does not go with an archive, whose "
                "samples have no paths: leave it out"
            )
        return npz.load_npz(_path(config), domains=config.data.domains)
    return _read_images(folders.load_folders, "domains", "classes", "groups")(config)


def _load_cifar10_c(*arguments: Any, domains: Sequence[str] = (), **options: Any) -> Source:
    """Reads CIFAR-10-C, whose domains are its corruptions."""
    chosen = {"corruptions": domains} if domains else {}
    return cifar10_c.load_cifar10_c(*arguments, **chosen, **options)


def _read_abide(
    config: ConfigDict,
    atlas: str = "",
    window: Annotated[int, WINDOW] = 32,
    stride: Steps = 1,
) -> Source:
    """Reads ABIDE I, whose domains are its sites.

    Args:
      config: the run's.
      atlas: the atlas, such as cc200, where the folder has several.
      window: time points of a connectome; 0 for all.
      stride: time points between the starts of two windows.
    """
    return abide.load_abide(
        _path(config),
        sites=config.data.domains,
        atlas=atlas,
        window=window,
        stride=stride,
        cache=_cache_folder(config),
    )


def slices_in(config: ConfigDict, form: Mapping[str, Any]) -> Slices | None:
    """Returns how scans became the samples of a form (`domain.form_of`); None for other samples."""
    if SPACING not in form.get("masks", ()):
        return None
    data = config.data
    return prostate.prostate_slices(data.protocol, data.image_size, data.plane, data.window)


EMBEDDED: dict[str, _Read] = {
    "cow_on_beach": lambda config: cow_on_beach.load_cow_on_beach(seed=config.seed),
    "scanners": lambda config: scanners.load_scanners(seed=config.seed),
    "signs": lambda config: signs.load_signs(seed=config.seed),
    "signs_shortcut": lambda config: signs.load_signs(seed=config.seed, shortcut=True),
    "stains": lambda config: stains.load_stains(seed=config.seed),
    "synthetic": lambda config: synthetic.load_synthetic(seed=config.seed),
}
# The last two are made by launch/convert, and keep their names in reports.
_BOXES = ("boxes", "bdd100k", "driving")
_FOLDERS = image_folders.IMAGE_FOLDERS
DATASETS: dict[str, _Read] = {
    **EMBEDDED,
    **{name: _read_images(partial(image_folders.load_image_folders, name)) for name in _FOLDERS},
    **{
        name: _read_images(partial(box_folders.load_boxes, name=name), "domains", "classes")
        for name in _BOXES
    },
    "abide": _read_abide,
    "camelyon17": _read_images(camelyon17.load_camelyon17),
    "cifar10_c": _read_images(_load_cifar10_c, "domains", "severities"),
    "digits": _read_digits,
    "digits_morpho": _read_digits,
    "domainnet": _read_images(partial(image_folders.load_image_folders, "domainnet"), "classes"),
    "folders": _read_own,
    "masks": _read_images(
        mask_folders.load_mask_folders,
        *("domains", "classes", "large", "pairs", "groups", "plane", "window"),
    ),
    "npz": lambda config: npz.load_npz(_path(config), domains=config.data.domains),
    "prostate": lambda config: prostate.load_prostate(
        _path(config),
        image_size=config.data.image_size,
        cache=_cache_folder(config),
        protocol=config.data.protocol,
        domains=config.data.domains,
        plane=config.data.plane,
        window=config.data.window,
    ),
    "tfds": _read_images(tfds_source.load_tfds, "domains", "classes"),
}
# Datasets whose readers apply `truncate` and `fraction` themselves.
_REDUCED = ("digits", "digits_morpho")
# Keys of `data` that select parts of a dataset, and the datasets that have such parts.
_CHOICES = {
    "domains": {
        *("abide", "cifar10_c", "folders", "npz", *_BOXES, "masks", "prostate", "tfds"),
    },
    "classes": {"domainnet", "folders", "masks", *_BOXES, "tfds"},
    "severities": {"cifar10_c"},
    "protocol": {"prostate"},
    "large": {"masks"},
    "pairs": {"masks"},
    "groups": {"folders", "masks"},
    "plane": {"masks", "prostate"},
    "window": {"masks", "prostate"},
}


def read_data(config: ConfigDict) -> Source | Dataset:
    """Reads the data that `data.name` chooses, such as `digits` or `abide:window=0`."""
    load, options = choice_of("data.name", config.data.name, DATASETS, ("config",))
    return load(config, **options)


def dataset_name(config: ConfigDict) -> str:
    """Returns the name in `data.name`, without its options; a ConfigError if it is unknown."""
    name = config.data.name.partition(":")[0]
    choose(DATASETS, name, "data.name")
    return name


def describe_datasets() -> dict[str, str]:
    """Returns name -> one line of description, for each name of `DATASETS`."""
    modules: dict[str, ModuleType] = {"boxes": box_folders, "folders": folders}
    modules["masks"] = mask_folders
    named = (abide, camelyon17, cifar10_c, cow_on_beach, digits, npz)
    for module in (*named, prostate, scanners, signs, stains, synthetic):
        modules[module.__name__.rpartition(".")[2]] = module
    lines = {name: f"{row.title}: {row.about}" for name, row in _FOLDERS.items()}
    lines |= {name: str(module.__doc__).splitlines()[0] for name, module in modules.items()}
    lines["bdd100k"] = "Scenes of BDD100K (Yu et al., CVPR 2020), as launch/convert makes them"
    lines["driving"] = "Cityscapes, Mapillary Vistas and BDD100K, as launch/convert makes them"
    lines["digits_morpho"] = "FedBN's digits with Morpho-MNIST as two unseen domains (its Table 17)"
    lines["signs_shortcut"] = "signs whose rims mostly reveal the digit, but not in dusk"
    lines["tfds"] = str(tfds_source.__doc__).splitlines()[0]
    return {name: lines[name].rstrip(".") for name in DATASETS}


def check_data_keys(config: ConfigDict) -> None:
    """Raises ConfigError if a path is missing or useless, or if a selecting key has no effect."""
    name, path = dataset_name(config), config.data.path
    if name in EMBEDDED and path:
        raise ConfigError(
            f"config.data.path={brief(path)} has no effect, because config.data.name={name!r} is "
            "embedded: choose another data.name, or leave data.path empty"
        )
    if not path and name not in {*EMBEDDED, "tfds"}:
        # The reader's own message for a missing folder has its layout, and where to get the data.
        with config.unlocked():
            missing = config.copy_and_resolve_references()
        missing.data.path, layout = "PATH", f"see the file {name} in fedjax_bn/data/sets"
        try:
            read_data(missing)
        except (ValueError, OSError) as error:
            layout = str(error)
        raise ConfigError(
            f"config.data.name={name!r} is not embedded: give its file or folder, "
            f"--config.data.path=PATH; {layout}"
        )
    for key, able in _CHOICES.items():
        value = config.data[key]
        if value != keys()[f"data.{key}"].default and name not in able:
            value_text = value if isinstance(value, str) else ",".join(value)
            raise ConfigError(
                f"config.data.{key}={brief(value_text)} has no effect with "
                f"config.data.name={name!r}: leave it out; it is for {', '.join(sorted(able))}"
            )


def check_target(data: Source | Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if a target is neither a domain nor a group of domains."""
    valid = {part.name for part in _parts(data)}
    valid |= set(data.groups) if isinstance(data, Source) else set()
    if config.target in valid:
        return
    for name in filter(None, map(str.strip, config.target.split(","))):
        if name not in valid:
            raise ConfigError(
                f"config.target={brief(name)} is not a domain of {data.name}{nearest(name, valid)}"
            )


def _parts(data: Source | Dataset) -> Sequence[Any]:
    return data.pools if isinstance(data, Source) else data.domains


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
    reduced = dataset_name(config) in _REDUCED
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
        clients_per_domain=keys.clients_per_domain,
        sizes=keys.sizes,
        seed=config.seed,
    )
    internal, unseen = pool_clients(internal) if pooled else (internal, unseen)
    _check_names([domain.name for domain in (*internal.domains, *unseen)], data.name)
    return internal, unseen


def _check_names(names: Sequence[str], dataset: str) -> None:
    """Raises an error unless names differ from each other and from keys of JSON files."""
    check_names_differ(names, dataset)
    for name in {"mean", "method", "adaptation"} & {*names}:
        raise ConfigError(
            f"{dataset} has a client or domain {name!r}, which in summary.json or targets.json is "
            "the key of something else: rename it"
        )


def domain_names(config: ConfigDict) -> tuple[str, ...]:
    """Returns the names of all domains of the configured data; ConfigError if they are wrong."""
    data = _read_data(config, target="")
    names = tuple(part.name for part in _parts(data))
    _check_names(names, data.name)
    return names


def clients_without_validation(config: ConfigDict) -> tuple[str, ...]:
    """Returns the names of the clients without validation samples.

    Raises:
      ConfigError: the data are missing, or wrong.
    """
    with as_config_errors():
        internal, _ = configured_clients(_read_data(config, config.target), config)
    return tuple(domain.name for domain in internal.domains if domain.validation is None)


def _read_data(config: ConfigDict, target: str) -> Source | Dataset:
    """Returns the data of a configuration with this target."""
    with config.unlocked():
        config = config.copy_and_resolve_references()
    config.target = target
    check_data_keys(config)
    with as_config_errors():
        return read_data(config)
