"""Images in folders, DOMAIN/CLASS/*.jpg: a user's own, and what published datasets share.

    photo/dog/1.jpg  photo/cat/2.jpg  sketch/dog/a.png  sketch/cat/b.png

A domain is a folder that holds folders; its classes are the folders in it, and every domain must
have them all. Images may have any size and any format in `raster.FORMATS`; they are stretched to
squares. Folders may be written in any case, with or without spaces, - and _, and in any form of
Unicode. Files that are not images (Thumbs.db, .DS_Store, notes), and links to images that are gone,
are left out and counted. A link that leads nowhere where a folder may have been is an error.
"""

import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.division.by_class import groups_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode, hash_of_files, relative_names
from fedjax_bn.data.source import Pool, Source, check_source

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation
_SUFFIXES = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "gif"),
    *("tif", "tiff", "webp", "pbm", "pgm", "ppm", "pnm"),
)
# Folders that programs add: macOS' archives hold `._NAME` files there, Synology's disks thumbnails.
_SYSTEM = ("__MACOSX", "@eaDir")

_WHERE = (
    "it must hold a folder of each domain, and in it a folder of images of each class, "
    "DOMAIN/CLASS/*.jpg, the same classes in all domains; data.domains and data.classes choose some"
)

# name of a domain or class -> other names of its folder in some copies
Aliases = Mapping[str, tuple[str, ...]]


class Published(NamedTuple):
    """What a dataset of image folders is, according to its publication.

    Attributes:
      name: of the dataset, as in `data.name`.
      title: its name in the publication.
      about: what it shows, in a few words.
      domains: their names, with aliases.
      classes: likewise, in the order of the labels.
      counts: images of each domain; empty if the publication does not state them.
      where: what the folder must look like and where to fetch it; error messages end with it.
      mean, std: as in `Source`; by default those of ImageNet.
      image_size: pixels a side, as in the methods' papers.
      parts: folder -> part, in copies of the form DOMAIN/FOLDER/CLASS/*.jpg.
      whole: in such a copy, the folder of a domain that is not divided.
      always_divided: whether every copy has that form.
      slips: None, or image -> its wrong label in the authors' lists, see `image_folders`.
    """

    name: str
    title: str
    about: str
    domains: Aliases
    classes: Aliases
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


def is_image(name: str) -> bool:
    """Returns whether a file of this name is an image, and not macOS' companion `._NAME.jpg`."""
    head, _, suffix = name.rpartition(".")
    return bool(head) and not name.startswith(".") and suffix.lower() in _SUFFIXES


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder of this name is hidden, or made by a system."""
    return name.startswith(".") or name in _SYSTEM


def _entries(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of a folder's folders and files, sorted; none if there is no such folder.

    A link that leads nowhere is a file if it is named like an image, which its reader leaves out.

    Raises:
      OSError: the folder cannot be read, or another link leads nowhere: it may have been a folder.
    """
    if not os.path.lexists(folder):
        return [], []
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            # First, because `is_dir` raises an error for a link in a circle.
            if entry.is_symlink() and not os.path.exists(entry.path):
                if not is_image(entry.name):
                    raise FileNotFoundError(f"{entry.path} leads nowhere: correct or remove it")
                files.append(entry.name)
            else:
                (folders if entry.is_dir() else files).append(entry.name)
    return folders, files


def subfolders(folder: Path) -> list[Path]:
    """Returns a folder's folders by name, without hidden ones; none if there is no such folder.

    Raises:
      OSError: the folder cannot be read, or a link in it leads nowhere.
    """
    if folder.is_file():
        return []
    return [folder / name for name in _entries(folder)[0] if not is_hidden(name)]


def list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns a folder's image files, and its other files, each by name, without its folders.

    Links to images that are gone are other files.

    Raises:
      OSError: the folder cannot be read, or a link in it leads nowhere.
    """
    images, strays = [], []
    for name in _entries(folder)[1]:
        path = folder / name
        (images if is_image(name) and path.exists() else strays).append(path)
    return images, strays


def files_below(folder: Path) -> list[Path]:
    """Returns all files in and below a folder by name, without hidden ones; enters links once.

    Links to images that are gone are among them.

    Raises:
      OSError: a folder cannot be read, or another link leads nowhere.
    """
    paths, entered = [], set()

    def visit(place: Path) -> None:
        # A link to a folder above would make a cycle.
        if (real := os.path.realpath(place)) in entered:
            return
        entered.add(real)
        folders, files = _entries(place)
        paths.extend(place / name for name in files if not is_hidden(name))
        for name in folders:
            if not is_hidden(name):
                visit(place / name)

    visit(folder)
    return sorted(paths)


def _composed(name: str) -> str:
    """Returns a name in Unicode's composed form; macOS may write folders' names decomposed."""
    return unicodedata.normalize("NFC", name)


def _plain(name: str) -> str:
    """Returns a name without case and separators, which differ between copies."""
    return _composed(name.lower().replace("-", "").replace("_", "").replace(" ", ""))


def match_folders(folders: Sequence[Path], names: Aliases) -> dict[str, Path]:
    """Returns the folder of each name that has one; the name itself comes before an alias.

    Raises:
      ValueError: two folders differ only in case, separators or the form of Unicode, so that either
        may be meant.
    """
    matches = {}
    for name, aliases in names.items():
        for spelling in (name, *aliases):
            similar = [folder for folder in folders if _plain(folder.name) == _plain(spelling)]
            exact = [folder for folder in similar if _composed(folder.name) == _composed(spelling)]
            candidates = exact or similar
            if len(candidates) > 1:
                raise ValueError(
                    f"{' and '.join(map(str, candidates))} may both be {name!r}: rename or remove "
                    "one"
                )
            if candidates:
                matches[name] = candidates[0]
                break
    return matches


def domain_folders(path: str | Path | None, dataset: Published) -> tuple[Path, dict[str, Path]]:
    """Returns the folder that holds a dataset's domains, and the folder of every domain.

    `path` is the folder that holds the domains, or the folder around it.

    Raises:
      FileNotFoundError: there is no such folder, or some domains have none; all are named.
    """
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder: {dataset.where}")
    path = Path(path)
    for root in (path, *subfolders(path)):
        if folders := match_folders(subfolders(root), dataset.domains):
            break
    else:
        raise FileNotFoundError(
            f"data.path {path} has no domain of {dataset.name}: {dataset.where}"
        )
    if missing := [name for name in dataset.domains if name not in folders]:
        raise FileNotFoundError(
            f"{root} lacks the folders {first_few(missing)} of {dataset.name}: {dataset.where}"
        )
    return root, folders


def list_domain(name: str, folder: Path, dataset: Published) -> Listing:
    """Lists the images of a domain, by class and name; other folders are left out.

    The folder holds CLASS/*.jpg, or images/CLASS/*.jpg as in Office-31, or PART/CLASS/*.jpg if the
    dataset has parts. A ValueError names all classes without a folder or images.
    """
    classes, parts = dataset.classes, dataset.parts
    inside = {inner.name.lower(): inner for inner in subfolders(folder)}
    has_classes = bool(match_folders(list(inside.values()), classes))
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
        around = [inside[inner] for inner in (dataset.whole, "images") if inner in inside]
        if around and not has_classes:
            folder = around[0]
        listing = list_classes(name, folder, classes)
    present = set(listing.labels.tolist())
    if missing := [c for label, c in enumerate(classes) if label not in present]:
        raise ValueError(
            f"{dataset.name}, {name!r}: no images of {first_few(missing)} in {folder}; every class "
            f"needs a folder with images: {dataset.where}"
        )
    return listing


def list_classes(name: str, folder: Path, classes: Aliases) -> Listing:
    """Lists the images of the classes that have a folder in this one, FOLDER/CLASS/*.jpg."""
    inside = subfolders(folder)
    class_folders = match_folders(inside, classes)
    files, labels = [], []
    images, other_files = list_files(folder)
    strays = (
        [inner for inner in inside if inner not in class_folders.values()] + other_files + images
    )
    for label, class_name in enumerate(classes):
        if place := class_folders.get(class_name):
            images, other_files = list_files(place)
            files += images
            labels += [label] * len(images)
            strays += other_files + subfolders(place)
    return Listing(name, files, np.array(labels, np.int32), strays)


def to_source(
    dataset: Published,
    root: Path,
    listings: Sequence[Listing],
    image_size: int,
    *,
    notes: Sequence[str] = (),
    **options: Any,
) -> Source:
    """Returns the images of all domains, decoded: u8[N, image_size, image_size, 3].

    Samples are named by their files, relative to `root`. Notes state what was converted or left
    out, and which domains have another number of images than published. `options` are `cache`,
    `progress`, `max_megapixels` and `orientation` of `decode`; errors are those of `decode`.
    """
    files = [file for listing in listings for file in listing.files]
    images, converted = decode(files, image_size, root=root, **options)
    notes, pools, start = list(notes), [], 0
    for listing in listings:
        count = len(listing.files)
        names = np.array(relative_names(listing.files, root))
        part = slice(start, start := start + count)
        pools.append(Pool(listing.name, images[part], listing.labels, names, listing.parts))
        expected = dataset.counts.get(listing.name, count)
        if count != expected:
            reason = (
                "a reduced copy, or files are missing: then fetch or unpack it again"
                if count < expected
                else "another edition, or files were added or unpacked twice"
            )
            notes.append(
                f"{dataset.name}, {listing.name}: found {count} images, expected {expected} "
                f"({reason})"
            )
    strays = [stray for listing in listings for stray in listing.strays]
    if strays:
        notes.append(
            f"left out {len(strays)} files or folders that are not images of a class: "
            f"{first_few(relative_names(strays, root), 3)}"
        )
    about = (dataset.name, tuple(dataset.classes), tuple(pools), dataset.mean, dataset.std)
    key = hash_of_files(files, root, image_size)
    return check_source(Source(*about, (*notes, *converted), key=key))


def load_folders(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    groups: str = "",
    **options: Any,
) -> Source:
    """Returns a user's images as u8[N, image_size, image_size, 3], one pool a domain.

    They are normalized by ImageNet's mean and standard deviation, as PACS is.

    Args:
      path: the folder of the domains.
      image_size: pixels a side.
      domains: names of their folders, in that order; empty for all, by name.
      classes: names of their folders, in the order of the labels; empty for all, by name.
      groups: a regular expression for what no split separates, see `by_class.groups_of`; samples
        are then named by their groups. Empty to divide images one by one.
      **options: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`.

    Returns:
      Source "folders", without parts.

    Raises:
      FileNotFoundError: there is no such folder, or some domains have none.
      ValueError: a name is given twice, a class has no images, or images cannot be read.
    """
    for key, names in (("domains", domains), ("classes", classes)):
        if len(set(map(_plain, names))) < len(names):
            raise ValueError(f"data.{key}={tuple(names)} has a name twice; name each once")
    inside = subfolders(Path(path)) if path else []
    all_domains = (_composed(folder.name) for folder in inside if subfolders(folder))
    about = ("folders", "folders", "images of one's own")
    named = dict.fromkeys(domains or all_domains, ())
    dataset = Published(*about, domains=named, classes={}, counts={}, where=_WHERE)
    root, folders = domain_folders(path, dataset)
    if not classes:
        spellings: dict[str, str] = {}  # one of names that `_plain` makes equal
        inner = [place for folder in folders.values() for place in subfolders(folder)]
        for name in sorted({_composed(place.name) for place in inner}):
            spellings.setdefault(_plain(name), name)
        if not spellings:
            raise FileNotFoundError(
                f"{root} has no folders of classes in {first_few(list(folders))}: {_WHERE}"
            )
        classes = tuple(spellings.values())
    dataset = dataset._replace(classes=dict.fromkeys(classes, ()))
    listings = [list_domain(name, folder, dataset) for name, folder in folders.items()]
    if not groups:
        return to_source(dataset, root, listings, image_size, **options)
    grouped = [  # before hours of decoding
        groups_of(name, folder, listing.files, groups)
        for (name, folder), listing in zip(folders.items(), listings, strict=True)
    ]
    notes = [note for _, note in grouped]
    source = to_source(dataset, root, listings, image_size, notes=notes, **options)
    pools = [
        pool._replace(names=np.array(names))
        for pool, (names, _) in zip(source.pools, grouped, strict=True)
    ]
    return source._replace(pools=tuple(pools))
