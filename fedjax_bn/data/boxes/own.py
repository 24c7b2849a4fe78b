"""Any folder of images with boxes, in COCO's, Pascal VOC's or YOLO's form; domains are subfolders.

    clear/images/1.jpg  clear/labels/1.txt  fog/images/2.jpg  fog/labels/2.txt     (YOLO)
    clear/annotations/1.xml  clear/images/1.jpg  ...                               (VOC)
    clear/annotations/instances_train.json  clear/images/1.jpg  ...                (COCO)

A folder that is itself of such a form is one domain, which `data.num_clients` shares out. Parts
(train, val, test) that folders or files name are taken for the official split where all images of a
domain have one. Images keep their shape, see `pixels.letterbox`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes import coco, voc, yolo_text
from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.folders import domain_folders, files_in
from fedjax_bn.data.boxes.labelled import Labelled, Slips, numbers_of
from fedjax_bn.data.source import Source

_WHERE = (
    "it must hold images with boxes, or a folder of such for each domain: images/*.jpg with "
    "labels/*.txt (YOLO), annotations/*.xml (VOC) or annotations/*.json (COCO)"
)
_Read = Callable[
    [Path, dict[str, Path], Sequence[str], Slips], tuple[list[str], dict[str, list[Labelled]]]
]


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Images as u8[N, image_size, image_size, 3] with their boxes, one pool a domain.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: which, in the order of their numbers; empty for all.
      **how: `max_boxes`, `cache`, `progress` and `max_megapixels` of `assemble.Squares`.

    Returns:
      Source "boxes".

    Raises:
      FileNotFoundError: there is no such folder, or images are missing.
      ValueError: a file is damaged or not of the form; it is named, with the row.
      OSError: the cache cannot be written.
    """
    if not path:
        raise ValueError(f"boxes needs data.path: {_WHERE}")
    root = Path(path)
    folders = domain_folders(root, domains, _WHERE)
    form, read = _form_of(root, folders)
    slips = Slips()
    known, owned = read(root, folders, classes, slips)
    empty = [name for name, images in owned.items() if not images]
    if empty:
        raise ValueError(f"{folders[empty[0]]} has no labelled images: {_WHERE}")
    return to_source(
        "boxes",
        root,
        owned,
        classes or known,
        slips,
        Squares(image_size, shares=read is _read_yolo, **how),
        notes=(f"{root} is read as {form}",),
    )


def _form_of(root: Path, folders: dict[str, Path]) -> tuple[str, _Read]:
    """The form in which all domains are, by the files of the first."""
    first = next(iter(folders.values()))
    if coco.find(first):
        return "COCO's JSON", _read_coco
    if any(file.suffix.lower() == ".xml" for file in files_in(first)):
        return "Pascal VOC's XML", _read_voc
    if any(text for _, text in yolo_text.find(first)):
        return "YOLO's text files", _read_yolo
    raise ValueError(f"{first} has no boxes in a known form: {_WHERE}")


def _read_coco(
    root: Path, folders: dict[str, Path], classes: Sequence[str], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    found = {name: coco.find(folder) for name, folder in folders.items()}
    names = {
        c: None for files in found.values() for one in files for c in coco.categories(*one).values()
    }
    numbers = numbers_of(list(names), classes, str(root))
    return list(names), {
        name: [
            image
            for path, content in files
            for image in coco.labelled(path, content, folders[name], numbers, slips)
        ]
        for name, files in found.items()
    }


def _read_voc(
    root: Path, folders: dict[str, Path], classes: Sequence[str], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    found = {name: voc.find(root, folder, slips) for name, folder in folders.items()}
    names = voc.classes_of(found)
    numbers = numbers_of(names, classes, str(root))
    return names, {
        name: voc.labelled(rows, folders[name], numbers, slips) for name, rows in found.items()
    }


def _read_yolo(
    root: Path, folders: dict[str, Path], classes: Sequence[str], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    found = {name: yolo_text.find(folder) for name, folder in folders.items()}
    named = yolo_text.class_names([root, *folders.values()])
    most = max(yolo_text.largest_class(rows) for rows in found.values())
    names = named or [str(k) for k in range(most + 1)]
    chosen = numbers_of(names, classes, str(root))
    numbers = {k: chosen[name] for k, name in enumerate(names) if name in chosen}
    return names, {
        name: yolo_text.labelled(rows, folders[name], numbers, named, slips)
        for name, rows in found.items()
    }
