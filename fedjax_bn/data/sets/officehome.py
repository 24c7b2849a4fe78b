"""OfficeHome (Venkateswara et al. 2017): things of office and home, 65 classes, four styles.

    Art/Alarm_Clock/*.jpg  Clipart/...  Product/...  Real World/...   2427, 4365, 4439, 4357 images

DomainBed, and so FedIG, normalizes by ImageNet's mean and standard deviation, as this reader does,
and numbers the classes in the order of their names, capital letters first ("TV" before "Table").

References: Venkateswara et al., "Deep hashing network for unsupervised domain adaptation", CVPR
2017; Gulrajani & Lopez-Paz, "In search of lost domain generalization", ICLR 2021.
"""

from pathlib import Path

from fedjax_bn.data.sets.folders import load_folders
from fedjax_bn.data.sets.published import IMAGENET, Published, spelled
from fedjax_bn.data.source import Source

CLASSES = (
    "Alarm_Clock",
    "Backpack",
    "Batteries",
    "Bed",
    "Bike",
    "Bottle",
    "Bucket",
    "Calculator",
    "Calendar",
    "Candles",
    "Chair",
    "Clipboards",
    "Computer",
    "Couch",
    "Curtains",
    "Desk_Lamp",
    "Drill",
    "Eraser",
    "Exit_Sign",
    "Fan",
    "File_Cabinet",
    "Flipflops",
    "Flowers",
    "Folder",
    "Fork",
    "Glasses",
    "Hammer",
    "Helmet",
    "Kettle",
    "Keyboard",
    "Knives",
    "Lamp_Shade",
    "Laptop",
    "Marker",
    "Monitor",
    "Mop",
    "Mouse",
    "Mug",
    "Notebook",
    "Oven",
    "Pan",
    "Paper_Clip",
    "Pen",
    "Pencil",
    "Postit_Notes",
    "Printer",
    "Push_Pin",
    "Radio",
    "Refrigerator",
    "Ruler",
    "Scissors",
    "Screwdriver",
    "Shelf",
    "Sink",
    "Sneakers",
    "Soda",
    "Speaker",
    "Spoon",
    "TV",
    "Table",
    "Telephone",
    "ToothBrush",
    "Toys",
    "Trash_Can",
    "Webcam",
)
OFFICE_HOME = Published(
    name="officehome",
    domains={"Art": (), "Clipart": (), "Product": (), "Real World": ("Real",)},
    classes=spelled(*CLASSES),
    counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    where=(
        "it must hold Art, Clipart, Product and Real World, each with 65 class folders of images "
        "from Alarm_Clock to Webcam (OfficeHome, from hemanthdv.github.io/officehome-dataset or by "
        "DomainBed's domainbed.scripts.download)"
    ),
    mean=IMAGENET[0],
    std=IMAGENET[1],
)


def load(
    path: str | Path | None,
    *,
    image_size: int = 224,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Source:
    """OfficeHome as u8[N, image_size, image_size, 3], 65 classes, four domains.

    Args:
      path: the folder described above.
      image_size: pixels a side; DomainBed has 224.
      cache: folder for the decoded images, see `decode`.
      progress: show a bar while decoding.

    Returns:
      Source "officehome", without official parts.

    Raises:
      FileNotFoundError: a domain's folder is missing.
      ValueError: a class has no images, or an image cannot be read.
      OSError: the cache cannot be written.
    """
    return load_folders(OFFICE_HOME, path, image_size, cache=cache, progress=progress)
