"""Pascal VOC: an XML file for each image (Everingham et al., IJCV 2010).

    annotations/NAME.xml   images/NAME.jpg      also Annotations and JPEGImages, or side by side

Corners are whole pixels counted from 1, both included: a box begins at xmin - 1 and ends at xmax.
"Difficult" objects are boxes as all others. An image without XML is left out, and counted. Parts
are those that folders name, or ImageSets/Main/{train,val,test}.txt, which list names.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from fedjax_bn.arguments.text import shown
from fedjax_bn.data.boxes.labelled import (
    IMAGES,
    LABELS,
    PARTS,
    Box,
    Labelled,
    Slips,
    files_in,
    part_of,
)
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_regular, read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import is_image

NAME, SHARES = "Pascal VOC's XML", False  # see `own`
_LARGEST_XML = 2**24  # bytes; one image's labels take a few thousand


def find(root: Path, folder: Path, slips: Slips) -> list[Labelled]:
    """Returns the annotated images of a domain, without parts; none where no file is XML.

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
    found = [_read_annotation(path, folder, by_name) for path in annotations]
    used = {one.file for one in found}
    for image in images:
        if image not in used:
            slips.add("images without an XML file left out", str(image.relative_to(root)))
    return found


def read(
    root: Path, folders: Mapping[str, Path], found: Mapping[str, list[Labelled]], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, sorted, and domain -> its images; see `own`."""
    del root, slips
    names = {box.label for images in found.values() for one in images for box in one.boxes}
    domains: dict[str, list[Labelled]] = {}
    for domain, images in found.items():
        folder, listed, domains[domain] = folders[domain], {}, []
        for name in ("train", "val", "test"):
            path = folder / "ImageSets" / "Main" / f"{name}.txt"
            if path.is_file():
                with corruption_named(path):
                    lines = read_text(path).splitlines()
                listed |= dict.fromkeys((line.strip() for line in lines), PARTS[name])
        for one in images:
            path = Path(one.place)
            part = listed.get(path.stem, part_of(path.relative_to(folder).parts[:-1]))
            domains[domain].append(one._replace(part=part))
    return sorted(names), domains


class _NoDoctype(ElementTree.TreeBuilder):
    """Builds XML without a document type: entities, which may grow without bound, need one."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, which labels do not need")


def _read_annotation(path: Path, folder: Path, by_name: Mapping[str, list[Path]]) -> Labelled:
    """Returns what an XML file holds, with the image of its name or of the name that it states."""
    parser = ElementTree.XMLParser(target=_NoDoctype())
    with corruption_named(path):
        parser.feed(read_regular(path, _LARGEST_XML))
        root = parser.close()
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
    boxes, size = [], None
    for row, one in enumerate(root.findall("object"), 1):
        place = f"{path}, row {row}"
        edges = (f"bndbox/{edge}" for edge in ("xmin", "ymin", "xmax", "ymax"))
        x1, y1, x2, y2 = (_number(one, edge, place) for edge in edges)
        boxes.append(Box(row, _text(one, "name", place), (x1 - 1, y1 - 1, x2, y2)))
    if root.find("size") is not None:
        width, height = (_number(root, f"size/{side}", str(path)) for side in ("width", "height"))
        if not (math.isfinite(width) and math.isfinite(height)):
            raise ValueError(f"{path} says that its image has {width} x {height} pixels")
        size = int(width), int(height)
    return Labelled(named[0], str(path), boxes, size)


def _plain(file: Path, folder: Path, inside: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the folders of a file without those that only hold images, or labels."""
    return tuple(p for p in file.relative_to(folder).parts[:-1] if p.lower() not in inside)


def _text(element: ElementTree.Element, name: str, place: str) -> str:
    """Returns the text of the first element of that path in another; it must not be empty."""
    found = (element.findtext(name) or "").strip()
    if not found:
        raise ValueError(f"{place} has no <{name}>")
    return found


def _number(element: ElementTree.Element, name: str, place: str) -> float:
    """Returns the number that `_text` finds."""
    text = _text(element, name, place)
    try:
        return float(text)
    except ValueError:
        tag = name.rpartition("/")[2]
        raise ValueError(f"{place}: <{tag}> is {shown(text[:40])!r}, not a number") from None
