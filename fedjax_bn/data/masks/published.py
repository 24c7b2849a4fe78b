"""Published folders of images and masks: one table, and one way to read it.

    fundus           Domain1/{train,test}/ROIs/{image,mask}/NAME.png
    fundus_centres   REFUGE/{train,test}/{image,mask}/NAME.png
    polyps           Kvasir/{images,masks}/NAME.jpg

`pairing` has the rule by which an image finds its mask. FedDG's own arrays (.npy of 384 x 384 x 5)
are not read: their code does not state how it made them from the images.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.boxes.labelled import part_of
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.masks.assemble import Pair, Squares, to_source
from fedjax_bn.data.masks.pairing import find_pairs
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import relative_names
from fedjax_bn.data.sets.folders import Aliases, Published, domain_folders, files_below, is_image
from fedjax_bn.data.source import TEST, TRAIN, Source


class _Layout(NamedTuple):
    """A published dataset: its domains, what the masks' values are, and where its files are.

    Attributes:
      about: the dataset; `parts` names the folders of its official split.
      values: value of a mask -> class.
      inside: a folder around all images and masks, in small letters; empty for none.
    """

    about: Published
    values: Mapping[int, int]
    inside: str = ""


_SPLIT = MappingProxyType({"train": TRAIN, "test": TEST})
# White around a grey disc with a black cup.
_DISC_VALUES = {value: 0 if value > 128 else 1 if value else 2 for value in range(256)}
_DISC_AND_CUP = dict.fromkeys(("background", "disc", "cup"), ())
_TABLE = (
    # Wang et al., "DoFE: domain-oriented feature embedding for generalizable fundus image
    # segmentation on unseen datasets", IEEE TMI 2020. FedDG (Liu et al., CVPR 2021) has the same
    # domains, Site1 to Site4.
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
        _DISC_VALUES,
        inside="rois",
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
        _DISC_VALUES,
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
      FileNotFoundError: a folder is missing.
      ValueError: a domain is unknown, an image or a mask is missing, or a file is not right, see
        `assemble.to_source`.
      OSError: the cache cannot be written.
    """
    layout = LAYOUTS[name]
    about = layout.about._replace(domains=chosen(layout.about.domains, domains, name))
    root, folders = domain_folders(path, about)
    pairs, notes = {}, []
    for domain, folder in folders.items():
        files = [file for file in files_below(folder) if is_image(file.name)]
        if layout.inside:
            files = [
                file for file in files if layout.inside in file.parent.as_posix().lower().split("/")
            ]
        paired = find_pairs(files, folder, remedy=about.where)
        parts = [part_of(file.relative_to(folder).parts[:-1]) for file in paired.images]
        if about.parts and {*parts} != {TRAIN, TEST}:
            raise FileNotFoundError(
                f"{folder} has no images to train, or none to test: {about.where}"
            )
        names = relative_names(paired.images, root)
        pairs[domain] = list(map(Pair, paired.images, paired.masks, names, parts))
        if (count := len(parts)) != about.counts[domain]:
            notes.append(f"{name}, {domain}: found {count} images, expected {about.counts[domain]}")
    squares, classes = Squares(image_size, **how), tuple(about.classes)
    how = {"classes": classes, "values": layout.values, "notes": notes}
    source = to_source(name, root, pairs, squares, **how)
    for pool in source.pools:
        if not np.any(pool.labels[MASK] == 1):
            raise ValueError(
                f"{folders[pool.name]} has no {classes[1]} in any mask, so its masks have other "
                f"values than those of {about.title}: fetch it again"
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
