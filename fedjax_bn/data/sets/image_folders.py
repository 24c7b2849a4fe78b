"""Datasets published as folders of images, DOMAIN/CLASS/*.jpg: one table, and one way to read it.

Domains, classes and counts are those of the publications; a note reports a different count. PACS,
VLCS and OfficeHome are normalized by ImageNet's mean and standard deviation, as in DomainBed and so
in FedIG.

References: Gulrajani & Lopez-Paz, "In search of lost domain generalization" (DomainBed), ICLR 2021;
Li et al., "FedBN", ICLR 2021; Jiang et al., "TsmoBN: interventional generalization for unseen
clients in federated learning", 2021; and with each dataset, its own.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.files import read_list, without_suffix
from fedjax_bn.data.sets.folders import Listing, Published, domain_folders, list_domain, to_source
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Source

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
    # crossval list of art_painting begins with two slips: dog/pic_225.jpg has label 0, and
    # dog/pic_248.jpg is listed twice instead of dog/pic_249.jpg. DomainBed, and so FedIG, does not
    # use the lists but divides at random (data.split=holdout); FedCD does not state its split.
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
        slips={"art_painting/dog/pic_225.jpg": 0},
    ),
    # Fang, Xu, Rockmore, "Unbiased metric learning: on the utilization of multiple datasets and web
    # images for softening bias", ICCV 2013. DomainBed distributes it as Caltech101/bird/*.jpg; its
    # authors as CALTECH/{train,crossval,test}/0/*.jpg, or full/ if there is no train.
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
        whole="full",
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
        always_divided=True,
    ),
)
IMAGE_FOLDERS: Mapping[str, Published] = MappingProxyType({row.name: row for row in _TABLE})
# Where copies of PACS have the authors' lists, and the number of the first class in them.
_LIST_FOLDERS = ("splits", "Train val splits and h5py files pre-read", ".")
_FIRST_LABEL = 1


def load_image_folders(
    dataset: Published | str,
    path: str | Path | None,
    *,
    image_size: int | None = None,
    **options: Any,
) -> Source:
    """Returns a dataset of image folders as u8[N, image_size, image_size, 3], one pool a domain.

    Args:
      dataset: a name in `IMAGE_FOLDERS`, or a `Published` of the user's own.
      path: the folder of its domains, or the folder around it.
      image_size: pixels a side; None for the publication's.
      **options: `cache`, `progress`, `max_megapixels` and `orientation` of `decode`.

    Returns:
      Source, with official parts if lists or folders divide the domains.

    Raises:
      FileNotFoundError: a folder, a list or a listed image is missing; it says where to fetch it.
      ValueError: a class has no images, lists do not fit the images, or images cannot be read.
    """
    dataset = IMAGE_FOLDERS[dataset] if isinstance(dataset, str) else dataset
    root, folders = domain_folders(path, dataset)
    listings = [list_domain(name, folder, dataset) for name, folder in folders.items()]
    notes: list[str] = []
    if dataset.slips is not None:
        places = [base / name for base in (Path(path), root) for name in _LIST_FOLDERS]
        lists = next((place for place in places if any(place.glob("[!.]*_kfold.txt"))), None)
        if lists:
            listings = [_divide_by_lists(listing, dataset, lists, notes) for listing in listings]
    size = image_size or dataset.image_size
    return to_source(dataset, root, listings, size, notes=notes, **options)


def _divide_by_lists(
    listing: Listing, dataset: Published, folder: Path, notes: list[str]
) -> Listing:
    """Returns the listing with the parts of PACS' lists, see `_TABLE`; appends to `notes`.

    Images in no list go to validation. Suffixes and the case of classes need not match.
    """
    train_list, validation_list = (
        folder / f"{listing.name}_{part}_kfold.txt" for part in ("train", "crossval")
    )
    train, validation = (_rows_in(path, listing, dataset) for path in (train_list, validation_list))
    names = [file.name for file in listing.files]
    if both_parts := sorted(set(train) & set(validation)):
        raise ValueError(
            f"{train_list} and {validation_list} both have "
            f"{first_few([names[k] for k in both_parts])}; fetch the lists again"
        )
    parts = np.full(len(names), -1, np.int8)
    parts[train], parts[validation] = TRAIN, VALIDATION
    place = f"{dataset.name}, {listing.name}"
    if repeated := [names[k] for k, count in Counter(train + validation).items() if count > 1]:
        notes.append(f"{place}: listed twice, used once: {first_few(repeated)}")
    if unlisted := [names[k] for k in np.flatnonzero(parts < 0)]:
        names_unlisted = first_few(unlisted)
        notes.append(
            f"{place}: in no list, in data.split=official for validation: {names_unlisted}"
        )
    parts[parts < 0] = VALIDATION
    return listing._replace(parts=parts)


def _rows_in(path: Path, listing: Listing, dataset: Published) -> list[int]:
    """Returns the positions in the listing of the images that a list names, in the list's order."""
    row_of = {
        without_suffix(f"{listing.name}/{file.parent.name.lower()}/{file.name}"): k
        for k, file in enumerate(listing.files)
    }
    names, labels = read_list(path)
    if missing := [name for name in names if without_suffix(name) not in row_of]:
        raise FileNotFoundError(
            f"{path} names {len(missing)} images that are missing: {first_few(missing)}; fetch "
            "them, or move the lists away to do without"
        )
    rows = [row_of[without_suffix(name)] for name in names]
    expected = listing.labels[rows] + _FIRST_LABEL
    if faults := [
        f"{name} {label} (not {number})"
        for name, label, number in zip(names, labels, expected, strict=True)
        if label not in (number, dataset.slips.get(name))
    ]:
        raise ValueError(
            f"{path}: {len(faults)} labels are not those of the class folders, counted from "
            f"{_FIRST_LABEL}: {first_few(faults)}; fetch the list again"
        )
    return rows
