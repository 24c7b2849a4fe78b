"""Reads new data for a finished run, with the classes of the run and domains of any names.

    PATH/DOMAIN/CLASS/*.jpg  or  PATH/CLASS/*.jpg  or  PATH.npz with arrays as in `data.sets.npz`
    PATH/DOMAIN/images/*.png with masks in PATH/DOMAIN/masks, as `data.name=masks` reads them

The classes are in the run's order; a new domain need not have all of them.
"""

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Split
from fedjax_bn.data.label_trees import MASK, has_masks
from fedjax_bn.data.pixels.decode import resized, resized_masks
from fedjax_bn.data.sets import folders, npz
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.data.source import Source
from fedjax_bn.run.experiment.datasets import dataset_name, decoding, read_data
from fedjax_bn.training.workdir import Record

_OWN = ("folders", "masks", "npz")  # datasets that are a user's own


def read_new(config: ConfigDict, own: ConfigDict, form: Record) -> Source | Dataset:
    """Returns the data to test.

    Raises:
      ConfigError: there is no such dataset; the folder holds no class of the run, or no domain that
        `data.domains` names.
      ValueError, OSError: as the readers.
    """
    name, path = dataset_name(config), Path(config.data.path).expanduser()
    moved = config.data.path and config.data.path != own.data.path
    if not moved or not (config.data.name == own.data.name or name in _OWN):
        return read_data(config)
    numbers = [str(label) for label in range(form["num_classes"])]  # if the run recorded no names
    if path.suffix == ".npz":
        return npz.load(path, domains=config.data.domains, classes=form.get("classes") or numbers)
    if name == "masks":  # new masks need not have all classes, so those of the run are named
        config.data.classes = config.data.classes or tuple(form.get("classes", ()))
        return read_data(config)
    inside, classes = folders.subfolders(path), {}
    if name in IMAGE_FOLDERS:
        domains, classes = IMAGE_FOLDERS[name].domains, dict(IMAGE_FOLDERS[name].classes)
        for one in (path, *inside):  # a copy of the published folder, or a folder that holds it
            if len(folders.match_folders(folders.subfolders(one), domains)) == len(domains):
                return read_data(config)
    elif name == "folders":
        given = config.data.classes or form.get("classes", ())
        classes = dict.fromkeys(given if given or own.data.name in _OWN else numbers, ())
    if not classes:  # another reader, or an older run, which did not record its classes
        return read_data(config)
    # Each folder that holds classes is a domain; if the path itself holds them, it is the only one.
    matching = (one for one in inside if folders.match_folders(folders.subfolders(one), classes))
    found = {one.name: one for one in matching}
    if not found and folders.match_folders(inside, classes):
        found = {path.resolve().name: path}
    if missing := [one for one in config.data.domains if one not in found]:
        raise ConfigError(
            f"config.data.domains={missing[0]!r} is not a domain of {path}: it has "
            f"{', '.join(found) or 'none'}"
        )
    found = {one: found[one] for one in config.data.domains or found}
    if not found:
        raise ConfigError(
            f"config.data.path={path} holds no class of the run: give a folder "
            f"DOMAIN/CLASS/*.jpg, or CLASS/*.jpg of one domain, CLASS of {', '.join(classes)}"
        )
    listings = [folders.list_classes(one, folder, classes) for one, folder in found.items()]
    domains = dict.fromkeys(found, ())
    new = folders.Published("new data", "", "", domains, classes, {}, "", (0.0,), (0.0,))
    root = path if path not in found.values() else path.parent
    return folders.to_source(new, root, listings, config.data.image_size, **decoding(config))


def stretched(split: Split, shape: Sequence[int]) -> Split:
    """Returns a split with images, and masks if there are any, of a shape (H, W, C)."""
    labels = split.labels
    if has_masks(labels):
        labels = labels | {MASK: resized_masks(labels[MASK], shape)}
    return split._replace(images=resized(split.images, shape), labels=labels)
