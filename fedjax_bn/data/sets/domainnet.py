"""DomainNet (Peng et al. 2019): drawings, paintings and photographs of 345 classes.

    clipart/aircraft_carrier/*.jpg  infograph/...  painting/...  quickdraw/...  real/...  sketch/...
    clipart_train.txt, clipart_test.txt, infograph_train.txt, ...

Lines of the official lists are `clipart/aircraft_carrier/clipart_001_000001.jpg 0`, with labels
from 0. They name the images and their training and test parts; images in no list are left out. Only
the folders of the chosen classes are needed.

FedBN (section 5.2, D.3 and the authors' code): the ten classes with the most images; images
stretched to 256x256, no normalization beyond u8/255 (so mean 0 and standard deviation 1 here);
training images are flipped and turned within 30 degrees; every client is cut to 105 training and
105 validation images, 0.05 of the smallest.

References: Peng, Bai, Xia, Huang, Saenko, Wang, "Moment matching for multi-source domain
adaptation", ICCV 2019; Li et al., "FedBN", ICLR 2021.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.files import read_list, without_suffix
from fedjax_bn.data.sets.folders import (
    Listing,
    Published,
    domain_folders,
    list_files,
    match_folders,
    subfolders,
    to_source,
)
from fedjax_bn.data.source import TEST, TRAIN, Source

_SIZES = {  # lines of the official training and test lists, for all 345 classes
    "clipart": (33_525, 14_604),
    "infograph": (36_023, 15_582),
    "painting": (50_416, 21_850),
    "quickdraw": (120_750, 51_750),
    "real": (120_906, 52_041),
    "sketch": (48_212, 20_916),
}
TEN = (  # the most frequent, as FedBN's code numbers them
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)
_ALL = ("all",)
DOMAINNET = Published(
    name="domainnet",
    title="DomainNet",
    about="drawings, paintings and photographs of up to 345 classes",
    domains=dict.fromkeys(_SIZES, ()),
    classes={},
    counts={},
    where=(
        f"it must hold {', '.join(_SIZES)}, each with class folders of images, and beside them the "
        "lists clipart_train.txt, clipart_test.txt, ... (DomainNet, cleaned version, from "
        "ai.bu.edu/M3SDA)"
    ),
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    image_size=256,
)


class _Lines(NamedTuple):
    """A list: its file, its part, and the images' names DOMAIN/CLASS/FILE, classes and labels."""

    path: Path
    part: int
    names: list[str]
    classes: list[str]
    labels: np.ndarray


def load_domainnet(
    path: str | Path | None, *, image_size: int = 256, classes: Sequence[str] = TEN, **options: Any
) -> Source:
    """Returns DomainNet as u8[N, image_size, image_size, 3], six domains with official parts.

    Args:
      path: the folder described above.
      image_size: pixels a side; FedBN has 256.
      classes: names as in the lists, numbered in that order; ("all",) for every class there is.
      **options: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`; 345 classes at
        256 take 115 GB of cache.

    Returns:
      Source "domainnet".

    Raises:
      FileNotFoundError: a folder, a list or a listed image is missing.
      ValueError: a class is in no list, or lists are damaged or contradict each other.
    """
    root, folders = domain_folders(path, DOMAINNET)
    places = [base / name for base in (root, Path(path)) for name in ("", "splits")]
    lists = {domain: _read_lists(places, domain) for domain in folders}
    numbering = _numbering([lines for of_domain in lists.values() for lines in of_domain])
    chosen = tuple(numbering) if tuple(classes) == _ALL else tuple(classes)
    unknown = [name for name in chosen if name not in numbering]
    if unknown or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"data.classes is {chosen}; give different classes, or {_ALL} for all of the "
            f"{len(numbering)} in the lists: {first_few(numbering)}"
        )
    notes = [
        f"domainnet: {lines.path.name} has {len(lines.names)} lines, the official one {expected}"
        for domain, of_domain in lists.items()
        for lines, expected in zip(of_domain, _SIZES[domain], strict=True)
        if len(lines.names) != expected
    ]
    listings = [
        _list_images(domain, folder, lists[domain], chosen, notes)
        for domain, folder in folders.items()
    ]
    if absent := [
        f"{name} of {listing.name}"
        for listing in listings
        for label, name in enumerate(chosen)
        if label not in listing.labels
    ]:
        raise ValueError(
            f"domainnet: the lists have no images of {first_few(absent)}; choose other data.classes"
        )
    dataset = DOMAINNET._replace(classes=dict.fromkeys(chosen, ()))
    return to_source(dataset, root, listings, image_size, notes=notes, **options)


def _read_lists(folders: Sequence[Path], domain: str) -> list[_Lines]:
    """Reads DOMAIN_train.txt and DOMAIN_test.txt from the first folder that has each."""
    lists = []
    for part, number in (("train", TRAIN), ("test", TEST)):
        paths = [folder / f"{domain}_{part}.txt" for folder in folders]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"the list {paths[0]} is missing: {DOMAINNET.where}")
        names, labels = read_list(path)
        if faults := [n for n in names if n.count("/") != 2 or not n.startswith(f"{domain}/")]:
            raise ValueError(
                f"{path}: lines must be {domain}/CLASS/FILE LABEL, but these are not: "
                f"{first_few(faults)}"
            )
        lists.append(_Lines(path, number, names, [name.split("/")[1] for name in names], labels))
    return lists


def _numbering(lists: Sequence[_Lines]) -> list[str]:
    """Returns the classes of all lists in the order of their labels, which must agree."""
    label_of: dict[str, int] = {}
    for lines in lists:
        for name, label in zip(lines.classes, lines.labels.tolist(), strict=True):
            if label_of.setdefault(name, label) != label:
                raise ValueError(
                    f"{lines.path}: {name} has the label {label}, elsewhere in the lists "
                    f"{label_of[name]}; fetch the list again"
                )
    labels = sorted(label_of.values())
    if len(set(labels)) < len(labels) or labels == list(range(1, len(labels) + 1)):
        raise ValueError(
            f"{lists[0].path.parent}: in the lists two classes have one label, or labels count "
            "from 1, not from 0; fetch the lists again"
        )
    return sorted(label_of, key=label_of.get)


def _list_images(
    domain: str,
    folder: Path,
    lists: Sequence[_Lines],
    classes: tuple[str, ...],
    notes: list[str],
) -> Listing:
    """Lists the images of a domain; a FileNotFoundError names listed images that are missing."""
    file_of: dict[str, Path] = {}  # by the names in the lists, without suffix
    for name, place in match_folders(subfolders(folder), dict.fromkeys(classes, ())).items():
        for file in list_files(place)[0]:
            file_of[without_suffix(f"{domain}/{name}/{file.name}")] = file
    label_of = {name: label for label, name in enumerate(classes)}
    rows: dict[Path, tuple[int, int]] = {}  # file -> label and part
    missing, repeated = [], 0
    for lines in lists:
        for name, class_name in zip(lines.names, lines.classes, strict=True):
            if class_name in label_of:
                file = file_of.get(without_suffix(name))
                if file is None:
                    missing.append(name)
                else:
                    repeated += file in rows
                    # The test list is read last, so an image in both lists tests.
                    rows[file] = (label_of[class_name], lines.part)
    if missing:
        raise FileNotFoundError(
            f"{lists[0].path.parent} lists {len(missing)} images that are missing in {folder}: "
            f"{first_few(missing)}; fetch or unpack them again"
        )
    if repeated:
        notes.append(f"domainnet, {domain}: {repeated} lines repeat an image; it is used once")
    if unlisted := len(file_of) - len(rows):
        notes.append(f"domainnet, {domain}: left out {unlisted} images that are in no list")
    labels, parts = np.array(list(rows.values())).reshape(-1, 2).T
    return Listing(domain, list(rows), labels.astype(np.int32), parts=parts.astype(np.int8))
