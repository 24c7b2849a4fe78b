"""COCO's JSON (Lin et al., ECCV 2014): one file for many images.

    annotations/instances_train.json   images/NAME.jpg     or images beside the file, or in train/

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
"annotations": [{"image_id", "category_id", "bbox": [x, y, w, h], "iscrowd"}]}. Boxes are in pixels
from the upper left corner of the image as viewers show it, or as it is stored if "width" and
"height" are those before EXIF's turn (see `assemble`). Crowds stay crowds, see `label_trees`.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fedjax_bn.arguments.text import brief, short
from fedjax_bn.data.boxes.labelled import (
    Box,
    Form,
    Labelled,
    Slips,
    bytes_of_name,
    entry,
    of_kind,
    part_of,
    read_json,
)
from fedjax_bn.data.sets.folders import is_hidden

_LONGEST, _DEEPEST = 255, 1024  # bytes of a file's name, characters of its path
_KEYS = {"images", "annotations", "categories"}
_Found = list[tuple[Path, dict[str, Any]]]


def _find(root: Path, folder: Path, slips: Slips) -> _Found:
    """Returns the JSON files of a domain that have this form, with their content."""
    del root, slips
    paths = sorted(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}*.json"))
    paths = [path for path in paths if not any(map(is_hidden, path.relative_to(folder).parts))]
    # COCO's other files (of key points, captions) have the same keys as its instances_*.
    paths = [path for path in paths if path.stem.startswith("instances")] or paths
    contents = ((path, read_json(path)) for path in paths)
    objects = [(path, content) for path, content in contents if isinstance(content, dict)]
    found = [(path, content) for path, content in objects if set(content) >= _KEYS]
    if not found:
        for path, content in objects:
            if len(_KEYS & set(content)) > 1:
                raise ValueError(f"{path} has no {min(_KEYS - set(content))!r}")
    return found


def _read(
    root: Path, folders: Mapping[str, Path], found: Mapping[str, _Found], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes in the order of the files, and domain -> its images."""
    del root, slips
    names: dict[str, None] = {}
    domains: dict[str, list[Labelled]] = {}
    for domain, files in found.items():
        domains[domain] = []
        for path, content in files:
            categories = {
                identity: entry(one, "name", str, place)
                for identity, (place, one) in _by_id(path, content, "categories").items()
            }
            names |= dict.fromkeys(categories.values())
            domains[domain] += _images(path, content, folders[domain], categories)
    return list(names), domains


def _by_id(path: Path, content: Mapping[str, Any], key: str) -> dict[int, tuple[str, Any]]:
    """Returns id -> (its place, the object) of a list of objects, in the order of the file."""
    found: dict[int, tuple[str, Any]] = {}
    for row, one in enumerate(entry(content, key, list, str(path)), 1):
        place = f"{path}, {key}, row {row}"
        identity = entry(one, "id", int, place)
        if identity in found:
            raise ValueError(
                f"{place} has the id {brief(identity)}, as an earlier one: ids must differ"
            )
        found[identity] = place, one
    return found


def _images(
    path: Path, content: Mapping[str, Any], folder: Path, categories: Mapping[int, str]
) -> list[Labelled]:
    """Returns the images of one file with their boxes."""
    images = _by_id(path, content, "images")
    boxes: dict[int, list[Box]] = {identity: [] for identity in images}
    for row, one in enumerate(entry(content, "annotations", list, str(path)), 1):
        place = f"{path}, annotations, row {row}"
        image, category = entry(one, "image_id", int, place), entry(one, "category_id", int, place)
        if image not in boxes:
            raise ValueError(f"{place} is of image {brief(image)}, which `images` does not have")
        if category not in categories:
            raise ValueError(
                f"{place} is of category {brief(category)}, which `categories` does not name"
            )
        box = entry(one, "bbox", list, place)
        if len(box) != 4:
            raise ValueError(f"{place}: 'bbox' must be [x, y, width, height]")
        x, y, w, h = (of_kind(value, float, f"{place}: 'bbox'") for value in box)
        corners = (x, y, x + w, y + h)
        boxes[image].append(Box(row, categories[category], corners, bool(one.get("iscrowd"))))
    # A file's folders and the words of its name may both name a part.
    part = part_of([*path.relative_to(folder).parts[:-1], *path.stem.split("_")])
    places = [path.parent, path.parent / "images", folder / "images", folder]
    for word in path.stem.split("_"):
        places += [folder / word, folder / "images" / word]
    # Names are relative to the first of these folders that holds the first image.
    first = [_file_name(one, place) for place, one in list(images.values())[:1]]
    held = (place for place in places if any((place / name).is_file() for name in first))
    base, labelled = next(held, folder / "images"), []
    for identity, (place, one) in images.items():
        size = None
        if "width" in one and "height" in one:
            size = (entry(one, "width", int, place), entry(one, "height", int, place))
        file, labels = base / _file_name(one, place), f"{path}, annotations"
        labelled.append(Labelled(file, labels, boxes[identity], size, part))
    return labelled


def _file_name(one: Mapping[str, Any], place: str) -> PurePosixPath:
    """Returns the name of an image's file, checked to stay below the folder of the images."""
    # COCO writes / on every system.
    name = PurePosixPath(of_kind(one.get("file_name"), str, f"{place}: 'file_name'"))
    if name.is_absolute() or ".." in name.parts or "\0" in str(name) or not name.parts:
        raise ValueError(f"{place}: 'file_name' {short(str(name))!r} leads out of the folder")
    longest = max(bytes_of_name(part, f"{place}: 'file_name'") for part in name.parts)
    if longest > _LONGEST or len(str(name)) > _DEEPEST:
        raise ValueError(
            f"{place}: 'file_name' {short(str(name), 60)!r} has {len(str(name)):,} characters, "
            "more than a file's name can have: correct it"
        )
    return name


COCO = Form("COCO's JSON", False, _find, _read)
