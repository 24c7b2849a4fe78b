"""Reads labelled images in the forms of YOLO and COCO.

YOLO has a text file for each image:

    labels/train/NAME.txt   images/train/NAME.jpg   data.yaml

A line is "class cx cy w h", the number of the class, the centre, width and height in shares of the
image; or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box. Images
may also be in train/images, or beside their text files. The names of the classes are under `names`
of a YAML file, or in classes.txt, one per line, which may be among the labels; without either they
are numbers. An image without a text file has no boxes.

COCO (Lin et al., ECCV 2014) has one file of JSON for many images:

    annotations/instances_train.json   images/NAME.jpg     or images beside the file, or in train/

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
"annotations": [{"image_id", "category_id", "bbox": [x, y, w, h], "iscrowd"}]}. Boxes are in pixels
from the upper left corner of the image as viewers show it, or as it is stored if "width" and
"height" are those before EXIF's turn. Crowds stay crowds, see `label_trees`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import files_below, is_image
from fedjax_bn.data.source import part_in

WHERE = (
    "data.path must hold images with boxes, or a folder of such for each domain that data.domains "
    "chooses, all in one form: images/*.jpg with labels/*.txt (YOLO) or annotations/*.json (COCO; "
    "launch/convert makes it of VOC, BDD100K, Cityscapes and Mapillary Vistas)"
)
_Files = list[tuple[Path, Path | None]]  # images, each with its text file


class _Box(NamedTuple):
    """A box as written in the labels."""

    label: str  # the name of its class
    corners: tuple[float, ...]  # x1, y1, x2, y2 from the left and upper edge; x2 - x1 is its width
    crowd: bool = False  # whether the box holds a group of objects, see `label_trees`


class Labelled(NamedTuple):
    """An image and its boxes."""

    file: Path
    boxes: Sequence[_Box] = ()  # of all classes, as written in the labels
    size: tuple[int, int] | None = None  # width and height, if the labels state them
    part: int | None = None  # TRAIN, VALIDATION or TEST, if names state it


def read_labels(
    root: Path, folders: Mapping[str, Path]
) -> tuple[list[str], dict[str, list[Labelled]], bool]:
    """Returns the names of all classes, domain -> its images, and whether boxes are in pixels.

    Otherwise boxes are in shares of their image. The domains have one form, and `root` around them
    may name the classes. A ValueError names a file that is damaged or not in the form.
    """
    yolo = {domain: _yolo_files(folder) for domain, folder in folders.items()}
    coco = {domain: _coco_files(folders[domain]) for domain in folders if not yolo[domain]}
    if not coco:
        return *_read_yolo(root, folders, yolo), False
    empty = [domain for domain, files in coco.items() if not files]
    if empty or len(coco) < len(folders):
        raise ValueError(
            f"{folders[(empty or list(coco))[0]]} has no boxes, or not in the form of other "
            f"domains: {WHERE}"
        )
    names: dict[str, None] = {}
    labelled: dict[str, list[Labelled]] = {}
    for domain, files in coco.items():
        class_names, labelled[domain] = _read_coco(files, folders[domain])
        names |= dict.fromkeys(class_names)
    return list(names), labelled, True


def _yolo_files(folder: Path) -> _Files:
    """Returns the images of a domain, each with its text file; none if no image has one."""
    files: _Files = []
    for image in (file for file in files_below(folder) if is_image(file.name)):
        # images/train/a.jpg has labels/train/a.txt; an image elsewhere has it beside.
        parts = list(image.relative_to(folder).with_suffix(".txt").parts)
        if "images" in parts:
            position = len(parts) - 1 - parts[::-1].index("images")
            parts[position] = "labels"
        label_file = folder.joinpath(*parts)
        files.append((image, label_file if label_file.is_file() else None))
    return files if any(label_file for _, label_file in files) else []


def _read_yolo(
    root: Path, folders: Mapping[str, Path], files: Mapping[str, _Files]
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, and domain -> its images, with boxes in shares."""
    classes = _class_names([root, *folders.values()])
    domains: dict[str, list[Labelled]] = {}
    for domain, pairs in files.items():
        domains[domain] = []
        for image, label_file in pairs:
            boxes = _read_boxes(label_file, classes) if label_file else []
            part = part_in(image.relative_to(folders[domain]).parts[:-1])
            domains[domain].append(Labelled(image, boxes, part=part))
    if classes:
        return classes, domains
    # If no file names the classes, the greatest number shows how many there are.
    labels = [int(box.label) for rows in domains.values() for row in rows for box in row.boxes]
    return [str(number) for number in range(max(labels, default=-1) + 1)], domains


def _class_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names in the first YAML or text file of names in these folders, if any."""
    import yaml  # installed with flax

    for folder in folders:
        listed = [folder / "classes.txt", folder / "labels" / "classes.txt"]
        for path in (*sorted(folder.glob("[!.]*.y*ml")), *filter(Path.is_file, listed)):
            with corruption_named(path):
                text = path.read_text("utf-8-sig")
                if path.suffix == ".txt":
                    names: Any = [line.strip() for line in text.splitlines() if line.strip()]
                else:
                    # The safe loader creates no objects of Python classes.
                    names = (yaml.safe_load(text) or {}).get("names")
                if isinstance(names, dict):
                    names = [names[number] for number in range(len(names))]
            if names:
                return list(map(str, names))
    return []


def _read_boxes(path: Path, classes: Sequence[str]) -> list[_Box]:
    """Returns the boxes of a text file; a label is a name, or its number if there are no names."""
    boxes = []
    with corruption_named(path):
        for row, line in enumerate(path.read_text("utf-8-sig").splitlines(), 1):
            if not line.strip():
                continue
            words = line.split()
            label, numbers = words[0], []
            with suppress(ValueError):  # of a word that is no number
                label, *numbers = map(float, words)
            if len(numbers) < 4 or len(numbers) % 2 or label not in range(len(classes) or 10**6):
                raise ValueError(f"line {row} is not CLASS cx cy w h of {len(classes)} classes")
            across, down = numbers[::2], numbers[1::2]
            if len(numbers) == 4:
                (x, width), (y, height) = across, down
                across, down = [x - width / 2, x + width / 2], [y - height / 2, y + height / 2]
            corners = min(across), min(down), max(across), max(down)
            boxes.append(_Box(classes[int(label)] if classes else f"{label:.0f}", corners))
    return boxes


def _coco_files(folder: Path) -> list[Path]:
    """Returns the JSON files of a domain, up to two folders deep; of COCO's own the instances."""
    deepest = len(folder.parts) + 3
    paths = [
        path
        for path in files_below(folder)
        if path.suffix == ".json" and len(path.parts) <= deepest
    ]
    # COCO's other files (of key points, captions) have the same keys as its instances_*.
    return [path for path in paths if path.stem.startswith("instances")] or paths


def _read_coco(paths: Sequence[Path], folder: Path) -> tuple[list[str], list[Labelled]]:
    """Returns the names of all classes in the order of the files, and the images of a domain."""
    classes: dict[str, None] = {}
    labelled: list[Labelled] = []
    for path in paths:
        with corruption_named(path):
            content = json.loads(path.read_text("utf-8-sig"))
            categories = {row["id"]: str(row["name"]) for row in content["categories"]}
            boxes: dict[Any, list[_Box]] = {row["id"]: [] for row in content["images"]}
            if len(boxes) < len(content["images"]) or len(categories) < len(content["categories"]):
                raise ValueError("two images or two categories have one id")
            for row in content["annotations"]:
                x, y, width, height = map(float, row["bbox"])
                label, corners = categories[row["category_id"]], (x, y, x + width, y + height)
                boxes[row["image_id"]].append(_Box(label, corners, bool(row.get("iscrowd"))))
            labelled += _images_in(path, folder, content["images"], boxes)
        classes |= dict.fromkeys(categories.values())
    return list(classes), labelled


def _images_in(
    path: Path, folder: Path, rows: Sequence[Mapping[str, Any]], boxes: Mapping[Any, list[_Box]]
) -> list[Labelled]:
    """Returns the images of one file of COCO with their boxes."""
    # A file's folders and the words of its name may both name a part.
    words = path.stem.split("_")
    part = part_in([*path.relative_to(folder).parts[:-1], *words])
    names = [PurePosixPath(row["file_name"]) for row in rows]  # COCO writes / on every system
    if outside := [str(name) for name in names if name.is_absolute() or ".." in name.parts]:
        raise ValueError(f"'file_name' {outside[0]!r} leads out of the folder")
    # Names are relative to the first of these folders that holds the first image.
    places = [path.parent, path.parent / "images", folder / "images", folder]
    places += [base / word for word in words for base in (folder, folder / "images")]
    base = next((p for p in places if names and (p / names[0]).is_file()), folder / "images")
    return [
        Labelled(
            base / name,
            boxes[row["id"]],
            (row["width"], row["height"]) if {"width", "height"} <= set(row) else None,
            part,
        )
        for name, row in zip(names, rows, strict=True)
    ]
