"""Datasets published as folders of images, DOMAIN/CLASS/*.jpg: one table, and one way to read it.

Domains, classes and counts are those of the publications; a note reports a different count. PACS,
VLCS and OfficeHome are normalized by ImageNet's mean and standard deviation, as in DomainBed and so
in FedIG. Lists of PACS and DomainNet divide the images of a domain; those in the root of the
dataset or beside it are read.

References: Gulrajani & Lopez-Paz, "In search of lost domain generalization" (DomainBed), ICLR 2021;
Li et al., "FedBN", ICLR 2021; Jiang et al., "TsmoBN: interventional generalization for unseen
clients in federated learning", 2021; and with each dataset, its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.files import read_list
from fedjax_bn.data.sets.folders import (
    Listing,
    Published,
    domain_folders,
    folder_source,
    list_domain,
)
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Source

_DOMAINNET = "domainnet"
_PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
_VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
# In the order of their names, capital letters first, as DomainBed numbers them.
_OFFICE_HOME_CLASSES = """
    Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair
    Clipboards Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops
    Flowers Folder Fork Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker
    Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin
    Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
    Telephone ToothBrush Toys Trash_Can Webcam
"""
_DOMAINNET_CLASSES = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)
_OFFICE_CALTECH10_CLASSES = {  # in the order of FedBN's code, with Caltech-256's names
    "back_pack": (),
    "bike": ("touring-bike",),
    "calculator": (),
    "headphones": ("headphone",),
    "keyboard": ("computer-keyboard",),
    "laptop_computer": ("laptop", "laptop-101"),
    "monitor": ("computer-monitor",),
    "mouse": ("computer-mouse",),
    "mug": ("coffee-mug",),
    "projector": ("video-projector",),
}

_TABLE = (
    # Li, Yang, Song, Hospedales, "Deeper, broader and artier domain generalization", ICCV 2017.
    # Lines of the authors' lists are `photo/dog/056_0022.jpg 1`. Training and crossval lists divide
    # a domain, and the test list is the whole domain, which is tested when it is unseen; so the
    # first two become training and validation parts, and there is no test part. The published
    # crossval list of art_painting has dog/pic_248.jpg twice, and not dog/pic_249.jpg. DomainBed,
    # and so FedIG, does not use the lists but divides at random (data.split=holdout); FedCD does
    # not state its split.
    Published(
        name="pacs",
        title="PACS",
        about="photographs, art paintings, cartoons and sketches of seven classes",
        domains={
            "photo": ("photos",),
            "art_painting": ("art", "paintings"),
            "cartoon": ("cartoons",),
            "sketch": ("sketches",),
        },
        classes=dict.fromkeys(_PACS_CLASSES, ()),
        counts={"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
        where=(
            "it must hold photo, art_painting, cartoon and sketch, each with the class folders "
            f"{', '.join(_PACS_CLASSES)} of images, and optionally splits/*_kfold.txt (PACS, "
            "linked from dali-dl.github.io/project_iccv2017.html, or by DomainBed's "
            "domainbed.scripts.download)"
        ),
        lists={"_train_kfold.txt": TRAIN, "_crossval_kfold.txt": VALIDATION},
    ),
    # Fang, Xu, Rockmore, "Unbiased metric learning: on the utilization of multiple datasets and web
    # images for softening bias", ICCV 2013. DomainBed distributes it as Caltech101/bird/*.jpg; its
    # authors as CALTECH/{train,crossval,test}/0/*.jpg.
    Published(
        name="vlcs",
        title="VLCS",
        about="five classes from four collections of photographs",
        domains={
            "Caltech101": ("Caltech",),
            "LabelMe": (),
            "SUN09": ("SUN",),
            "VOC2007": ("Pascal", "VOC"),
        },
        classes={name: (str(label),) for label, name in enumerate(_VLCS_CLASSES)},
        counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        where=(
            "it must hold Caltech101, LabelMe, SUN09 and VOC2007, each with the class folders "
            f"{', '.join(_VLCS_CLASSES)} of images, or CALTECH, LABELME, SUN and PASCAL, each with "
            "train, crossval and test of class folders 0 to 4 (VLCS, by DomainBed's "
            "domainbed.scripts.download)"
        ),
        parts={"train": TRAIN, "crossval": VALIDATION, "test": TEST},
    ),
    # Venkateswara et al., "Deep hashing network for unsupervised domain adaptation", CVPR 2017.
    Published(
        name="officehome",
        title="OfficeHome",
        about="things of office and home, 65 classes, in four styles",
        domains={"Art": (), "Clipart": (), "Product": (), "Real World": ("Real",)},
        classes=dict.fromkeys(_OFFICE_HOME_CLASSES.split(), ()),
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        where=(
            "it must hold Art, Clipart, Product and Real World, each with 65 class folders of "
            "images from Alarm_Clock to Webcam (OfficeHome, from "
            "hemanthdv.github.io/officehome-dataset or by DomainBed's domainbed.scripts.download)"
        ),
    ),
    # Gong, Shi, Sha, Grauman, "Geodesic flow kernel for unsupervised domain adaptation", CVPR 2012:
    # the ten classes that Office-31 (Saenko et al., ECCV 2010) and Caltech-256 (Griffin, Holub,
    # Perona, 2007) share. Office-31's own form, amazon/images/back_pack/*.jpg, serves too.
    # FedBN (section 5.2, D.3 and the authors' code): images stretched to 256x256, no normalization
    # beyond u8/255; four fifths of each domain train (125 of dslr); every client is then cut to 62
    # training and 50 validation images, 0.5 and 0.4 of the smallest. The authors' lists are Python
    # pickles, which are not read here. Images with transparency keep their colours, but the
    # authors' code makes them grey.
    Published(
        name="office_caltech10",
        title="Office-Caltech10",
        about="the ten classes that Office-31 and Caltech-256 share, from four cameras",
        domains={
            "amazon": (),
            "caltech": ("caltech10", "caltech256", "caltech101"),
            "dslr": (),
            "webcam": (),
        },
        classes=_OFFICE_CALTECH10_CLASSES,
        counts={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
        where=(
            "it must hold amazon, caltech, dslr and webcam, each with the class folders "
            f"{', '.join(_OFFICE_CALTECH10_CLASSES)} of images (Office-Caltech10, linked from "
            "github.com/med-air/FedBN)"
        ),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        image_size=256,
    ),
    # Zhou, Yang, Hospedales, Xiang, "Deep domain-adversarial image generation for domain
    # generalisation", AAAI 2020: 600 images of 32x32 pixels a class, 480 in train, 120 in val.
    # TsmoBN (section 4.1, E.1) has 28x28 images, and does not state how it normalizes them; its
    # network is FedBN's, so FedBN's (0.5, 0.5) is used here.
    Published(
        name="digits_dg",
        title="Digits-DG",
        about="handwritten, coloured, photographed and printed digits",
        domains={
            "mnist": (),
            "mnist_m": (),
            "svhn": (),
            "syn": ("synth", "syndigits", "synth_digits"),
        },
        classes=dict.fromkeys(map(str, range(10)), ()),
        counts={"mnist": 6000, "mnist_m": 6000, "svhn": 6000, "syn": 6000},
        where=(
            "it must hold mnist, mnist_m, svhn and syn, each with train and val of class folders 0 "
            "to 9 of images (Digits-DG, linked from DATASETS.md of "
            "github.com/KaiyangZhou/Dassl.pytorch)"
        ),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_size=28,
        parts={"train": TRAIN, "val": VALIDATION},
    ),
    # Peng, Bai, Xia, Huang, Saenko, Wang, "Moment matching for multi-source domain adaptation",
    # ICCV 2019. Lines of the lists are `clipart/bird/clipart_001_000001.jpg 0`; images in no list
    # are left out, and only the folders of the chosen classes are needed.
    # FedBN (section 5.2, D.3 and the authors' code): the ten classes with the most images, as its
    # code numbers them; images stretched to 256x256, no normalization beyond u8/255; every client
    # is cut to 105 training and 105 validation images, 0.05 of the smallest.
    Published(
        name=_DOMAINNET,
        title="DomainNet",
        about="drawings, paintings and photographs of up to 345 classes",
        domains=dict.fromkeys(
            ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), ()
        ),
        classes=dict.fromkeys(_DOMAINNET_CLASSES, ()),
        counts={},
        where=(
            "it must hold clipart, infograph, painting, quickdraw, real and sketch, each with "
            "class folders of images, and beside them the lists clipart_train.txt, "
            "clipart_test.txt, ... (DomainNet, cleaned version, from ai.bu.edu/M3SDA)"
        ),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        image_size=256,
        lists={"_train.txt": TRAIN, "_test.txt": TEST},
    ),
)
IMAGE_FOLDERS: Mapping[str, Published] = MappingProxyType({row.name: row for row in _TABLE})
# Where copies have the authors' lists.
_LIST_FOLDERS = ("splits", "Train val splits and h5py files pre-read", ".")


def load_image_folders(
    dataset: Published | str,
    path: str | Path | None,
    *,
    image_size: int | None = None,
    classes: Sequence[str] = (),
    **options: Any,
) -> Source:
    """Returns a dataset of image folders as u8[N, image_size, image_size, 3], one pool a domain.

    Args:
      dataset: a name in `IMAGE_FOLDERS`, or a `Published` of the user's own.
      path: the folder of its domains, or the folder around it.
      image_size: pixels a side; None for the publication's.
      classes: of DomainNet, names as in its lists, numbered in that order; ("all",) for all.
      **options: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`.

    Returns:
      Source, with official parts if lists or folders divide the domains.

    Raises:
      FileNotFoundError: a folder, a list or a listed image is missing; it says where to fetch it.
      ValueError: a class has no images or is in no list, or images cannot be read.
    """
    dataset = IMAGE_FOLDERS[dataset] if isinstance(dataset, str) else dataset
    root, folders = domain_folders(path, dataset)
    places = [base / name for base in (Path(path), root) for name in _LIST_FOLDERS]
    endings = [f"{name}{ending}" for name in folders for ending in dataset.lists]
    place = next((p for p in places if any((p / ending).is_file() for ending in endings)), None)
    if dataset.name == _DOMAINNET:
        if place is None:
            raise FileNotFoundError(f"{root} has no list such as {endings[0]}: {dataset.where}")
        dataset = _with_classes(dataset, place, classes)
    notes: list[str] = []
    listings = [list_domain(name, folder, dataset) for name, folder in folders.items()]
    if place:
        listings = [_divide_by_lists(listing, dataset, place, notes) for listing in listings]
    size = image_size or dataset.image_size
    return folder_source(dataset, root, listings, size, notes=notes, **options)


def _with_classes(dataset: Published, place: Path, classes: Sequence[str]) -> Published:
    """Returns DomainNet with the chosen classes, by default its ten."""
    label_of: dict[str, int] = {}
    for domain in dataset.domains:
        for ending in dataset.lists:
            names, labels = read_list(place / f"{domain}{ending}")
            label_of |= zip(map(_class_of, names), labels.tolist(), strict=True)
    chosen = tuple(classes) or tuple(dataset.classes)
    if chosen == ("all",):
        chosen = tuple(sorted(label_of, key=label_of.get))
    unknown = [name for name in chosen if name not in label_of]
    if unknown or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"data.classes is {chosen}; give different classes, or all, of the {len(label_of)} in "
            f"the lists of {place}: {first_few(list(label_of))}"
        )
    return dataset._replace(classes=dict.fromkeys(chosen, ()))


def _class_of(name: str) -> str:
    return name.split("/")[-2:][0]


def _divide_by_lists(
    listing: Listing, dataset: Published, place: Path, notes: list[str]
) -> Listing:
    """Returns the listing with the parts that lists state; appends to `notes`.

    Images in no list of DomainNet are left out, those of PACS validate. Suffixes need not match,
    because copies differ in formats; an image in two lists belongs to the last.
    """
    names = tuple(dataset.classes)
    row_of = {
        f"{listing.name}/{names[label]}/{file.stem}": row
        for row, (file, label) in enumerate(zip(listing.files, listing.labels, strict=True))
    }
    part_of: dict[int, int] = {}
    missing, count = [], 0
    for ending, part in dataset.lists.items():
        for name in read_list(place / f"{listing.name}{ending}")[0]:
            if _class_of(name) in dataset.classes:
                row = row_of.get(name.rpartition(".")[0])
                missing += [name] if row is None else []
                count += 1
                part_of[row] = part
    about = f"{dataset.name}, {listing.name}"
    if missing:
        raise FileNotFoundError(
            f"{about}: {place} lists {len(missing)} images that are missing: {first_few(missing)}; "
            "fetch or unpack them again"
        )
    if count > len(part_of):
        notes.append(f"{about}: {count - len(part_of)} lines repeat an image, which is used once")
    unlisted = [row for row in range(len(listing.files)) if row not in part_of]
    unlisted_names = first_few([listing.files[row].name for row in unlisted])
    if dataset.name == _DOMAINNET:
        if unlisted:
            notes.append(f"{about}: left out {len(unlisted)} images in no list: {unlisted_names}")
        rows = list(part_of)
        if absent := set(range(len(names))) - set(listing.labels[rows].tolist()):
            raise ValueError(
                f"{about}: the lists have no images of {first_few([names[k] for k in absent])}; "
                "choose other data.classes"
            )
    else:
        if unlisted:
            notes.append(f"{about}: {len(unlisted)} images in no list validate: {unlisted_names}")
        part_of |= dict.fromkeys(unlisted, VALIDATION)
        rows = sorted(part_of)
    return listing._replace(
        files=[listing.files[row] for row in rows],
        labels=listing.labels[rows],
        parts=np.array([part_of[row] for row in rows], np.int8),
    )
