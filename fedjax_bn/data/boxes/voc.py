"""Pascal VOC: an XML file for each image (Everingham et al., IJCV 2010).

    annotations/NAME.xml   images/NAME.jpg      also Annotations and JPEGImages, or side by side

Corners are whole pixels counted from 1, both included: a box begins at xmin - 1 and ends at xmax.
"Difficult" objects are boxes as all others. An image without XML is left out, and counted. Parts
are those that folders name, or ImageSets/Main/{train,val,test}.txt, which list names.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_bn.data.boxes.labelled import (
    IMAGES,
    LABELS,
    OTHER_CLASS,
    PARTS,
    Box,
    Labelled,
    Slips,
    files_in,
    numbers_of,
    part_of,
)
from fedjax_bn.data.boxes.parsing import number_of, read_xml, text_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import is_image

NAME, SHARES = "Pascal VOC's XML", False  # see `own`


class _Found(NamedTuple):
    """An XML file, its image, the size that it states, and class and corners of each box."""

    path: Path
    image: Path
    size: tuple[int, int] | None
    boxes: list[tuple[str, tuple[float, ...]]]


def find(root: Path, folder: Path, slips: Slips) -> list[_Found]:
    """Returns the annotated images of a domain; none where no file is XML.

    Raises:
      FileNotFoundError: an image is missing.
      ValueError: an XML file is damaged or not of VOC's form.
    """
    files = files_in(folder)
    annotations = [file for file in files if file.suffix.lower() == ".xml"]
    if not annotations:
        return []
    images = [file for file in files if is_image(file.name)]
    by_name: dict[str, list[Path]] = {}
    for image in images:
        by_name.setdefault(image.stem, []).append(image)
    found = [_read(path, folder, by_name) for path in annotations]
    used = {one.image for one in found}
    for image in images:
        if image not in used:
            slips.add("images without an XML file left out", str(image.relative_to(root)))
    return found


def _read(path: Path, folder: Path, by_name: Mapping[str, list[Path]]) -> _Found:
    """Returns what an XML file holds, with the image of its name or of the name that it states."""
    root = read_xml(path)
    stated = Path((root.findtext("filename") or "").strip()).stem
    named = by_name.get(path.stem) or by_name.get(stated) or []
    if len(named) > 1:  # the one in the folder that corresponds to the XML file's
        own = _plain(path, folder, LABELS)
        named = [image for image in named if _plain(image, folder, IMAGES) == own]
    if len(named) != 1:
        several = f"; there are {first_few(list(map(str, named)))}" if named else ""
        raise FileNotFoundError(
            f"{path} has no image of its name in {folder}{several}: fetch or unpack it again"
        )
    boxes = []
    for row, one in enumerate(root.findall("object"), 1):
        place = f"{path}, row {row}"
        corners = one.find("bndbox")
        if corners is None:
            raise ValueError(f"{place} has no <bndbox>")
        edges = ("xmin", "ymin", "xmax", "ymax")
        x1, y1, x2, y2 = (number_of(corners, edge, place) for edge in edges)
        boxes.append((text_of(one, "name", place), (x1 - 1, y1 - 1, x2, y2)))
    if root.find("size") is None:
        return _Found(path, named[0], None, boxes)
    width, height = (number_of(root, f"size/{side}", str(path)) for side in ("width", "height"))
    if not (math.isfinite(width) and math.isfinite(height)):
        raise ValueError(f"{path} says that its image has {width} x {height} pixels")
    return _Found(path, named[0], (int(width), int(height)), boxes)


def _plain(file: Path, folder: Path, inside: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the folders of a file without those that only hold images, or labels."""
    return tuple(p for p in file.relative_to(folder).parts[:-1] if p.lower() not in inside)


def read(
    root: Path,
    folders: Mapping[str, Path],
    found: Mapping[str, list[_Found]],
    classes: Sequence[str],
    slips: Slips,
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, sorted, and domain -> its images; see `own`."""
    every = [box for files in found.values() for one in files for box in one.boxes]
    names = sorted({name for name, _ in every})
    numbers = numbers_of(names, classes, str(root))
    domains: dict[str, list[Labelled]] = {}
    for domain, files in found.items():
        listed = _listed_parts(folders[domain])
        domains[domain] = []
        for path, image, size, boxes in files:
            kept = [
                Box(row, numbers[name], corners)
                for row, (name, corners) in enumerate(boxes, 1)
                if name in numbers
            ]
            slips.add(OTHER_CLASS, count=len(boxes) - len(kept))
            parts = path.relative_to(folders[domain]).parts[:-1]
            part = listed.get(path.stem, part_of(parts))
            domains[domain].append(Labelled(image, str(path), kept, size, part))
    return names, domains


def _listed_parts(folder: Path) -> dict[str, int]:
    """Returns name of an XML file -> its part, of those that VOC's own lists name."""
    listed = {}
    for name in ("train", "val", "test"):
        path = folder / "ImageSets" / "Main" / f"{name}.txt"
        if path.is_file():
            with corruption_named(path):
                lines = read_text(path).splitlines()
            listed |= dict.fromkeys((line.strip() for line in lines), PARTS[name])
    return listed
