"""Lists the datasets, and makes the clients and unseen domains of `data.*` and `target`."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.ranges import Range, Seed, Steps
from fedjax_bn.data.division.clients import make_clients, pool_clients
from fedjax_bn.data.domain import Dataset, Domain, check_names_differ
from fedjax_bn.data.labels import SPACING
from fedjax_bn.data.masks import mask_folders, prostate
from fedjax_bn.data.masks.volumes import Slices
from fedjax_bn.data.sets import (
    abide,
    box_folders,
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
from fedjax_bn.run.config.choices import choice_of

# `read(config)` with the options of `data.name`; the docstring's first line describes the dataset
_Read = Callable[..., Source | Dataset]
_Window = Annotated[int, Range("0, or from 2 to 1000000", lambda n: n == 0 or 2 <= n <= 1_000_000)]


def decoding(config: ConfigDict) -> dict[str, Any]:
    """Returns how image files are decoded, as arguments of `folders.folder_source`."""
    return {"cache": _cache_folder(config), "orientation": config.data.orientation}


def _cache_folder(config: ConfigDict) -> Path | None:
    return Path(config.data.cache).expanduser() if config.data.cache else None


def _path(config: ConfigDict) -> str:
    return os.path.expanduser(config.data.path)


def _described(read: _Read, load: Callable[..., Any], about: str = "") -> _Read:
    read.__doc__ = about or inspect.getdoc(inspect.getmodule(getattr(load, "func", load)))
    return read


def _embedded(load: Callable[..., Dataset], about: str = "", **options: Any) -> _Read:
    def read(config: ConfigDict, seed: Seed | None = None) -> Dataset:
        return load(seed=config.seed if seed is None else seed, **options)

    return _described(read, load, about)


def _scanners(config: ConfigDict, seed: Seed | None = None, shared_test: bool = False) -> Dataset:
    return scanners.load_scanners(config.seed if seed is None else seed, shared_test=shared_test)


def _read_files(
    load: Callable[..., Source], *data_keys: str, about: str = "", decodes: bool = True
) -> _Read:
    """Returns `read(config)` of files; `load` gets those of `data_keys` that are not empty."""

    def read(config: ConfigDict) -> Source:
        options: dict[str, Any] = {key: config.data[key] for key in data_keys if config.data[key]}
        options |= decoding(config) if decodes else {"cache": _cache_folder(config)}
        return load(_path(config) or None, image_size=config.data.image_size, **options)

    return _described(read, load, about)


def _read_digits(config: ConfigDict) -> Dataset:
    data, target = config.data, tuple(filter(None, map(str.strip, config.target.split(","))))
    reduced = {"fraction": data.fraction, "truncate": data.truncate}
    return digits.load_digits(_path(config), seed=config.seed, target=target, **reduced)


def _read_npz(config: ConfigDict) -> Source:
    return npz.load_npz(_path(config), domains=config.data.domains)


def _load_cifar10_c(path: str, *, domains: Sequence[str] = (), **options: Any) -> Source:
    corruptions = domains or cifar10_c.CORRUPTIONS
    return cifar10_c.load_cifar10_c(path, corruptions=corruptions, **options)


def _read_abide(
    config: ConfigDict, atlas: str = "", window: _Window = 32, stride: Steps = 1
) -> Source:
    """ABIDE I: patients with autism and controls, classified by connectomes, one domain a site.

    Args:
      atlas: the atlas, such as cc200, where the folder has several.
      window: time points of a connectome; 0 for all.
      stride: time points between the starts of two windows.
    """
    options = {"sites": config.data.domains, "atlas": atlas, "window": window, "stride": stride}
    return abide.load_abide(_path(config), cache=_cache_folder(config), **options)


def slices_in(config: ConfigDict, form: Mapping[str, Any]) -> Slices | None:
    """Returns how scans became the samples of a form (`domain.form_of`); None for other samples."""
    if SPACING not in form.get("masks", ()):
        return None
    data = config.data
    return prostate.prostate_slices(data.protocol, data.image_size, data.plane, data.window)


EMBEDDED: dict[str, _Read] = {
    "cow_on_beach": _embedded(cow_on_beach.load_cow_on_beach),
    "scanners": _described(_scanners, scanners.load_scanners),
    "signs": _embedded(signs.load_signs),
    "signs_shortcut": _embedded(
        signs.load_signs, "signs whose rims mostly reveal the digit, but not in dusk", shortcut=True
    ),
    "stains": _embedded(stains.load_stains),
    "synthetic": _embedded(synthetic.load_synthetic),
}
# Two forms of boxes that launch/convert makes keep their names in reports.
_BOXES = {
    "boxes": "",
    "bdd100k": "Scenes of BDD100K (Yu et al., CVPR 2020), as launch/convert makes them",
    "driving": "Cityscapes, Mapillary Vistas and BDD100K, as launch/convert makes them",
}
DATASETS: dict[str, _Read] = {
    **EMBEDDED,
    **{
        name: _read_files(
            partial(image_folders.load_image_folders, name),
            *["classes"] * (name == "domainnet"),
            about=row.about,
        )
        for name, row in image_folders.IMAGE_FOLDERS.items()
    },
    **{
        name: _read_files(
            partial(box_folders.load_boxes, name=name), "domains", "classes", about=about
        )
        for name, about in _BOXES.items()
    },
    "abide": _read_abide,
    "camelyon17": _read_files(camelyon17.load_camelyon17),
    "cifar10_c": _read_files(
        _load_cifar10_c, "domains", "severities", about=str(cifar10_c.__doc__), decodes=False
    ),
    "digits": _described(_read_digits, digits.load_digits),
    "digits_morpho": _described(
        lambda config: _read_digits(config),
        digits.load_digits,
        "FedBN's digits with Morpho-MNIST as two unseen domains (its Table 17)",
    ),
    "folders": _read_files(folders.load_folders, "domains", "classes", "groups"),
    "masks": _read_files(
        mask_folders.load_mask_folders,
        *("domains", "classes", "large", "pairs", "groups", "plane", "window"),
    ),
    "npz": _described(_read_npz, npz.load_npz),
    "prostate": _read_files(
        prostate.load_prostate, "protocol", "domains", "plane", "window", decodes=False
    ),
    "tfds": _read_files(tfds_source.load_tfds, "domains", "classes"),
}


def read_data(config: ConfigDict) -> Source | Dataset:
    """Reads the data that `data.name` chooses, such as `digits` or `abide:window=0`.

    An unknown name, and no path for data that are not embedded, are ConfigErrors.
    """
    load, options = choice_of("data.name", config.data.name, DATASETS, "config")
    name = config.data.name.partition(":")[0]
    if config.data.path or name in EMBEDDED or name == "tfds":
        return load(config, **options)
    # The reader's own message for a missing folder has its layout, and where to get the data.
    missing = config.copy_and_resolve_references()
    missing.data.path = "PATH"
    try:
        return load(missing, **options)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"config.data.name={name!r} is not embedded: give --config.data.path=PATH; {error}"
        ) from error


def configured_clients(
    data: Source | Dataset, config: ConfigDict
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the clients and the unseen domains, see `data.division.clients.make_clients`."""
    # With data.partition=pooled one client owns all samples, and the test samples of each domain
    # are an unseen domain (FedBN, Table 12).
    keys = config.data
    pooled = keys.partition == "pooled"
    if pooled and config.target:
        raise ConfigError("config.data.partition=pooled tests all domains: empty config.target")
    reduced = keys.name in ("digits", "digits_morpho")  # their readers apply both keys themselves
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
    check_names_differ([domain.name for domain in (*internal.domains, *unseen)], data.name)
    return internal, unseen


def domain_names(config: ConfigDict) -> list[str]:
    """Returns the names of all domains of the configured data; ConfigError if they are wrong."""
    whole = config.copy_and_resolve_references()
    whole.target = ""
    with as_config_errors():
        data = read_data(whole)
        names = [part.name for part in (data.pools if isinstance(data, Source) else data.domains)]
        check_names_differ(names, data.name)
    return names
