"""New data for a finished run: other domains than its own, of its classes and its size.

A dataset that was published knows its domains by name, and a hospital is none of them. So where a
run is tested in another place, an archive or a folder there is read as what it is:

    PATH/DOMAIN/CLASS/*.jpg  or  PATH/CLASS/*.jpg  or  PATH.npz with arrays as in `data.sets.npz`

with the run's classes in the run's order, of which a new domain need not have all.
"""

from pathlib import Path

from ml_collections import ConfigDict

from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.sets import npz
from fedjax_bn.data.sets.folders import (
    Published,
    list_classes,
    match_folders,
    spelled,
    subfolders,
    to_source,
)
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.data.source import Source
from fedjax_bn.run.config.keys import choose
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.readers import DATASETS, decoding
from fedjax_bn.run.training.records import Record

_OWN = ("folders", "npz")  # datasets that are a user's own
_NAME = "new data"


def read_new(config: ConfigDict, own: ConfigDict, form: Record) -> Source | Dataset:
    """The data of a test, whose configuration names them.

    Args:
      config: of the test.
      own: the run's.
      form: of the run's samples, as `domain.form_of` makes it.

    Raises:
      ConfigError: there is no such dataset; the folder holds no class of the run, or no domain that
        `data.domains` names.
      ValueError, OSError: as the readers.
    """
    name, path = config.data.name, Path(config.data.path)
    read = choose(DATASETS, name, "data.name")
    moved = config.data.path and config.data.path != own.data.path
    if not moved or not (name == own.data.name or name in _OWN):
        return read(config)
    if path.suffix == ".npz":
        classes = form.get("classes") or _numbers(form)
        return npz.load(path, domains=config.data.domains, classes=classes)
    if (name in IMAGE_FOLDERS and not _as_published(path, name)) or name == "folders":
        return _read_tree(config, path, _classes(config, own, form))
    return read(config)


def _as_published(path: Path, name: str) -> bool:
    """Whether a folder, or one in it, holds all domains of a published dataset."""
    domains = IMAGE_FOLDERS[name].domains
    return any(
        len(match_folders(subfolders(folder), domains)) == len(domains)
        for folder in (path, *subfolders(path))
    )


def _classes(config: ConfigDict, own: ConfigDict, form: Record) -> dict[str, tuple[str, ...]]:
    """The run's classes, with the spellings of a published dataset; {} of an old run.

    Classes without names, as those of the embedded digits, are the folders 0, 1, ....
    """
    if config.data.name in IMAGE_FOLDERS:
        return dict(IMAGE_FOLDERS[config.data.name].classes)
    given = config.data.classes or form.get("classes", ())
    return spelled(*(given if given or own.data.name in _OWN else _numbers(form)))


def _numbers(form: Record) -> list[str]:
    """Names of classes that have none: their labels."""
    return [str(label) for label in range(form["num_classes"])]


def _read_tree(config: ConfigDict, path: Path, classes: dict[str, tuple[str, ...]]) -> Source:
    """The domains of a folder, or the one domain that it is.

    Raises:
      ConfigError: there is none, or one that is asked for is missing.
    """
    if not classes:  # a run of a version that did not write them down
        return DATASETS["folders"](config)
    inside = subfolders(path)
    found = {one.name: one for one in inside if match_folders(subfolders(one), classes)}
    if not found and match_folders(inside, classes):
        found = {path.resolve().name: path}
    for name in config.data.domains:
        if name not in found:
            raise ConfigError(
                f"config.data.domains={name!r} is no domain of {path}: it has "
                f"{', '.join(found) or 'none'}"
            )
    found = {name: found[name] for name in config.data.domains or found}
    if not found:
        raise ConfigError(
            f"config.data.path={path} holds no class of the run: give a folder "
            f"DOMAIN/CLASS/*.jpg, or CLASS/*.jpg of one domain, CLASS of {', '.join(classes)}"
        )
    listings = [list_classes(name, folder, classes) for name, folder in found.items()]
    nothing = (0.0,)
    about = Published(_NAME, "", "", spelled(*found), classes, {}, "", nothing, nothing)
    root = path if path not in found.values() else path.parent
    return to_source(about, root, listings, config.data.image_size, **decoding(config))
