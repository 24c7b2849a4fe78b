"""The domains on which a finished run is tested, of its own data or of a place new to it.

A published dataset has domains of known names, and a hospital is not among them. So an archive or
a folder of another place is read by its own names:

    PATH/DOMAIN/CLASS/*.jpg  or  PATH/CLASS/*.jpg  or  PATH.npz with arrays as in `data.sets.npz`

with the run's classes in the run's order, of which a new domain need not have all.
"""

from collections.abc import Mapping
from pathlib import Path

from ml_collections import ConfigDict

from fedjax_bn.data.division.clients import unseen_only
from fedjax_bn.data.domain import Dataset, Domain, whole
from fedjax_bn.data.pixels.decode import resized
from fedjax_bn.data.sets import npz
from fedjax_bn.data.sets.folders import (
    Published,
    list_classes,
    match_folders,
    subfolders,
    to_source,
)
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.data.source import Source
from fedjax_bn.run.config.keys import choose
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.evaluation.scoring import as_stored
from fedjax_bn.run.experiment.datasets import DATASETS, check_data_keys, check_target, decoding
from fedjax_bn.run.files.workdir import Record

_OWN = ("folders", "npz")  # datasets that are a user's own


def domains_to_test(
    config: ConfigDict, own: ConfigDict, form: Record, resize: bool = False
) -> Dataset:
    """Returns the domains to test, each whole: `target`, and all where that is empty.

    Args:
      config: of the test, which names the data.
      own: the run's.
      form: of the run's samples, as `domain.form_of` makes it.
      resize: whether bytes of another size than the run's are stretched to it.

    Raises:
      ConfigError: the samples have another form than the run's; or as `read_new`.
    """
    check_data_keys(config)
    data = read_new(config, own, form)
    check_target(data, config)
    tested = unseen_only(data, target=config.target, seed=config.seed)
    if resize:
        tested = tested._replace(
            domains=tuple(_stretched(one, form["shape"]) for one in tested.domains)
        )
    if tested.domains:
        images = tested.domains[0].test.images
        given = (list(images.shape[1:]), str(images.dtype), tested.num_classes)
        needed = (form["shape"], form["dtype"], form["num_classes"])
        if given != needed:
            raise ConfigError(
                "the run was trained on samples of shape {} ({}) in {} classes".format(*needed)
                + ", but those to test have {} ({}) in {}".format(*given)
                + ": give data of the same form; --resize brings images to the run's size"
            )
    return tested


def _stretched(domain: Domain, shape: list[int]) -> Domain:
    """Returns a whole domain with images of a shape [H, W, C], see `resize.resized`."""
    split = as_stored(whole(domain))
    return Domain(domain.name, None, None, split._replace(images=resized(split.images, shape)))


def read_new(config: ConfigDict, own: ConfigDict, form: Record) -> Source | Dataset:
    """Returns the data of a test.

    Args:
      config: of the test, which names the data.
      own: the run's.
      form: of the run's samples, as `domain.form_of` makes it.

    Raises:
      ConfigError: there is no such dataset; the folder holds no class of the run, or no domain that
        `data.domains` names.
      ValueError, OSError: as the readers.
    """
    name, path = config.data.name, Path(config.data.path)
    load = choose(DATASETS, name, "data.name")
    moved = config.data.path and config.data.path != own.data.path
    if not moved or not (name == own.data.name or name in _OWN):
        return load(config)
    numbers = [str(label) for label in range(form["num_classes"])]  # names of classes without
    if path.suffix == ".npz":
        return npz.load(path, domains=config.data.domains, classes=form.get("classes") or numbers)
    if name in IMAGE_FOLDERS:
        domains, classes = IMAGE_FOLDERS[name].domains, dict(IMAGE_FOLDERS[name].classes)
        copies = (match_folders(subfolders(one), domains) for one in (path, *subfolders(path)))
        if any(len(copy) == len(domains) for copy in copies):
            return load(config)
    elif name == "folders":
        given = config.data.classes or form.get("classes", ())
        classes = dict.fromkeys(given if given or own.data.name in _OWN else numbers, ())
    else:
        return load(config)
    if not classes:  # a run of a version that did not write them down
        return DATASETS["folders"](config)
    return _read_tree(config, path, classes)


def _read_tree(config: ConfigDict, path: Path, classes: Mapping[str, tuple[str, ...]]) -> Source:
    """Reads the domains of a folder, or the folder as one domain."""
    inside = subfolders(path)
    found = {one.name: one for one in inside if match_folders(subfolders(one), classes)}
    if not found and match_folders(inside, classes):
        found = {path.resolve().name: path}
    for name in config.data.domains:
        if name not in found:
            raise ConfigError(
                f"config.data.domains={name!r} is not a domain of {path}: it has "
                f"{', '.join(found) or 'none'}"
            )
    found = {name: found[name] for name in config.data.domains or found}
    if not found:
        raise ConfigError(
            f"config.data.path={path} holds no class of the run: give a folder "
            f"DOMAIN/CLASS/*.jpg, or CLASS/*.jpg of one domain, CLASS of {', '.join(classes)}"
        )
    listings = [list_classes(name, folder, classes) for name, folder in found.items()]
    domains = dict.fromkeys(found, ())
    about = Published("new data", "", "", domains, classes, {}, "", (0.0,), (0.0,))
    root = path if path not in found.values() else path.parent
    return to_source(about, root, listings, config.data.image_size, **decoding(config))
