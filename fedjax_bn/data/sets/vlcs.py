"""VLCS (Fang et al. 2013): five classes from four collections of photographs.

As DomainBed distributes it:

    Caltech101/bird/*.jpg  LabelMe/...  SUN09/...  VOC2007/...   1415, 2656, 3282, 3376 images

or as its authors do, with classes 0 to 4 for bird, car, chair, dog and person:

    CALTECH/train/0/*.jpg  CALTECH/crossval/...  CALTECH/test/...   LABELME, SUN and PASCAL likewise
    CALTECH/full/0/*.jpg                                            where there is no train

There the folders divide a domain into training, validation and test parts.

DomainBed, and so FedIG, normalizes by ImageNet's mean and standard deviation, as this reader does.

References: Fang, Xu, Rockmore, "Unbiased metric learning: on the utilization of multiple datasets
and web images for softening bias", ICCV 2013; Gulrajani & Lopez-Paz, "In search of lost domain
generalization", ICLR 2021.
"""

from pathlib import Path

from fedjax_bn.data.sets.folders import (
    domain_folders,
    find_root,
    list_domain,
    match_folders,
    subfolders,
)
from fedjax_bn.data.sets.published import IMAGENET, Listing, Published, to_source
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Source

CLASSES = ("bird", "car", "chair", "dog", "person")
VLCS = Published(
    name="vlcs",
    domains={
        "Caltech101": ("Caltech",),
        "LabelMe": (),
        "SUN09": ("SUN",),
        "VOC2007": ("Pascal", "VOC"),
    },
    classes={name: (str(label),) for label, name in enumerate(CLASSES)},
    counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
    where=(
        "it must hold Caltech101, LabelMe, SUN09 and VOC2007, each with the class folders "
        f"{', '.join(CLASSES)} of images, or CALTECH, LABELME, SUN and PASCAL, each with train, "
        "crossval and test of class folders 0 to 4 (VLCS, by DomainBed's "
        "domainbed.scripts.download)"
    ),
    mean=IMAGENET[0],
    std=IMAGENET[1],
)
PARTS = {"train": TRAIN, "crossval": VALIDATION, "test": TEST}


def load(
    path: str | Path | None,
    *,
    image_size: int = 224,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Source:
    """VLCS as u8[N, image_size, image_size, 3], five classes, four domains.

    Args:
      path: the folder described above.
      image_size: pixels a side; DomainBed has 224.
      cache: folder for the decoded images, see `decode`.
      progress: show a bar while decoding.

    Returns:
      Source "vlcs", with official parts where the folders divide the domains.

    Raises:
      FileNotFoundError: a domain's folder is missing.
      ValueError: a class has no images, or an image cannot be read.
      OSError: the cache cannot be written.
    """
    root = find_root(path, VLCS)
    listings = [_listing(name, folder) for name, folder in domain_folders(root, VLCS).items()]
    return to_source(VLCS, root, listings, image_size, cache=cache, progress=progress)


def _listing(name: str, folder: Path) -> Listing:
    """One domain in whichever form it is there."""
    inside = {one.name.lower(): one for one in subfolders(folder)}
    if match_folders(list(inside.values()), VLCS.classes) or not {"train", "full"} & set(inside):
        return list_domain(name, folder, VLCS)
    if "train" not in inside:
        return list_domain(name, inside["full"], VLCS)
    parts = {inside[part].name: number for part, number in PARTS.items() if part in inside}
    return list_domain(name, folder, VLCS, parts)
