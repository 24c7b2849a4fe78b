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

from fedjax_bn.data.boxes.folders import IMAGES, LABELS, files_in
from fedjax_bn.data.boxes.labelled import PARTS, Labelled, Slips, part_of
from fedjax_bn.data.boxes.parsing import number_of, read_xml, text_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import is_image

_EDGES = ("xmin", "ymin", "xmax", "ymax")
OTHER_CLASS = "boxes of classes that data.classes does not name left out"

# (the XML file, its image, and for each box its class and corners)
Found = tuple[Path, Path, tuple[int, int] | None, list[tuple[str, tuple[float, ...]]]]


def find(root: Path, folder: Path, slips: Slips) -> list[Found]:
    """The annotated images of a domain; none where no file is XML.

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
    found, used = [], set()
    for path in annotations:
        content = read_xml(path)
        said = Path((content.findtext("filename") or "").strip()).stem
        named = by_name.get(path.stem) or by_name.get(said) or []
        image = _image_of(path, folder, named)
        used.add(image)
        found.append((path, image, *_read(path, content)))
    for image in images:
        if image not in used:
            slips.add("images without an XML file left out", str(image.relative_to(root)))
    return found


def _image_of(path: Path, folder: Path, named: list[Path]) -> Path:
    """The one image; of several of its name that in the folder that goes with the XML file's."""
    if len(named) > 1:
        own = _plain(path, folder, LABELS)
        named = [image for image in named if _plain(image, folder, IMAGES) == own]
    if len(named) != 1:
        several = f"; there are {first_few(list(map(str, named)))}" if named else ""
        raise FileNotFoundError(
            f"{path} has no image of its name in {folder}{several}: fetch or unpack it again"
        )
    return named[0]


def _plain(file: Path, folder: Path, inside: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of a file that say which part it is of."""
    return tuple(p for p in file.relative_to(folder).parts[:-1] if p.lower() not in inside)


def _read(
    path: Path, root: ElementTree.Element
) -> tuple[tuple[int, int] | None, list[tuple[str, tuple[float, ...]]]]:
    """The size that the image should have, and its boxes."""
    boxes = []
    for row, one in enumerate(root.findall("object"), 1):
        place = f"{path}, row {row}"
        corners = one.find("bndbox")
        if corners is None:
            raise ValueError(f"{place} has no <bndbox>")
        x1, y1, x2, y2 = (number_of(corners, edge, place) for edge in _EDGES)
        boxes.append((text_of(one, "name", place), (x1 - 1, y1 - 1, x2, y2)))
    if root.find("size") is None:
        return None, boxes
    sides = [number_of(root, f"size/{side}", str(path)) for side in ("width", "height")]
    if not all(map(math.isfinite, sides)):
        raise ValueError(f"{path} says that its image has {sides[0]} x {sides[1]} pixels")
    return (int(sides[0]), int(sides[1])), boxes


def classes_of(found: Mapping[str, list[Found]]) -> list[str]:
    """The names of all classes, sorted."""
    return sorted({name for rows in found.values() for *_, boxes in rows for name, _ in boxes})


def labelled(
    found: list[Found], folder: Path, numbers: Mapping[str, int], slips: Slips
) -> list[Labelled]:
    """The images with their boxes [n, 4] (x1, y1, x2, y2 in pixels) of some classes.

    Args:
      found: as `find` returns it.
      folder: of the domain.
      numbers: name -> number of the classes that are wanted.
      slips: counts the boxes of other classes.
    """
    images, listed = [], _listed_parts(folder)
    for path, image, size, boxes in found:
        rows = [row for row, (name, _) in enumerate(boxes) if name in numbers]
        for _ in range(len(boxes) - len(rows)):
            slips.add(OTHER_CLASS)
        images.append(
            Labelled(
                file=image,
                place=str(path),
                classes=[numbers[boxes[row][0]] for row in rows],
                corners=[boxes[row][1] for row in rows],
                rows=[row + 1 for row in rows],
                size=size,
                part=listed.get(path.stem, part_of(path.relative_to(folder).parts[:-1])),
            )
        )
    return images


def _listed_parts(folder: Path) -> dict[str, int]:
    """Name of an XML file -> its part, of those that VOC's own lists name."""
    listed = {}
    for name in ("train", "val", "test"):
        path = folder / "ImageSets" / "Main" / f"{name}.txt"
        if path.is_file():
            with corruption_named(path):
                lines = read_text(path).splitlines()
            listed |= dict.fromkeys((line.strip() for line in lines), PARTS[name])
    return listed
