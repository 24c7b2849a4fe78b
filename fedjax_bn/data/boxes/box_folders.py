"""Any folder of images with boxes, in COCO's or YOLO's form; domains are subfolders.

    clear/images/1.jpg  clear/labels/1.txt  fog/images/2.jpg  fog/labels/2.txt     (YOLO)
    clear/annotations/instances_train.json  clear/images/1.jpg  ...                (COCO)

A folder that is itself in such a form is one domain, which `data.num_clients` divides. If folders
or files name the part (train, val, test) of every image of a domain, the parts are its official
split. Images keep their shape, see `pixels.decode`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.assemble import Squares, box_source
from fedjax_bn.data.boxes.coco import coco_files, read_coco
from fedjax_bn.data.boxes.labelled import Labelled, Slips, part_of
from fedjax_bn.data.boxes.yolo import read_yolo, yolo_files
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.folders import is_hidden, is_image, subfolders
from fedjax_bn.data.source import Source

_WHERE = (
    "it must hold images with boxes, or a folder of such for each domain: images/*.jpg with "
    "labels/*.txt (YOLO) or annotations/*.json (COCO; launch/convert makes it of VOC, BDD100K, "
    "Cityscapes and Mapillary Vistas)"
)


def load_boxes(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    name: str = "boxes",
    **options: Any,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their boxes, one pool a domain.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: names, in the order of their numbers; empty for all.
      name: of the source.
      **options: `max_boxes`, `cache`, `progress`, `max_megapixels` and `orientation` of
        `assemble.Squares`.

    Raises:
      FileNotFoundError: there is no such folder, or images are missing.
      ValueError: a file is damaged or not in the form; it is named.
      OSError: the cache cannot be written.
    """
    root, slips = Path(path or ""), Slips()
    if not path or not root.is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder: {_WHERE}")
    folders = _domain_folders(root, domains)
    yolo = {domain: yolo_files(folder) for domain, folder in folders.items()}
    coco = {domain: coco_files(folders[domain]) for domain in folders if not yolo[domain]}
    if empty := [domain for domain, files in coco.items() if not files]:
        raise ValueError(
            f"{folders[empty[0]]} has no boxes: {_WHERE}; data.domains chooses folders"
        )
    if coco and len(coco) < len(folders):
        raise ValueError(
            f"{folders[next(iter(coco))]} has boxes in COCO's form, and other domains in YOLO's: "
            "bring all into one, or choose by data.domains"
        )
    if coco:
        names: dict[str, None] = {}
        labelled: dict[str, list[Labelled]] = {}
        for domain, files in coco.items():
            class_names, labelled[domain] = read_coco(files, folders[domain])
            names |= dict.fromkeys(class_names)
        named_classes = list(names)
    else:
        named_classes, labelled = read_yolo(root, folders, yolo, slips)
    if absent := [label for label in classes if label not in named_classes]:
        raise ValueError(
            f"data.classes names {first_few(absent)}, but {root} has "
            f"{first_few(named_classes, 100)}"
        )
    numbers = {label: number for number, label in enumerate(classes or named_classes)}
    squares = Squares(image_size, shares=not coco, **options)
    return box_source(name, root, labelled, numbers, slips, squares)


def _domain_folders(root: Path, domains: Sequence[str]) -> dict[str, Path]:
    """Returns the folder of each domain: the folders in `root`, or `root` itself if it is one set.

    Raises:
      FileNotFoundError: a requested domain is missing.
    """
    inside = subfolders(root)
    is_part = [
        folder.name.lower() in ("images", "labels", "annotations")
        or part_of([folder.name]) is not None
        for folder in inside
    ]
    # A folder that itself holds images with labels beside them is one set; a lone picture is not.
    files = [file for file in root.iterdir() if file.is_file() and not is_hidden(file.name)]
    texts = {file.stem for file in files if file.suffix == ".txt"}
    has_json = any(file.suffix == ".json" for file in files)
    is_set = any(is_image(file.name) and (has_json or file.stem in texts) for file in files)
    folders = {folder.name: folder for folder in inside}
    if any(is_part) or not inside or is_set:
        folders = {root.resolve().name: root}
    if missing := [name for name in domains if name not in folders]:
        raise FileNotFoundError(
            f"data.domains names {first_few(missing)}, but data.path {root} has "
            f"{first_few(list(folders))}: {_WHERE}"
        )
    return {name: folders[name] for name in domains or folders}
