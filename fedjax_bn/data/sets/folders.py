"""Datasets of image folders, DOMAIN/CLASS/*.jpg: what is there, compared with the publication.

Folders may be written in any case and with or without spaces, - and _. Files that are not images
(Thumbs.db, .DS_Store, notes) are left out and counted.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode, hash_of_files, relative_names
from fedjax_bn.data.source import Pool, Source, check_source

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation
_SUFFIXES = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "gif"),
    *("tif", "tiff", "webp", "pbm", "pgm", "ppm", "pnm"),
)

Spellings = Mapping[str, tuple[str, ...]]


class Published(NamedTuple):
    """What a dataset of image folders is, according to its publication.

    Attributes:
      name: of the dataset, as in `data.name`.
      title: its name in the publication.
      about: what it shows, in a few words.
      domains: name -> other names that the domain's folder has in some copies.
      classes: likewise, in the order of the labels.
      counts: images of each domain; empty where the publication does not say.
      where: what the folder must look like and where to fetch it, to end an error message with.
      mean, std: as in `Source`; by default those of ImageNet.
      image_size: pixels a side, as the methods' papers have it.
      parts: folder -> part, in copies of the form DOMAIN/FOLDER/CLASS/*.jpg.
      whole: in such a copy, the folder of a domain that is not divided.
      always_divided: every copy has that form.
      slips: None, or image -> its wrong label in the authors' lists, see `image_folders`.
    """

    name: str
    title: str
    about: str
    domains: Spellings
    classes: Spellings
    counts: Mapping[str, int]
    where: str
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    image_size: int = 224
    parts: Mapping[str, int] = MappingProxyType({})
    whole: str = ""
    always_divided: bool = False
    slips: Mapping[str, int] | None = None


class Listing(NamedTuple):
    """The image files of one domain.

    Attributes:
      name: of the domain.
      files: N of them.
      labels: i32[N], positions in the dataset's classes.
      strays: files and folders that were left out.
      parts: i8[N], as in `Pool`, or None.
    """

    name: str
    files: list[Path]
    labels: np.ndarray
    strays: Sequence[Path] = ()
    parts: np.ndarray | None = None


def spelled(*names: str, **others: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns `Spellings` of names that have no others, and of names with others."""
    return {name: others.get(name, ()) for name in (*names, *others)}


def plain_name(name: str) -> str:
    """Returns a name without case and separators, in which copies differ."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def is_image(name: str) -> bool:
    """Returns whether a file of this name is an image, and not macOS' companion `._NAME.jpg`."""
    head, _, suffix = name.rpartition(".")
    return bool(head) and not name.startswith(".") and suffix.lower() in _SUFFIXES


def subfolders(folder: Path) -> list[Path]:
    """Returns a folder's folders by name, without hidden ones; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns a folder's image files, and its other files, each by name, without its folders."""
    if not folder.is_dir():
        return [], []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    images, others = [], []
    for name in names:
        (images if is_image(name) else others).append(folder / name)
    return images, others


def match_folders(folders: Sequence[Path], wanted: Spellings) -> dict[str, Path]:
    """Returns the folder of each wanted name, for those that have one; the usual one first.

    Raises:
      ValueError: two folders differ in case and separators only, so that either may be meant.
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


def domain_folders(path: str | Path | None, dataset: Published) -> tuple[Path, dict[str, Path]]:
    """Finds the domains of a dataset.

    Args:
      path: the folder that holds the domains, or the folder around it.
      dataset: whose domains are looked for.

    Returns:
      The folder that holds them, and the folder of every domain.

    Raises:
      ValueError: no path is given.
      FileNotFoundError: there is no such folder, or some domains have none; all are named.
    """
    if not path:
        raise ValueError(f"{dataset.name} needs data.path: {dataset.where}")
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder: {dataset.where}")
    for root in (path, *subfolders(path)):
        if found := match_folders(subfolders(root), dataset.domains):
            break
    else:
        raise FileNotFoundError(
            f"data.path {path} has no domain of {dataset.name}: {dataset.where}"
        )
    if missing := [name for name in dataset.domains if name not in found]:
        raise FileNotFoundError(
            f"{root} lacks the folders {first_few(missing)} of {dataset.name}: {dataset.where}"
        )
    return root, found


def list_domain(name: str, folder: Path, dataset: Published) -> Listing:
    """Lists the images of a domain, by class and name.

    Args:
      name: of the domain.
      folder: holds CLASS/*.jpg, or images/CLASS/*.jpg as in Office-31, or PART/CLASS/*.jpg where
        the dataset has parts.
      dataset: whose classes are looked for; other folders are left out.

    Raises:
      ValueError: a class folder is empty, or a class has none; all are named.
    """
    classes, parts = dataset.classes, dataset.parts
    there = subfolders(folder)
    inside = {one.name.lower(): one for one in there}
    has_classes = bool(match_folders(there, classes))
    if dataset.always_divided or (next(iter(parts), "") in inside and not has_classes):
        listings = [list_classes(name, inside.get(p, folder / p), classes) for p in parts]
        sizes = [len(listing.files) for listing in listings]
        listing = Listing(
            name,
            [file for listing in listings for file in listing.files],
            np.concatenate([listing.labels for listing in listings]),
            [file for listing in listings for file in listing.strays],
            np.repeat(np.array(list(parts.values()), np.int8), sizes),
        )
    else:
        for inner in (dataset.whole, "images"):
            if inner in inside and not has_classes:
                folder = inside[inner]
                break
        listing = list_classes(name, folder, classes)
    present = set(listing.labels.tolist())
    if missing := [c for label, c in enumerate(classes) if label not in present]:
        raise ValueError(
            f"{dataset.name}, {name!r}: no images of {first_few(missing)} in {folder}; every class "
            f"needs a folder with images: {dataset.where}"
        )
    return listing


def list_classes(name: str, folder: Path, classes: Spellings) -> Listing:
    """Lists the images of the classes that have a folder in this one, FOLDER/CLASS/*.jpg.

    Raises:
      ValueError: a class's folder is empty; all such are named.
    """
    inside = subfolders(folder)
    found = match_folders(inside, classes)
    files, labels, empty = [], [], []
    images, others = list_files(folder)
    strays = [one for one in inside if one not in found.values()] + others + images
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


def to_source(
    dataset: Published,
    root: Path,
    listings: Sequence[Listing],
    image_size: int,
    *,
    notes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Decodes the images of all domains: u8[N, image_size, image_size, 3].

    Samples are named by their files as seen from `root`. Notes state what was converted or left
    out, and which domains have another number of images than published. `how` are `cache`,
    `progress`, `max_megapixels` and `orientation` of `decode`.

    Raises:
      ValueError, OSError: see `decode`.
    """
    files = [file for listing in listings for file in listing.files]
    images, converted = decode(files, image_size, root=root, **how)
    notes, pools, start = list(notes), [], 0
    for name, own, labels, _, parts in listings:
        stop = start + len(own)
        names = np.array(relative_names(own, root))
        pools.append(Pool(name, images[start:stop], labels, names, parts))
        start, expected = stop, dataset.counts.get(name, len(own))
        if len(own) != expected:
            why = (
                "a reduced copy, or files are missing: then fetch or unpack it again"
                if len(own) < expected
                else "another edition, or files were added or unpacked twice"
            )
            notes.append(
                f"{dataset.name}, {name}: found {len(own)} images, expected {expected} ({why})"
            )
    strays = relative_names([stray for listing in listings for stray in listing.strays], root)
    if strays:
        notes.append(
            f"left out {len(strays)} files or folders that are not images of a class: "
            f"{first_few(strays, 3)}"
        )
    return check_source(
        Source(
            dataset.name,
            tuple(dataset.classes),
            tuple(pools),
            dataset.mean,
            dataset.std,
            (*notes, *converted),
            key=hash_of_files(files, root, image_size, times=False),
        )
    )
