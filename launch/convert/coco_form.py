"""Writes images with boxes in COCO's form, which data.name=boxes reads."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

# The classes that BDD100K, Cityscapes and Mapillary Vistas share.
COMMON = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")


class Box(NamedTuple):
    """A box of a class: x1, y1, x2, y2 in pixels, where x2 - x1 is its width; or of a crowd."""

    label: str
    corners: tuple[float, float, float, float]
    crowd: bool = False


def write_coco(
    folder: Path, part: str, labelled: Mapping[Path, Sequence[Box]], classes: Sequence[str]
) -> None:
    """Writes FOLDER/annotations/instances_PART.json, and links to images that are elsewhere.

    Args:
      part: such as "train", "val" or "all"; the first two become the official split.
      labelled: image -> its boxes; boxes of other classes are left out.
      classes: the categories, in the order of their numbers.
    """
    images, annotations = [], []
    for number, (file, boxes) in enumerate(labelled.items()):
        if file.is_relative_to(folder):
            name = file.relative_to(folder).as_posix()
        else:
            name = f"images/{part}/{file.name}"
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(file.resolve())
        with Image.open(file) as image:
            width, height = image.size
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for label, (x1, y1, x2, y2), crowd in boxes:
            if label in classes:
                category, box = classes.index(label), [x1, y1, x2 - x1, y2 - y1]
                row = {"image_id": number, "category_id": category, "bbox": box}
                annotations.append({"id": len(annotations), **row, "iscrowd": int(crowd)})
    categories = [{"id": number, "name": label} for number, label in enumerate(classes)]
    content = {"images": images, "categories": categories, "annotations": annotations}
    target = folder / "annotations" / f"instances_{part}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content))
    print(f"{target}: {len(images)} images, {len(annotations)} boxes")


def boxes_around(file: Path) -> Iterable[tuple[int, tuple[int, int, int, int]]]:
    """Yields each number in a PNG of instances but 0, and the box around its pixels."""
    from scipy.ndimage import find_objects

    with Image.open(file) as image:
        values, dense = np.unique(np.asarray(image).astype(np.int32), return_inverse=True)
        # Numbered without gaps: `find_objects` makes room for every number up to the largest.
        places = find_objects(dense.reshape(image.size[::-1]).astype(np.int32) + 1)
    for value, (down, across) in zip(values.tolist(), places, strict=True):
        if value:
            yield value, (across.start, down.start, across.stop, down.stop)
