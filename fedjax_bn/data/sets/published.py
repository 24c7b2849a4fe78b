"""What a publication says of a dataset of image folders, and the source made of what is there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode, hash_of_files, relative_names
from fedjax_bn.data.source import Pool, Source, check_source

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation

Spellings = Mapping[str, tuple[str, ...]]


class Lists(NamedTuple):
    """Text files DOMAIN_PART_kfold.txt that divide a dataset's domains, as PACS has them.

    Attributes:
      folders: where they lie in some copies, seen from the dataset's folder.
      train, validation: their PART for training and for validation.
      whole: the PART that names all images of the domain.
      first_label: the number of the first class.
      slips: image -> the wrong label that it has in the published lists.
    """

    folders: tuple[str, ...]
    train: str
    validation: str
    whole: str
    first_label: int
    slips: Mapping[str, int] = MappingProxyType({})


class Published(NamedTuple):
    """What a dataset of image folders is, according to its publication.

    Attributes:
      name: of the dataset, as in `data.name`.
      title: its name in the publication.
      about: what it shows, in a few words.
      domains: name -> other names that the domain's folder has in some copies.
      classes: likewise, in the order of the labels.
      counts: images of each domain; empty where the publication does not say.
      where: what the folder must look like and where to fetch it, to end a sentence with.
      mean, std: as in `Source`.
      image_size: pixels a side, as the methods' papers have it.
      parts: folder -> part, in copies of the form DOMAIN/FOLDER/CLASS/*.jpg.
      whole: in such a copy, the folder of a domain that is not divided.
      always_divided: every copy has that form.
      lists: the authors' lists, or None.
    """

    name: str
    title: str
    about: str
    domains: Spellings
    classes: Spellings
    counts: Mapping[str, int]
    where: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int = 224
    parts: Mapping[str, int] = MappingProxyType({})
    whole: str = ""
    always_divided: bool = False
    lists: Lists | None = None


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
    strays: list[Path]
    parts: np.ndarray | None = None


def spelled(*names: str, **others: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names without other spellings than case and separators, and those that have some."""
    return {name: others.get(name, ()) for name in (*names, *others)}


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

    Further arguments are `cache`, `progress`, `max_megapixels` and `orientation` of `decode`.

    Names of samples are files as seen from `root`. Notes tell what was converted or left out, and
    where a domain has another number of images than published.

    Raises:
      ValueError, OSError: see `decode`.
    """
    files = [file for listing in listings for file in listing.files]
    images, converted = decode(files, image_size, root=root, **how)
    pools, start = [], 0
    for listing in listings:
        names = np.array(relative_names(listing.files, root))
        stop = start + len(names)
        pools.append(Pool(listing.name, images[start:stop], listing.labels, names, listing.parts))
        start = stop
    notes = (*notes, *_count_notes(dataset, listings), *_stray_notes(listings, root), *converted)
    return check_source(
        Source(
            dataset.name,
            tuple(dataset.classes),
            tuple(pools),
            dataset.mean,
            dataset.std,
            notes,
            key=hash_of_files(files, root, image_size, times=False),
        )
    )


def _count_notes(dataset: Published, listings: Sequence[Listing]) -> list[str]:
    """A sentence for every domain that has another number of images than published."""
    notes = []
    for listing in listings:
        found, expected = len(listing.files), dataset.counts.get(listing.name)
        if expected is None or found == expected:
            continue
        why = (
            "a reduced copy, or files are missing: then fetch or unpack it again"
            if found < expected
            else "another edition, or files were added or unpacked twice"
        )
        notes.append(
            f"{dataset.name}, {listing.name}: found {found} images, expected {expected} ({why})"
        )
    return notes


def _stray_notes(listings: Sequence[Listing], root: Path) -> list[str]:
    """A sentence that counts what was left out, if anything was."""
    strays = relative_names([stray for listing in listings for stray in listing.strays], root)
    if not strays:
        return []
    return [
        f"left out {len(strays)} files or folders that are no class's images: "
        f"{first_few(strays, 3)}"
    ]
