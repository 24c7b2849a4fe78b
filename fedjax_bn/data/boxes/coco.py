"""COCO's JSON (Lin et al., ECCV 2014): one file for many images.

    annotations/instances_train.json   images/NAME.jpg     or images beside the file, or in train/

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
"annotations": [{"image_id", "category_id", "bbox": [x, y, w, h], "iscrowd"}]}. Boxes are in pixels
from the upper left corner of the image as viewers show it, or as it is stored if "width" and
"height" are those before EXIF's turn (see `assemble`). Crowds stay crowds, see `label_trees`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from fedjax_bn.data.boxes.labelled import Box, Labelled, part_of
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import is_hidden

_KEYS = {"images", "annotations", "categories"}


def coco_files(folder: Path) -> list[Path]:
    """Returns the JSON files of a domain, up to two folders deep; of COCO's own the instances."""
    paths = sorted(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}*.json"))
    paths = [path for path in paths if not any(map(is_hidden, path.relative_to(folder).parts))]
    # COCO's other files (of key points, captions) have the same keys as its instances_*.
    return [path for path in paths if path.stem.startswith("instances")] or paths


def read_coco(paths: Sequence[Path], folder: Path) -> tuple[list[str], list[Labelled]]:
    """Returns the names of all classes in the order of the files, and the images of a domain.

    Raises:
      ValueError: a file is damaged or not in the form; it is named.
    """
    classes: dict[str, None] = {}
    labelled: list[Labelled] = []
    for path in paths:
        with corruption_named(path):
            content = json.loads(path.read_text("utf-8-sig"))
            if missing := _KEYS - set(content):
                raise ValueError(f"it has no {min(missing)!r}")
            categories = {row["id"]: str(row["name"]) for row in content["categories"]}
            labelled += _images_in(path, content, categories, folder)
        classes |= dict.fromkeys(categories.values())
    return list(classes), labelled


def _images_in(
    path: Path, content: Mapping[str, Any], categories: Mapping[Any, str], folder: Path
) -> list[Labelled]:
    """Returns the images of one file with their boxes."""
    boxes: dict[Any, list[Box]] = {row["id"]: [] for row in content["images"]}
    if len(boxes) < len(content["images"]) or len(categories) < len(content["categories"]):
        raise ValueError("two images or two categories have one id")
    for number, row in enumerate(content["annotations"], 1):
        x, y, width, height = map(float, row["bbox"])
        label, corners = categories[row["category_id"]], (x, y, x + width, y + height)
        boxes[row["image_id"]].append(Box(number, label, corners, bool(row.get("iscrowd"))))
    # A file's folders and the words of its name may both name a part.
    words = path.stem.split("_")
    part = part_of([*path.relative_to(folder).parts[:-1], *words])
    names = {row["id"]: _file_name(row["file_name"]) for row in content["images"]}
    # Names are relative to the first of these folders that holds the first image.
    places = [path.parent, path.parent / "images", folder / "images", folder]
    places += [base / word for word in words for base in (folder, folder / "images")]
    example = next(iter(names.values()), PurePosixPath())
    base = next((place for place in places if (place / example).is_file()), folder / "images")
    return [
        Labelled(
            base / names[row["id"]],
            f"{path}, annotations",
            boxes[row["id"]],
            (row["width"], row["height"]) if {"width", "height"} <= set(row) else None,
            part,
        )
        for row in content["images"]
    ]


def _file_name(name: str) -> PurePosixPath:
    """Returns the name of an image's file, which stays below the folder of the images."""
    path = PurePosixPath(name)  # COCO writes / on every system
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"'file_name' {name!r} leads out of the folder")
    return path
