"""Published folders of images and masks with equal names: one table, and one way to read it.

    fundus           Domain1/{train,test}/ROIs/{image,mask}/NAME.png
    fundus_centres   REFUGE/{train,test}/{image,mask}/NAME.png
    polyps           Kvasir/{images,masks}/NAME.jpg

The images of a domain may have any suffix. Folders may be written in any case and with or without
spaces, - and _. Other layouts are refused. FedDG's own arrays (.npy of 384 x 384 x 5) are not read:
their code does not state how it made them from the images.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.masks.assemble import Pair, Squares, to_source
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import relative_names
from fedjax_bn.data.sets.folders import (
    Aliases,
    Published,
    domain_folders,
    list_files,
    match_folders,
    subfolders,
)
from fedjax_bn.data.source import TEST, TRAIN, Source


class _Layout(NamedTuple):
    """A published dataset: its domains, where their files are, and what the masks' values are.

    Attributes:
      about: the dataset; `parts` names the folders of its official split.
      images, masks: the folders in a domain, or in each of its parts.
      values: value of a mask -> class.
    """

    about: Published
    images: str
    masks: str
    values: Mapping[int, int]


_SPLIT = MappingProxyType({"train": TRAIN, "test": TEST})
_DISC_AND_CUP = dict.fromkeys(("background", "disc", "cup"), ())
_TABLE = (
    # Wang et al., "DoFE: domain-oriented feature embedding for generalizable fundus image
    # segmentation on unseen datasets", IEEE TMI 2020; their masks are white around a grey disc with
    # a black cup. FedDG (Liu et al., CVPR 2021) calls the domains Site1 to Site4.
    _Layout(
        Published(
            name="fundus",
            title="fundus images of DoFE",
            about="optic disc and cup of four sites, as FedDG takes them",
            domains={f"Domain{k}": (f"Site{k}",) for k in range(1, 5)},
            classes=_DISC_AND_CUP,
            counts={"Domain1": 101, "Domain2": 159, "Domain3": 400, "Domain4": 400},
            where=(
                "it must hold Domain1 to Domain4, each with train/ROIs/image, train/ROIs/mask, "
                "test/ROIs/image and test/ROIs/mask of images and masks with equal names (DoFE, "
                "linked from github.com/emma-sjwang/Dofe); data.domains chooses some of them"
            ),
            parts=_SPLIT,
        ),
        "ROIs/image",
        "ROIs/mask",
        {value: 0 if value > 128 else 1 if value else 2 for value in range(256)},
    ),
    _Layout(
        Published(
            name="fundus_centres",
            title="fundus images of five centres",
            about="optic disc and cup, doi.org/10.5281/zenodo.8009107",
            domains=dict.fromkeys(("REFUGE", "Drishti", "ORIGA", "BinRushed", "Magrabia"), ()),
            classes=_DISC_AND_CUP,
            counts={
                **{"REFUGE": 400, "Drishti": 101, "ORIGA": 650},
                **{"BinRushed": 195, "Magrabia": 95},
            },
            where=(
                "it must hold REFUGE, Drishti, ORIGA, BinRushed and Magrabia, each with "
                "train/image, train/mask, test/image and test/mask of images and masks with equal "
                "names (doi.org/10.5281/zenodo.8009107); data.domains chooses some of them"
            ),
            parts=_SPLIT,
        ),
        "image",
        "mask",
        {value: 0 if value > 128 else 1 if value else 2 for value in range(256)},
    ),
    # White from 101 upwards, as FL-MedSegBench's code reads the masks (Zhu et al., 2026).
    _Layout(
        Published(
            name="polyps",
            title="polyps of six collections",
            about="endoscopic images",
            domains={
                "CVC-ClinicDB": ("ClinicDB", "CVC-612"),
                "CVC-300": (),
                "CVC-ColonDB": ("ColonDB",),
                "ETIS": ("ETIS-LaribPolypDB", "ETISLarib-PolypDB"),
                "EndoTect": (),
                "Kvasir": ("Kvasir-SEG",),
            },
            classes=dict.fromkeys(("background", "polyp"), ()),
            counts={
                **{"CVC-ClinicDB": 612, "CVC-300": 60, "CVC-ColonDB": 380},
                **{"ETIS": 196, "EndoTect": 200, "Kvasir": 1000},
            },
            where=(
                "it must hold CVC-ClinicDB, CVC-300, CVC-ColonDB, ETIS, EndoTect and Kvasir, each "
                "with images and masks of equal names; data.domains chooses some of them"
            ),
        ),
        "images",
        "masks",
        {value: int(value > 100) for value in range(256)},
    ),
)
LAYOUTS = MappingProxyType({layout.about.name: layout for layout in _TABLE})


def load(
    name: str,
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Returns the images of a dataset of `LAYOUTS` as u8[N, image_size, image_size, 3], with masks.

    Args:
      name: of the dataset.
      path: the folder of its domains, or the folder around it.
      image_size: pixels a side.
      domains: names of some of its domains; empty for all.
      **how: `large`, `cache`, `progress`, `max_megapixels` and `orientation` of `assemble.Squares`.

    Returns:
      Source `name`, with the official parts if the dataset has train and test folders.

    Raises:
      FileNotFoundError: a folder, an image or a mask is missing.
      ValueError: a domain is unknown, or a file is not right, see `assemble.to_source`.
      OSError: the cache cannot be written.
    """
    layout = LAYOUTS[name]
    about = layout.about._replace(domains=chosen(layout.about.domains, domains, name))
    root, folders = domain_folders(path, about)
    pairs, notes = {}, []
    for domain, folder in folders.items():
        pairs[domain] = _pairs(layout, folder, root)
        if (count := len(pairs[domain])) != about.counts[domain]:
            notes.append(f"{name}, {domain}: found {count} images, expected {about.counts[domain]}")
    squares = Squares(image_size, **how)
    how = {"classes": tuple(about.classes), "values": layout.values, "notes": notes}
    source = to_source(name, root, pairs, squares, **how)
    for pool in source.pools:
        if not np.any(pool.labels[MASK] == 1):
            raise ValueError(
                f"{folders[pool.name]} has no {list(about.classes)[1]} in any mask, so its masks "
                f"have other values than those of {about.title}: fetch it again"
            )
    return source


def chosen(known: Aliases, domains: Sequence[str], dataset: str) -> Aliases:
    """Returns the domains that `data.domains` chooses, in its order; all if it is empty.

    Raises:
      ValueError: a name is unknown.
    """
    if unknown := [name for name in domains if name not in known]:
        raise ValueError(
            f"data.domains names {first_few(unknown)}, but {dataset} has {', '.join(known)}"
        )
    return {name: known[name] for name in domains or known}


def _pairs(layout: _Layout, folder: Path, root: Path) -> list[Pair]:
    """Returns the images of a domain with their masks, part by part and by name."""
    pairs, about = [], layout.about
    parts = about.parts or {"": None}
    for name, part in parts.items():
        images, masks = (
            _by_stem(_inside(folder, [name, *place.split("/")], about.where))
            for place in (layout.images, layout.masks)
        )
        for own, others, lacks in ((images, masks, "mask"), (masks, images, "image")):
            if alone := [file for stem, file in own.items() if stem not in others]:
                raise FileNotFoundError(
                    f"{first_few(relative_names(alone, root))} in {root} has no {lacks} of the "
                    f"same name: {about.where}"
                )
        pairs += [Pair(file, masks[stem], part=part) for stem, file in images.items()]
    return pairs


def _inside(folder: Path, names: Sequence[str], where: str) -> Path:
    """Returns the folder of these names in a folder; names are as in `folders.match_folders`."""
    for name in filter(None, names):
        found = match_folders(subfolders(folder), {name: ()})
        if name not in found:
            raise FileNotFoundError(f"{folder} has no folder {name}: {where}")
        folder = found[name]
    return folder


def _by_stem(folder: Path) -> dict[str, Path]:
    """Returns the image files of a folder by their names without suffix."""
    images, _ = list_files(folder)
    found = {file.stem: file for file in images}
    if len(found) < len(images):
        twice = next(file for file in images if found[file.stem] != file)
        raise ValueError(f"{twice} and {found[twice.stem].name} have one name: remove one")
    if not images:
        raise FileNotFoundError(f"{folder} has no images: fetch or unpack it again")
    return found
