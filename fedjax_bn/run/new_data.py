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

_OF_USERS = ("folders", "masks", "npz")  # datasets that are a user's own


def read_new(config: ConfigDict, trained: ConfigDict, form: Record) -> Source | Dataset:
    """Returns the data to test.

    Raises:
      ConfigError: there is no such dataset; the folder holds no class of the run, or no domain that
        `data.domains` names.
      ValueError, OSError: as the readers.
    """
    name, path, domains = (
        dataset_name(config),
        Path(config.data.path).expanduser(),
        config.data.domains,
    )
    moved = config.data.path and config.data.path != trained.data.path
    if not moved or not (config.data.name == trained.data.name or name in _OF_USERS):
        return read_data(config)
    numbers = [str(label) for label in range(form["num_classes"])]  # if the run recorded no names
    if path.suffix == ".npz":
        return npz.load_npz(path, domains=domains, classes=form.get("classes") or numbers)
    if name == "masks":  # new masks need not have all classes, so those of the run are named
        config.data.classes = config.data.classes or tuple(form.get("classes", ()))
        return read_data(config)
    inside, classes = folders.subfolders(path), {}
    if name in IMAGE_FOLDERS:
        published, classes = IMAGE_FOLDERS[name].domains, dict(IMAGE_FOLDERS[name].classes)
        for root in (path, *inside):  # a copy of the published folder, or a folder that holds it
            if len(folders.match_folders(folders.subfolders(root), published)) == len(published):
                return read_data(config)
    elif name == "folders":
        names = config.data.classes or form.get("classes", ())
        classes = dict.fromkeys(names if names or trained.data.name in _OF_USERS else numbers, ())
    if not classes:  # another reader
        return read_data(config)
    # Each folder that holds classes is a domain; if the path itself holds them, it is the only one.
    matching = [root for root in inside if folders.match_folders(folders.subfolders(root), classes)]
    roots = {root.name: root for root in matching}
    if not roots and folders.match_folders(inside, classes):
        roots = {path.resolve().name: path}
    if missing := [domain for domain in domains if domain not in roots]:
        raise ConfigError(
            f"config.data.domains={missing[0]!r} is not a domain of {path}: it has "
            f"{', '.join(roots) or 'none'}"
        )
    roots = {domain: roots[domain] for domain in domains or roots}
    if not roots:
        raise ConfigError(
            f"config.data.path={path} holds no class of the run: give a folder "
            f"DOMAIN/CLASS/*.jpg, or CLASS/*.jpg of one domain, CLASS of {', '.join(classes)}"
        )
    listings = [folders.list_classes(name, root, classes) for name, root in roots.items()]
    names = dict.fromkeys(roots, ())
    unpublished = folders.Published("new data", "", "", names, classes, {}, "", (0.0,), (0.0,))
    parent = path if path not in roots.values() else path.parent
    return folders.folder_source(
        unpublished, parent, listings, config.data.image_size, **decoding(config)
    )


def stretched(split: Split, shape: Sequence[int]) -> Split:
    """Returns a split with images, and masks if there are any, of a shape (H, W, C)."""
    labels = split.labels
    if has_masks(labels):
        labels = labels | {MASK: resized_masks(labels[MASK], shape)}
    return split._replace(images=resized(split.images, shape), labels=labels)
