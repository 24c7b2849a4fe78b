"""COCO's JSON (Lin et al., ECCV 2014): one file for many images.

    annotations/instances_train.json   images/NAME.jpg     or images beside the file, or in train/

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
"annotations": [{"image_id", "category_id", "bbox": [x, y, w, h], "iscrowd"}]}; boxes are in pixels
from the image's upper left corner, of the image as viewers show it or, where "width" and "height"
are those before EXIF's turn, as it is stored (see `assemble`). Crowds stay such, see `label_trees`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from fedjax_bn.arguments.text import brief, short
from fedjax_bn.data.boxes.labelled import CROWDS, Labelled, Slips, part_of
from fedjax_bn.data.boxes.parsing import entry, number, of_kind, read_json
from fedjax_bn.data.label_trees import crowd

_LONGEST, _DEEPEST = 255, 1024  # bytes of a file's name, characters of one with its folders
_KEYS = {"images", "annotations", "categories"}


def find(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The JSON files of a domain that are of this form, with their content.

    Where some are called instances_*, as COCO's own, others (of key points, captions) are left out.

    Raises:
      ValueError: a file is damaged, or none has all that this form needs.
    """
    paths = sorted(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}*.json"))
    paths = [path for path in paths if path.stem.startswith("instances")] or paths
    contents = ((path, read_json(path)) for path in paths)
    objects = [(path, content) for path, content in contents if isinstance(content, dict)]
    found = [(path, content) for path, content in objects if set(content) >= _KEYS]
    if not found:
        for path, content in objects:
            if len(_KEYS & set(content)) > 1:
                raise ValueError(f"{path} has no {min(_KEYS - set(content))!r}")
    return found


def categories(path: Path, content: Mapping[str, Any]) -> dict[int, str]:
    """Number -> name, in the order of the file.

    Raises:
      ValueError: they are not of the form.
    """
    rows = entry(content, "categories", list, str(path))
    named = {}
    for row, one in enumerate(rows, 1):
        place = f"{path}, categories, row {row}"
        identity = entry(one, "id", int, place)
        if identity in named:
            raise ValueError(
                f"{place} has the id {brief(identity)}, as an earlier one: ids must differ"
            )
        named[identity] = entry(one, "name", str, place)
    return named


def labelled(
    path: Path,
    content: Mapping[str, Any],
    folder: Path,
    numbers: Mapping[str, int],
    slips: Slips,
) -> list[Labelled]:
    """The images of one file with their boxes [n, 4] (x1, y1, x2, y2 in pixels).

    Args:
      path: the JSON file.
      content: what it holds.
      folder: of the domain.
      numbers: name -> number of the classes that are wanted.
      slips: counts what is left out.

    Raises:
      ValueError: the file is not of the form, or an annotation is of no image or category.
    """
    named, part = categories(path, content), part_of(_words(path, folder))
    boxes: dict[int, list[tuple[int, int, tuple[float, ...]]]] = {}
    images = entry(content, "images", list, str(path))
    for row, one in enumerate(images, 1):
        place = f"{path}, images, row {row}"
        identity = entry(one, "id", int, place)
        if identity in boxes:
            raise ValueError(
                f"{place} has the id {brief(identity)}, as an earlier one: ids must differ"
            )
        boxes[identity] = []
    for row, one in enumerate(entry(content, "annotations", list, str(path)), 1):
        place = f"{path}, annotations, row {row}"
        image, category = entry(one, "image_id", int, place), entry(one, "category_id", int, place)
        if image not in boxes:
            raise ValueError(f"{place} is of image {brief(image)}, which `images` does not have")
        if category not in named:
            raise ValueError(
                f"{place} is of category {brief(category)}, which `categories` does not name"
            )
        if named[category] not in numbers:
            slips.add("boxes of classes that data.classes does not name left out")
            continue
        class_ = numbers[named[category]]
        if one.get("iscrowd"):
            slips.add(CROWDS)
            class_ = crowd(class_)
        boxes[image].append((row, class_, _corners(one, place)))
    base = _base(path, folder, images)
    return [_image(one, path, base, boxes[one["id"]], part, k) for k, one in enumerate(images, 1)]


def _corners(one: Mapping[str, Any], place: str) -> tuple[float, ...]:
    box = entry(one, "bbox", list, place)
    if len(box) != 4:
        raise ValueError(f"{place}: 'bbox' must be [x, y, width, height]")
    x, y, w, h = (number(value, f"{place}: 'bbox'") for value in box)
    return x, y, x + w, y + h


def _image(
    one: Mapping[str, Any],
    path: Path,
    base: Path,
    boxes: Sequence[tuple[int, int, tuple[float, ...]]],
    part: int | None,
    row: int,
) -> Labelled:
    place = f"{path}, images, row {row}"
    size = None
    if "width" in one and "height" in one:
        size = (entry(one, "width", int, place), entry(one, "height", int, place))
    return Labelled(
        file=base / _file_name(one, place),
        place=f"{path}, annotations",
        classes=[number for _, number, _ in boxes],
        corners=[corners for *_, corners in boxes],
        rows=[row for row, *_ in boxes],
        size=size,
        part=part,
    )


def _file_name(one: Mapping[str, Any], place: str) -> PurePosixPath:
    """The image's file, which lies in the folder of the images."""
    name = PurePosixPath(of_kind(one.get("file_name"), str, f"{place}: 'file_name'"))
    if name.is_absolute() or ".." in name.parts or "\0" in str(name) or not name.parts:
        raise ValueError(f"{place}: 'file_name' {short(str(name))!r} leads out of the folder")
    if any(len(os.fsencode(part)) > _LONGEST for part in name.parts) or len(str(name)) > _DEEPEST:
        raise ValueError(
            f"{place}: 'file_name' {short(str(name), 60)!r} has {len(str(name)):,} characters, "
            "more than a file's name can have: correct it"
        )
    return name


def _base(path: Path, folder: Path, images: Sequence[Any]) -> Path:
    """The folder from which the files of images count: the first where the first one lies."""
    if not images:
        return folder
    words = path.stem.split("_")
    places = [path.parent, path.parent / "images", folder / "images", folder]
    for word in words:
        places += [folder / word, folder / "images" / word]
    name = _file_name(of_kind(images[0], dict, f"{path}, images, row 1"), f"{path}, images, row 1")
    return next((place for place in places if (place / name).is_file()), folder / "images")


def _words(path: Path, folder: Path) -> list[str]:
    """Words of a file's path that may name a part: its folders, and the words of its name."""
    return [*path.relative_to(folder).parts[:-1], *path.stem.split("_")]
