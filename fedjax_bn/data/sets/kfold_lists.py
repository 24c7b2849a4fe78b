"""Lists that divide a dataset of image folders, as those of PACS: DOMAIN_PART_kfold.txt.

The class is the folder's in any case, images in no list go to validation, and suffixes may differ
from those of the images.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.lists import read_list, without_suffix
from fedjax_bn.data.sets.published import Listing, Published
from fedjax_bn.data.source import TRAIN, VALIDATION


def find_lists(dataset: Published, path: Path, root: Path) -> Path | None:
    """The folder that has the authors' lists; None where there are none.

    Args:
      dataset: which may have no lists at all.
      path: the folder that the user gave.
      root: the folder that holds the domains.
    """
    if dataset.lists is None:
        return None
    for base in dict.fromkeys((path, root)):
        for folder in (*(base / name for name in dataset.lists.folders), base):
            if any(folder.glob("*_kfold.txt")):
                return folder
    return None


def divide_by_lists(
    listing: Listing, dataset: Published, folder: Path, notes: list[str]
) -> Listing:
    """The listing with the authors' parts; appends to `notes` what is odd about them.

    Raises:
      FileNotFoundError: a list is missing, or names images that are.
      ValueError: labels are wrong, or an image is in both lists.
    """
    names = dataset.lists
    train_list, validation_list, whole_list = (
        folder / f"{listing.name}_{part}_kfold.txt"
        for part in (names.train, names.validation, names.whole)
    )
    train, validation = (_places(path, listing, dataset) for path in (train_list, validation_list))
    if whole_list.is_file():  # it names all images and divides nothing
        _places(whole_list, listing, dataset)
    both = sorted(set(train) & set(validation))
    if both:
        raise ValueError(
            f"{folder}: {train_list.name} and {validation_list.name} both have "
            f"{first_few([listing.files[k].name for k in both])}; fetch the lists again"
        )
    parts = np.full(len(listing.files), -1, np.int8)
    parts[train], parts[validation] = TRAIN, VALIDATION
    notes += _oddities(f"{dataset.name}, {listing.name}", listing, parts, train + validation)
    parts[parts < 0] = VALIDATION
    return listing._replace(parts=parts)


def _canonical(file: Path, domain: str) -> str:
    """DOMAIN/CLASS/NAME as the lists spell it, without suffix."""
    return without_suffix(f"{domain}/{file.parent.name.lower()}/{file.name}")


def _places(path: Path, listing: Listing, dataset: Published) -> list[int]:
    """The positions in the listing of the images that a list names, in the list's order.

    Raises:
      FileNotFoundError: the list is missing, or names images that are.
      ValueError: its labels have another first number, or are not those of the class folders.
    """
    places = {_canonical(file, listing.name): k for k, file in enumerate(listing.files)}
    names, labels = read_list(path)
    missing = [name for name in names if without_suffix(name) not in places]
    if missing:
        raise FileNotFoundError(
            f"{path} names {len(missing)} images that are missing: {first_few(missing)}; fetch "
            "them, or move the lists away to do without"
        )
    found = [places[without_suffix(name)] for name in names]
    _check_list_labels(path, names, labels, listing.labels[found], dataset)
    return found


def _check_list_labels(
    path: Path, names: list[str], labels: np.ndarray, of_folders: np.ndarray, dataset: Published
) -> None:
    """Raises ValueError unless labels are those of the class folders, but for the known slips."""
    first, slips = dataset.lists.first_label, dataset.lists.slips
    right = of_folders + first
    if first and (labels == of_folders).all():
        raise ValueError(
            f"{path}: labels count from 0, but those of {dataset.title} count from {first}; add "
            f"{first} to each"
        )
    known = np.array([slips.get(name) == label for name, label in zip(names, labels, strict=True)])
    wrong = np.flatnonzero((labels != right) & ~known)
    if wrong.size:
        named = [f"{names[k]} {labels[k]} (not {right[k]})" for k in wrong]
        raise ValueError(
            f"{path}: {len(named)} labels are not those of the class folders, counted from "
            f"{first}: {first_few(named)}; fetch the list again"
        )


def _oddities(place: str, listing: Listing, parts: np.ndarray, listed: list[int]) -> list[str]:
    twice = [listing.files[k].name for k, count in Counter(listed).items() if count > 1]
    absent = [listing.files[k].name for k in np.flatnonzero(parts < 0)]
    notes = []
    if twice:
        notes.append(f"{place}: listed twice, used once: {first_few(twice)}")
    if absent:
        notes.append(f"{place}: in no list, used for validation: {first_few(absent)}")
    return notes
