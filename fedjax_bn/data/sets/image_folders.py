"""Datasets published as folders of images, DOMAIN/CLASS/*.jpg: one table, and one way to read it.

Domains, classes and counts are those of the publications; a note reports a different count. PACS,
VLCS and OfficeHome are normalized by ImageNet's mean and standard deviation, as in DomainBed
(Gulrajani & Lopez-Paz, ICLR 2021) and so in FedIG. Each dataset has its own reference.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.sets.files import read_list
from fedjax_bn.data.sets.folders import (
    Aliases,
    Listing,
    Published,
    domain_folders,
    folder_source,
    list_domain,
)
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Source

_TOOLS = "back_pack bike calculator headphones keyboard laptop_computer monitor mouse mug projector"
_TEN = "bird feather headphones ice_cream teapot tiger whale windmill wine_glass zebra"


def _named(names: str) -> Aliases:
    return dict.fromkeys(names.split(), ())


# FedBN (section 5.2, D.3 and the authors' code): images stretched to 256x256, no normalization
# beyond u8/255. Every client of Office-Caltech10 is cut to 62 training and 50 validation images,
# 0.5 and 0.4 of the smallest, of DomainNet to 105 and 105, 0.05 of it.
_AS_FEDBN: Any = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "image_size": 256}
# Rows without domains have those of their counts.
_TABLE = (
    # Li, Yang, Song, Hospedales, ICCV 2017. DomainBed, and so FedIG, divides at random, not by the
    # authors' lists.
    Published(
        name="pacs",
        about="PACS: photographs, art paintings, cartoons and sketches of seven classes",
        classes=_named("dog elephant giraffe guitar horse house person"),
        counts={"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
        where="DOMAIN/CLASS/*.jpg, linked from dali-dl.github.io/project_iccv2017.html",
    ),
    # Fang, Xu, Rockmore, "Unbiased metric learning", ICCV 2013.
    Published(
        name="vlcs",
        about="VLCS: five classes from four collections of photographs",
        classes=_named("bird car chair dog person"),
        counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        where="DOMAIN/CLASS/*.jpg, from DomainBed's domainbed.scripts.download",
    ),
    # Venkateswara et al., CVPR 2017. Classes in the order of their names, capital letters first,
    # as DomainBed numbers them.
    Published(
        name="officehome",
        about="OfficeHome: things of office and home, 65 classes, in four styles",
        domains={"Art": (), "Clipart": (), "Product": (), "Real World": ("Real",)},
        classes=_named("""
            Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair
            Clipboards Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet
            Flipflops Flowers Folder Fork Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade
            Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes
            Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda
            Speaker Spoon TV Table Telephone ToothBrush Toys Trash_Can Webcam
        """),
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        where="DOMAIN/CLASS/*.jpg of 65 classes, from hemanthdv.github.io/officehome-dataset",
    ),
    # Gong, Shi, Sha, Grauman, "Geodesic flow kernel for unsupervised domain adaptation", CVPR 2012:
    # classes of Office-31 (Saenko et al., ECCV 2010) and Caltech-256 (Griffin, Holub, Perona, 2007)
    # in the order of FedBN's code. Office-31's form, amazon/images/back_pack/*.jpg, serves too.
    # In FedBN four fifths of each domain train (125 of dslr). The authors' lists are pickles, which
    # are not read here, and their code makes images with transparency grey.
    Published(
        name="office_caltech10",
        about="Office-Caltech10: ten classes that Office-31 and Caltech-256 share, four cameras",
        classes=_named(_TOOLS),
        counts={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
        where="DOMAIN/CLASS/*.jpg of ten classes, linked from github.com/med-air/FedBN",
        **_AS_FEDBN,
    ),
    # Zhou, Yang, Hospedales, Xiang, AAAI 2020: 600 images of 32x32 pixels a class, 120 of them in
    # val. TsmoBN (section 4.1, E.1) has 28x28 images, and does not state how it normalizes them;
    # its network is FedBN's, so FedBN's (0.5, 0.5) is used here.
    Published(
        name="digits_dg",
        about="Digits-DG: handwritten, coloured, photographed and printed digits",
        classes=_named("0 1 2 3 4 5 6 7 8 9"),
        counts=dict.fromkeys(("mnist", "mnist_m", "svhn", "syn"), 6000),
        where="DOMAIN/{train,val}/DIGIT/*.jpg, linked from github.com/KaiyangZhou/Dassl.pytorch",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        image_size=28,
        parts={"train": TRAIN, "val": VALIDATION},
    ),
    # Peng, Bai, Xia, Huang, Saenko, Wang, ICCV 2019. Lines of the lists are
    # `clipart/bird/clipart_001_000001.jpg 0`; images in no list are left out.
    # FedBN has the ten classes with the most images, as its code numbers them.
    Published(
        name="domainnet",
        about="DomainNet: drawings, paintings and photographs of up to 345 classes",
        domains=_named("clipart infograph painting quickdraw real sketch"),
        classes=_named(_TEN),
        where="DOMAIN/CLASS/*.jpg with DOMAIN_train.txt and DOMAIN_test.txt, from ai.bu.edu/M3SDA",
        **_AS_FEDBN,
    ),
)
IMAGE_FOLDERS: Mapping[str, Published] = MappingProxyType(
    {row.name: row._replace(domains=row.domains or dict.fromkeys(row.counts, ())) for row in _TABLE}
)


def load_image_folders(
    dataset: Published | str,
    path: str | Path | None,
    *,
    image_size: int | None = None,
    classes: Sequence[str] = (),
    **options: Any,
) -> Source:
    """Returns a dataset of image folders as u8[N, image_size, image_size, 3], one pool a domain.

    Pools have official parts if lists or folders divide the domains. Images are as large as in the
    publication by default.
    `dataset` is a name in `IMAGE_FOLDERS`, or a `Published` of the user's own. DomainNet has the
    `classes` of its lists that are chosen, ("all",) for all.
    """
    dataset = IMAGE_FOLDERS[dataset] if isinstance(dataset, str) else dataset
    root, folders = domain_folders(path, dataset)
    if dataset.name == "domainnet":
        dataset, listings = _read_lists(dataset, root, folders, classes)
    else:
        listings = [list_domain(name, folder, dataset) for name, folder in folders.items()]
    return folder_source(dataset, root, listings, image_size or dataset.image_size, **options)


def _read_lists(
    dataset: Published, root: Path, folders: Mapping[str, Path], classes: Sequence[str]
) -> tuple[Published, list[Listing]]:
    """Returns DomainNet with the chosen classes, and its domains' images as listed."""
    label_of: dict[str, int] = {}
    parts: dict[str, dict[str, int]] = {domain: {} for domain in folders}  # CLASS/NAME -> part
    for domain in folders:
        for ending, part in (("train", TRAIN), ("test", TEST)):
            path = root / f"{domain}_{ending}.txt"
            if not path.is_file():
                raise FileNotFoundError(f"the list {path} is missing: {dataset.where}")
            for name, label in zip(*read_list(path), strict=True):
                place = "/".join(name.split("/")[-2:])
                label_of[place.partition("/")[0]] = int(label)
                parts[domain][place] = part  # the test list is read last: an image in both tests
    chosen = tuple(classes) or tuple(dataset.classes)
    if chosen == ("all",):
        chosen = tuple(sorted(label_of, key=label_of.get))
    if not set(chosen) <= set(label_of) or len(set(chosen)) < len(chosen):
        names = first_few(list(label_of))
        raise ValueError(f"data.classes={chosen} must be different classes of {root}: {names}")
    listings = []
    for domain, folder in folders.items():
        class_of = {name: name.partition("/")[0] for name in parts[domain]}
        names = [name for name in class_of if class_of[name] in chosen]
        labels = np.array([chosen.index(class_of[name]) for name in names], np.int32)
        official = np.array([parts[domain][name] for name in names], np.int8)
        listings.append(Listing(domain, [folder / name for name in names], labels, official))
    return dataset._replace(classes=dict.fromkeys(chosen, ())), listings
