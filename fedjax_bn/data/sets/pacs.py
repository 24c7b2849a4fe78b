"""PACS (Li et al. 2017): photographs, art paintings, cartoons and sketches of seven classes.

    photo/dog/*.jpg  art_painting/...  cartoon/...  sketch/...   1670, 2048, 2344, 3929 images
    splits/photo_train_kfold.txt, photo_crossval_kfold.txt, photo_test_kfold.txt, ...   optional

The authors' lists are read where they lie in `splits` or in "Train val splits and h5py files
pre-read". Their lines are `photo/dog/056_0022.jpg 1`, with labels from 1; suffixes may differ from
those of the images. Training and crossval lists divide a domain, and the test list is the whole of
it, since a domain is tested when it is the unseen one; so they become training and validation
parts, and there is no test part. The published crossval list of art_painting begins with two
slips: dog/pic_225.jpg has label 0, and dog/pic_249.jpg is missing where dog/pic_248.jpg stands a
second time. The class is the folder's in any case, and images in no list go to validation.

DomainBed, and so FedIG, does not use the lists but divides at random (`data.split=holdout`); it
normalizes by ImageNet's mean and standard deviation, as this reader does. FedCD does not say.

References: Li, Yang, Song, Hospedales, "Deeper, broader and artier domain generalization", ICCV
2017; Gulrajani & Lopez-Paz, "In search of lost domain generalization", ICLR 2021.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from fedjax_bn.data.pixels.decode import first_few
from fedjax_bn.data.sets.folders import domain_folders, find_root, list_domain
from fedjax_bn.data.sets.lists import read_list, without_suffix
from fedjax_bn.data.sets.published import IMAGENET, Listing, Published, spelled, to_source
from fedjax_bn.data.source import TRAIN, VALIDATION, Source

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
PACS = Published(
    name="pacs",
    domains={
        "photo": ("photos",),
        "art_painting": ("art", "paintings"),
        "cartoon": ("cartoons",),
        "sketch": ("sketches",),
    },
    classes=spelled(*CLASSES),
    counts={"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
    where=(
        "it must hold photo, art_painting, cartoon and sketch, each with the class folders "
        f"{', '.join(CLASSES)} of images, and optionally splits/*_kfold.txt (PACS, linked from "
        "dali-dl.github.io/project_iccv2017.html, or by DomainBed's domainbed.scripts.download)"
    ),
    mean=IMAGENET[0],
    std=IMAGENET[1],
)
SLIP = "art_painting/dog/pic_225.jpg"  # labelled 0 in the published crossval list
LISTS = ("splits", "Train val splits and h5py files pre-read")


def load(
    path: str | Path | None,
    *,
    image_size: int = 224,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Source:
    """PACS as u8[N, image_size, image_size, 3], seven classes, four domains.

    Args:
      path: the folder described above.
      image_size: pixels a side; DomainBed has 224.
      cache: folder for the decoded images, see `decode`.
      progress: show a bar while decoding.

    Returns:
      Source "pacs", with official parts where the lists are there.

    Raises:
      FileNotFoundError: a folder or list is missing, or a list names images that are.
      ValueError: a class has no images, an image cannot be read, or a list's labels are wrong.
      OSError: the cache cannot be written.
    """
    root = find_root(path, PACS)
    folders = domain_folders(root, PACS)
    listings = [list_domain(name, folder, PACS) for name, folder in folders.items()]
    lists, notes = find_lists(Path(path), root), []
    if lists:
        listings = [divide(listing, lists, notes) for listing in listings]
    return to_source(PACS, root, listings, image_size, cache=cache, progress=progress, notes=notes)


def find_lists(path: Path, root: Path) -> Path | None:
    """The folder that has the authors' lists; None where there are none."""
    for base in dict.fromkeys((path, root)):
        for folder in (*(base / name for name in LISTS), base):
            if any(folder.glob("*_kfold.txt")):
                return folder
    return None


def divide(listing: Listing, lists: Path, notes: list[str]) -> Listing:
    """The listing with the authors' parts; appends to `notes` what is odd about them.

    Raises:
      FileNotFoundError: a list is missing, or names images that are.
      ValueError: labels are wrong, or an image is in both lists.
    """
    places = {_canonical(file, listing.name): k for k, file in enumerate(listing.files)}
    train, crossval = (
        read_places(lists / f"{listing.name}_{part}_kfold.txt", listing, places)
        for part in ("train", "crossval")
    )
    test = lists / f"{listing.name}_test_kfold.txt"
    if test.is_file():  # it names all images and divides nothing
        read_places(test, listing, places)
    both = sorted(set(train) & set(crossval))
    if both:
        names = first_few([listing.files[k].name for k in both])
        raise ValueError(
            f"{lists}: {listing.name}_train_kfold.txt and {listing.name}_crossval_kfold.txt both "
            f"have {names}; fetch the lists again"
        )
    parts = np.full(len(listing.files), -1, np.int8)
    parts[train], parts[crossval] = TRAIN, VALIDATION
    notes += _oddities(listing, parts, train + crossval)
    parts[parts < 0] = VALIDATION
    return listing._replace(parts=parts)


def _canonical(file: Path, domain: str) -> str:
    """DOMAIN/CLASS/NAME as the lists spell it, without suffix."""
    return without_suffix(f"{domain}/{file.parent.name.lower()}/{file.name}")


def read_places(path: Path, listing: Listing, places: dict[str, int]) -> list[int]:
    """The positions in the listing of the images that a list names, in the list's order.

    Raises:
      FileNotFoundError: the list is missing, or names images that are.
      ValueError: its labels do not count from 1 or are not those of the class folders.
    """
    names, labels = read_list(path)
    missing = [name for name in names if without_suffix(name) not in places]
    if missing:
        raise FileNotFoundError(
            f"{path} names {len(missing)} images that are missing: {first_few(missing)}; fetch "
            "them, or move the lists away to do without"
        )
    found = [places[without_suffix(name)] for name in names]
    right = listing.labels[found] + 1
    if (labels == right - 1).all():
        raise ValueError(
            f"{path}: labels count from 0, but those of PACS count from 1; add 1 to each"
        )
    labels = np.where(np.array([name == SLIP for name in names]) & (labels == 0), right, labels)
    wrong = [f"{names[k]} {labels[k]} (not {right[k]})" for k in np.flatnonzero(labels != right)]
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} labels are not those of the class folders, counted from 1: "
            f"{first_few(wrong)}; fetch the list again"
        )
    return found


def _oddities(listing: Listing, parts: np.ndarray, listed: list[int]) -> list[str]:
    twice = [listing.files[k].name for k, count in Counter(listed).items() if count > 1]
    absent = [listing.files[k].name for k in np.flatnonzero(parts < 0)]
    notes = []
    if twice:
        notes.append(f"pacs, {listing.name}: listed twice, used once: {first_few(twice)}")
    if absent:
        notes.append(f"pacs, {listing.name}: in no list, used for validation: {first_few(absent)}")
    return notes
