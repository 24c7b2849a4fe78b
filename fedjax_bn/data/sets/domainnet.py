"""DomainNet (Peng et al. 2019): drawings, paintings and photographs of 345 classes.

    clipart/aircraft_carrier/*.jpg  infograph/...  painting/...  quickdraw/...  real/...  sketch/...
    clipart_train.txt, clipart_test.txt, infograph_train.txt, ...

Lines of the official lists are `clipart/aircraft_carrier/clipart_001_000001.jpg 0`, with labels
from 0. They say which images there are, and give training and test parts; images in no list are
left out. Only folders of the classes that are asked for are needed.

FedBN (section 5.2, D.3 and the authors' code): the ten classes with the most images; images
stretched to 256x256, no normalization beyond u8/255 (so mean 0 and standard deviation 1 here);
training images are flipped and turned within 30 degrees; every client is cut to 105 training and
105 validation images, 0.05 of the smallest.

References: Peng, Bai, Xia, Huang, Saenko, Wang, "Moment matching for multi-source domain
adaptation", ICCV 2019; Li et al., "FedBN", ICLR 2021.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.domainnet_lists import SIZES, Lines, check_labels, read_lists, size_notes
from fedjax_bn.data.sets.folders import (
    domain_folders,
    find_root,
    list_files,
    match_folders,
    subfolders,
)
from fedjax_bn.data.sets.lists import without_suffix
from fedjax_bn.data.sets.published import Listing, Published, spelled, to_source
from fedjax_bn.data.source import Source

TEN = (  # the most frequent, as FedBN's code numbers them
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
_ALL = ("all",)
DOMAINNET = Published(
    name="domainnet",
    title="DomainNet",
    about="drawings, paintings and photographs of up to 345 classes",
    domains=spelled(*SIZES),
    classes={},
    counts={},
    where=(
        f"it must hold {', '.join(SIZES)}, each with class folders of images, and beside them the "
        "lists clipart_train.txt, clipart_test.txt, ... (DomainNet, cleaned version, from "
        "ai.bu.edu/M3SDA)"
    ),
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    image_size=256,
)


def load(
    path: str | Path | None,
    *,
    image_size: int = 256,
    classes: Sequence[str] = TEN,
    **how: Any,
) -> Source:
    """DomainNet as u8[N, image_size, image_size, 3], six domains, with training and test parts.

    Args:
      path: the folder described above.
      image_size: pixels a side; FedBN has 256.
      classes: names as in the lists, numbered in that order; ("all",) for every class there is.
      **how: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`; 345 classes at 256
        take 115 GB of cache.

    Returns:
      Source "domainnet".

    Raises:
      FileNotFoundError: a folder or list is missing, or a list names images that are.
      ValueError: a class is in no list, a list is wrong, or an image cannot be read.
      OSError: the cache cannot be written.
    """
    root = find_root(path, DOMAINNET)
    folders = domain_folders(root, DOMAINNET)
    places = [root, root / "splits", Path(path), Path(path) / "splits"]
    lists = {domain: read_lists(places, domain, DOMAINNET.where) for domain in folders}
    numbering = check_labels([lines for both in lists.values() for lines in both])
    chosen = _chosen_classes(tuple(classes), numbering)
    notes = [note for domain in lists for note in size_notes(domain, lists[domain])]
    missing: list[str] = []
    listings = [
        _list_images(domain, folder, lists[domain], chosen, missing, notes)
        for domain, folder in folders.items()
    ]
    if missing:
        raise FileNotFoundError(
            f"the lists in {lists['clipart'][0].path.parent} name {len(missing)} images that are "
            f"missing in {root}: {first_few(missing)}; fetch or unpack them again"
        )
    _check_classes(listings, chosen)
    dataset = DOMAINNET._replace(classes=spelled(*chosen))
    return to_source(dataset, root, listings, image_size, notes=notes, **how)


def _chosen_classes(classes: tuple[str, ...], known: Sequence[str]) -> tuple[str, ...]:
    """The classes asked for.

    Raises:
      ValueError: none is asked for, one is asked for twice, or one is in no list.
    """
    if classes == _ALL:
        return tuple(known)
    unknown = [name for name in classes if name not in known]
    if unknown:
        raise ValueError(
            f"data.classes has {first_few(unknown)}, which no list of domainnet names; there are "
            f"{len(known)}: {first_few(known)}"
        )
    if not classes or len(set(classes)) < len(classes):
        raise ValueError(
            f"data.classes is {classes}; give different classes, or {_ALL} for all {len(known)}"
        )
    return classes


def _list_images(
    domain: str,
    folder: Path,
    lists: Sequence[Lines],
    classes: tuple[str, ...],
    missing: list[str],
    notes: list[str],
) -> Listing:
    """The listed images of a domain; what is listed but absent is appended to `missing`."""
    there = _images_there(domain, folder, classes)
    label_of = {name: label for label, name in enumerate(classes)}
    parts: dict[Path, int] = {}
    labels: dict[Path, int] = {}
    repeated = 0
    for lines in lists:
        for name, one in zip(lines.names, lines.classes, strict=True):
            if one not in label_of:
                continue
            file = there.get(name) or there.get(without_suffix(name))
            if file is None:
                missing.append(name)
                continue
            repeated += file in parts
            parts[file], labels[file] = lines.part, label_of[one]  # a test image stays one
    if repeated:
        notes.append(f"domainnet, {domain}: {repeated} lines repeat an image; it is used once")
    unlisted = len(set(there.values())) - len(parts)
    if unlisted:
        notes.append(f"domainnet, {domain}: left out {unlisted} images that are in no list")
    files = list(parts)
    return Listing(
        domain,
        files,
        np.array([labels[file] for file in files], np.int32),
        [],
        np.array([parts[file] for file in files], np.int8),
    )


def _images_there(domain: str, folder: Path, classes: Sequence[str]) -> Mapping[str, Path]:
    """The images of those classes by their names in lists, with and without suffix."""
    there: dict[str, Path] = {}
    for name, one in match_folders(subfolders(folder), spelled(*classes)).items():
        for file in list_files(one)[0]:
            there[f"{domain}/{name}/{file.name}"] = file
            there.setdefault(without_suffix(f"{domain}/{name}/{file.name}"), file)
    return there


def _check_classes(listings: Sequence[Listing], classes: Sequence[str]) -> None:
    """Raises ValueError if a domain has no image of a class; all are named."""
    absent = [
        f"{name} of {listing.name}"
        for listing in listings
        for label, name in enumerate(classes)
        if label not in set(listing.labels.tolist())
    ]
    if absent:
        raise ValueError(
            f"domainnet: the lists have no images of {first_few(absent)}; choose other data.classes"
        )
