"""Your own images in folders, DOMAIN/CLASS/*.jpg, and what published datasets share.

    photo/dog/1.jpg  photo/cat/2.jpg  sketch/dog/a.png  sketch/cat/b.png

A domain is a folder that holds folders; its classes are the folders in it, and every domain must
have them all. Images may have any size and any format in `decode.FORMATS`; they are stretched to
squares. Folders may be written in any case, with or without spaces, - and _, and in any form of
Unicode. Files that are not images are left out. A link that leads nowhere is an error.
"""

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.division.partition import groups_of
from fedjax_bn.data.pixels.decode import decode, hash_of_files, relative_names
from fedjax_bn.data.source import Pool, Source, check_source

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation
_SUFFIX = re.compile(r"[^.].*\.(jpe?g|jpe|jfif|png|bmp|gif|tiff?|webp|p[bgpn]m)", re.I | re.DOTALL)
# Folders that programs add: macOS' archives hold `._NAME` files there, Synology's disks thumbnails.
_SYSTEM = ("__MACOSX", "@eaDir")
_WHERE = (
    "it must hold DOMAIN/CLASS/*.jpg; data.domains and data.classes choose some of them; a .npz is "
    "read by data.name=npz"
)

# name of a domain or class -> other names of its folder in some copies
Aliases = Mapping[str, tuple[str, ...]]


class Published(NamedTuple):
    """What a dataset of image folders is, according to its publication."""

    name: str  # as in `data.name`
    about: str = ""  # its name in the publication, and what it shows
    domains: Aliases = MappingProxyType({})
    classes: Aliases = MappingProxyType({})  # in the order of the labels
    counts: Mapping[str, int] = MappingProxyType({})  # images of each domain, if published
    where: str = ""  # the form of the folder and where to fetch it; error messages end with it
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    image_size: int = 224  # pixels a side, as in the methods' papers
    # folder -> part, in copies of the form DOMAIN/FOLDER/CLASS/*.jpg
    parts: Mapping[str, int] = MappingProxyType({})


class Listing(NamedTuple):
    """The image files of one domain."""

    name: str
    files: list[Path]
    labels: np.ndarray  # i32[N]
    parts: np.ndarray | None = None  # i8[N], as in `Pool`
    names: Sequence[str] | None = None  # N of them, as in `Pool`; None for the files' paths
    strange: Sequence[Path] = ()  # folders of no class, whose images are left out


def is_image(name: str) -> bool:
    """Returns whether a file of this name is an image, and not macOS' companion `._NAME.jpg`."""
    return bool(_SUFFIX.fullmatch(name))


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the folders in a folder without hidden ones, and its files, each by name."""
    folders, files = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        hidden = path.name.startswith(".") or path.name in _SYSTEM
        if path.is_dir():
            folders += [] if hidden else [path]
        # It may have been a class or an image, which must not go missing without a word.
        elif path.is_symlink() and not path.exists():
            raise FileNotFoundError(f"{path} leads nowhere: correct or remove it")
        else:
            files += [] if hidden else [path]
    return folders, files


def subfolders(folder: Path) -> list[Path]:
    """Returns a folder's folders by name, without hidden ones; none if there is no folder."""
    return _entries(folder)[0]


def files_below(folder: Path) -> list[Path]:
    """Returns all files in and below a folder by name, without hidden ones; enters links once."""
    paths, entered, places = [], set(), [folder]
    for place in places:  # which grow
        if (real := os.path.realpath(place)) not in entered:  # links upwards would make a cycle
            entered.add(real)
            folders, files = _entries(place)
            places += folders
            paths += files
    return sorted(paths)


def _composed(name: str) -> str:
    """Returns a name in Unicode's composed form; macOS may write folders' names decomposed."""
    return unicodedata.normalize("NFC", name)


def _plain(name: str) -> str:
    """Returns a name without case and separators, which differ between copies."""
    return _composed(re.sub("[-_ ]", "", name.lower()))


def match_folders(folders: Sequence[Path], names: Aliases) -> dict[str, Path]:
    """Returns the folder of each name that has one; the name itself comes before an alias."""
    matches = {}
    for name, aliases in names.items():
        for spelling in reversed((name, *aliases)):
            similar = [folder for folder in folders if _plain(folder.name) == _plain(spelling)]
            exact = [folder for folder in similar if _composed(folder.name) == _composed(spelling)]
            matches[name] = exact or similar or matches.get(name, [])
        if len(matches[name]) > 1:
            culprits = " and ".join(map(str, matches[name]))
            raise ValueError(f"{culprits} may both be {name!r}: remove one")
    return {name: candidates[0] for name, candidates in matches.items() if candidates}


def domain_folders(path: str | Path | None, dataset: Published) -> tuple[Path, dict[str, Path]]:
    """Returns the folder of domains, at or in `path`, and each domain's; else FileNotFoundError."""
    path, folders = Path(path or "PATH"), {}
    for root in (path, *subfolders(path)):
        if folders := match_folders(subfolders(root), dataset.domains):
            break
    missing = [name for name in dataset.domains if name not in folders]
    # Two spellings of one name would be two domains with the same images.
    if missing or not folders or len({*folders.values()}) < len(folders):
        names = first_few(missing or list(dataset.domains)) or "any domain"
        raise FileNotFoundError(
            f"data.path {path} lacks {names} of {dataset.name}: {dataset.where}"
        )
    return root, folders


def chosen_folders(
    root: Path, domains: Sequence[str], is_domain: bool, where: str
) -> dict[str, Path]:
    """Returns the folders of domains in `root`, by default all, or `root` itself if it is one.

    A FileNotFoundError says which are missing, and ends with `where`.
    """
    folders = {folder.name: folder for folder in subfolders(root)}
    folders = {root.resolve().name: root} if is_domain else folders
    missing = [name for name in domains if name not in folders]
    if missing or not folders:
        names = first_few(list(folders)) or "none"
        faults = f"has the domains {names}, and not {first_few(missing)}" if missing else "has none"
        raise FileNotFoundError(f"data.path={root} {faults}: {where}")
    return {name: folders[name] for name in domains or folders}


def list_domain(name: str, folder: Path, dataset: Published) -> Listing:
    """Lists the images of a domain, by class and name; a ValueError names classes without any.

    The folder holds CLASS/*.jpg, or images/CLASS/*.jpg as in Office-31, or PART/CLASS/*.jpg if the
    dataset has parts.
    """
    inside = {inner.name.lower(): inner for inner in subfolders(folder)}
    numbers = {inside[part]: k for part, k in dataset.parts.items() if part in inside}
    if match_folders(list(inside.values()), dataset.classes):
        numbers, places = {}, [folder]
    else:
        places = list(numbers) or [inside.get("images", folder)]
    listings = [list_classes(name, place, dataset.classes) for place in places]
    labels = np.concatenate([listing.labels for listing in listings])
    missing = [c for label, c in enumerate(dataset.classes) if label not in labels]
    if missing or not len(labels):
        classes = first_few(missing) or "any class"
        raise ValueError(f"{folder} has no images of {classes}: {dataset.where}")
    files = [file for listing in listings for file in listing.files]
    strange = [place for listing in listings for place in listing.strange]
    sizes = [len(listing.files) for listing in listings]
    parts = np.repeat(np.array([*numbers.values()], np.int8), sizes) if numbers else None
    return Listing(name, files, labels, parts, strange=strange)


def list_classes(name: str, folder: Path, classes: Aliases) -> Listing:
    """Lists the images of the classes that have a folder in this one, FOLDER/CLASS/*.jpg."""
    inside = subfolders(folder)
    class_folders = match_folders(inside, classes)
    strange = [place for place in inside if place not in class_folders.values()]
    files, labels = [], []
    for label, class_name in enumerate(classes):
        if place := class_folders.get(class_name):
            files += [file for file in _entries(place)[1] if is_image(file.name)]
            labels += [label] * (len(files) - len(labels))
    return Listing(name, files, np.array(labels, np.int32), strange=strange)


def folder_source(
    dataset: Published,
    root: Path,
    listings: Sequence[Listing],
    image_size: int,
    *,
    notes: Sequence[str] = (),
    **options: Any,
) -> Source:
    """Returns the images of all domains, decoded: u8[N, image_size, image_size, 3].

    Samples are named by their files, relative to `root`. Notes state what differs from the
    publication or was left out. `options` and errors are those of `decode`.
    """
    files = [file for listing in listings for file in listing.files]
    images, converted = decode(files, image_size, root=root, **options)
    notes, pools, start = list(notes), [], 0
    for listing in listings:
        count = len(listing.files)
        names = np.array(listing.names or relative_names(listing.files, root))
        rows = slice(start, start := start + count)
        pools.append(Pool(listing.name, images[rows], listing.labels, names, listing.parts))
        if count != (expected := dataset.counts.get(listing.name, count)):
            reason = "images are missing" if count < expected else "images were added"
            about = f"found {count} images, expected {expected}: {reason}, or another edition"
            notes.append(f"{dataset.name}, {listing.name}: {about}")
    # An image that is silently missing would change the scores.
    if strange := [place for listing in listings for place in listing.strange]:
        folders = first_few(relative_names(strange, root), 3)
        notes.append(f"left out {len(strange)} folders that are no class: {folders}")
    form = (dataset.name, tuple(dataset.classes), tuple(pools), dataset.mean, dataset.std)
    key = hash_of_files(files, root, image_size)
    return check_source(Source(*form, (*notes, *converted), key=key))


def load_folders(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    groups: str = "",
    **options: Any,
) -> Source:
    """Returns "folders", u8[N, image_size, image_size, 3], one pool a domain, without parts.

    They are normalized by ImageNet's mean and standard deviation, as PACS is.
    `groups` is a regular expression for what no split separates, see `partition.groups_of`, and
    names the samples; empty to divide images one by one.
    """
    inside = subfolders(Path(path)) if path else []
    all_domains = (_composed(folder.name) for folder in inside if subfolders(folder))
    dataset = Published("folders", domains=dict.fromkeys(domains or all_domains, ()), where=_WHERE)
    root, folders = domain_folders(path, dataset)
    names = {_composed(place.name) for folder in folders.values() for place in subfolders(folder)}
    spellings = {_plain(name): name for name in sorted(names, reverse=True)}  # the first of equals
    dataset = dataset._replace(classes=dict.fromkeys(classes or sorted(spellings.values()), ()))
    listings, notes = [], []
    for name, folder in folders.items():
        listing = list_domain(name, folder, dataset)
        if groups:
            sample_names, note = groups_of(name, folder, listing.files, groups)
            listing = listing._replace(names=sample_names)
            notes.append(note)
        listings.append(listing)
    return folder_source(dataset, root, listings, image_size, notes=notes, **options)
