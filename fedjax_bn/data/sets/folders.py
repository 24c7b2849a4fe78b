"""Datasets of image folders, DOMAIN/CLASS/*.jpg: what lies there, checked against the publication.

Folders may be spelled in any case and with or without spaces, - and _. Files that are no images
(Thumbs.db, .DS_Store, notes) are left out and counted.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.published import Listing, Published, Spellings

_SUFFIXES = {"jpg", "jpeg", "jpe", "jfif", "png", "bmp", "gif", "tif", "tiff", "webp"} | {
    *("pbm", "pgm", "ppm", "pnm")
}


def plain_name(name: str) -> str:
    """A name without what its spellings differ in."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def find_root(path: str | Path | None, dataset: Published) -> Path:
    """The folder that holds the domains: `path`, or the one folder in it that does.

    Raises:
      ValueError: no path is given.
      FileNotFoundError: there is no such folder, or no domain in it.
    """
    if not path:
        raise ValueError(f"{dataset.name} needs data.path: {dataset.where}")
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is no folder: {dataset.where}")
    for folder in (path, *subfolders(path)):
        if match_folders(subfolders(folder), dataset.domains):
            return folder
    raise FileNotFoundError(f"data.path {path} has no domain of {dataset.name}: {dataset.where}")


def subfolders(folder: Path) -> list[Path]:
    """Its folders by name, hidden ones left out; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def match_folders(folders: Sequence[Path], wanted: Spellings) -> dict[str, Path]:
    """The folder of each wanted name, for those that have one; the usual spelling goes first.

    Raises:
      ValueError: two folders differ in spelling only, so that either may be meant.
    """
    found = {}
    for name, others in wanted.items():
        for spelling in (name, *others):
            same = [folder for folder in folders if plain_name(folder.name) == plain_name(spelling)]
            same = [folder for folder in same if folder.name == spelling] or same
            if len(same) > 1:
                raise ValueError(
                    f"{' and '.join(map(str, same))} may both be {name!r}: rename or remove one"
                )
            if same:
                found[name] = same[0]
                break
    return found


def domain_folders(root: Path, dataset: Published) -> dict[str, Path]:
    """The folder of every domain.

    Raises:
      FileNotFoundError: some have none; all are named.
    """
    found = match_folders(subfolders(root), dataset.domains)
    missing = [name for name in dataset.domains if name not in found]
    if missing:
        raise FileNotFoundError(
            f"{root} lacks the folders {first_few(missing)} of {dataset.name}: {dataset.where}"
        )
    return found


def list_domain(name: str, folder: Path, dataset: Published) -> Listing:
    """The images of a domain, by class and name.

    Args:
      name: of the domain.
      folder: holds CLASS/*.jpg, or images/CLASS/*.jpg as in Office-31, or PART/CLASS/*.jpg where
        the dataset has parts.
      dataset: whose classes are looked for; other folders are left out.

    Raises:
      ValueError: a class folder is empty, or a class has none; all are named.
    """
    listing = _list_in_its_form(name, folder, dataset)
    present = set(listing.labels.tolist())
    missing = [c for label, c in enumerate(dataset.classes) if label not in present]
    if missing:
        raise ValueError(
            f"{dataset.name}, {name!r}: no images of {first_few(missing)} in {folder}; every class "
            f"needs a folder with images: {dataset.where}"
        )
    return listing


def _list_in_its_form(name: str, folder: Path, dataset: Published) -> Listing:
    """One domain in whichever form it is there, divided by folders or not."""
    classes, parts = dataset.classes, dataset.parts
    inside = {one.name.lower(): one.name for one in subfolders(folder)}
    has_classes = bool(match_folders(subfolders(folder), classes))
    if dataset.always_divided or (next(iter(parts), "") in inside and not has_classes):
        there = {inside.get(part, part): number for part, number in parts.items()}
        return _list_parts(name, folder, classes, there)
    if dataset.whole in inside and not has_classes:
        return list_classes(name, folder / inside[dataset.whole], classes)
    return list_classes(name, _inner(folder, classes), classes)


def _inner(folder: Path, classes: Spellings) -> Path:
    inner = folder / "images"
    return inner if inner.is_dir() and not match_folders(subfolders(folder), classes) else folder


def _list_parts(name: str, folder: Path, classes: Spellings, parts: Mapping[str, int]) -> Listing:
    listings = [list_classes(name, folder / part, classes) for part in parts]
    sizes = [len(listing.files) for listing in listings]
    return Listing(
        name,
        [file for listing in listings for file in listing.files],
        np.concatenate([listing.labels for listing in listings]),
        [file for listing in listings for file in listing.strays],
        np.repeat(np.array(list(parts.values()), np.int8), sizes),
    )


def list_classes(name: str, folder: Path, classes: Spellings) -> Listing:
    """The images of the classes that have a folder in this one, FOLDER/CLASS/*.jpg.

    Raises:
      ValueError: a class's folder is empty; all such are named.
    """
    inside = subfolders(folder)
    found = match_folders(inside, classes)
    files, labels, empty = [], [], []
    strays = [one for one in inside if one not in found.values()]
    strays += list_files(folder)[1] + list_files(folder)[0]
    for label, one in enumerate(classes):
        if one not in found:
            continue
        images, others = list_files(found[one])
        files += images
        labels += [label] * len(images)
        strays += others + subfolders(found[one])
        if not images:
            empty.append(str(found[one]))
    if empty:
        raise ValueError(
            f"class folders without images: {first_few(empty)}; fetch or unpack them again"
        )
    return Listing(name, files, np.array(labels, np.int32), strays)


def list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """A folder's image files, and its other files, each by name; folders in it do not count."""
    if not folder.is_dir():
        return [], []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    images, others = [], []
    for name in names:
        (images if is_image(name) else others).append(folder / name)
    return images, others


def is_image(name: str) -> bool:
    """Whether a file of this name is an image; macOS writes hidden companions `._NAME.jpg`."""
    head, _, suffix = name.rpartition(".")
    return bool(head) and not name.startswith(".") and suffix.lower() in _SUFFIXES
