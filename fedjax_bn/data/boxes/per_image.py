"""Labels in a file for each image: Pascal VOC's XML, and the text files of YOLO's detectors.

    VOC     annotations/NAME.xml   images/NAME.jpg     (or Annotations and JPEGImages, or together)
    YOLO    labels/train/NAME.txt   images/train/NAME.jpg   data.yaml

VOC (Everingham et al., IJCV 2010): corners are whole pixels counted from 1, both included, so a box
begins at xmin - 1 and ends at xmax. "Difficult" objects are boxes like all others. An image without
XML is left out and counted. Parts come from the lists ImageSets/Main/{train,val,test}.txt, or from
names of folders for images in no list.

YOLO: a line is "class cx cy w h", the number of the class, the centre, width and height in shares
of the image; or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box.
Images may also be in train/images, or beside their text files. The names of the classes are under
`names` of a YAML file, or in classes.txt, one per line; without either they are numbers. An image
without a text file has no boxes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.boxes.labelled import IMAGES, LABELS, PARTS, Box, Form, Labelled, Slips, part_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_regular, read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import files_below, is_image, subfolders

_LARGEST = 2**24  # bytes of a file; the labels of an image take a few thousand
_NAMES = ("classes.txt", "obj.names", "_darknet.labels")
_MOST_CLASSES = 10_000  # if no file names them
_SLACK = 1e-3  # shares of an image by which rounded numbers may pass its border
_Found = list[tuple[Path, Path | None]]  # images, each with its text file


def _find_voc(root: Path, folder: Path, slips: Slips) -> list[Labelled]:
    """Returns the annotated images of a domain, without parts; none if no file is XML."""
    files = files_below(folder)
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


def _read_voc(
    root: Path, folders: Mapping[str, Path], found: Mapping[str, list[Labelled]], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, sorted, and domain -> its images."""
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
    """Refuses document types, which entities need, because these may expand without bound."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, which labels do not need")


def _read_annotation(path: Path, folder: Path, by_name: Mapping[str, list[Path]]) -> Labelled:
    """Returns an XML file's image, found by the file's name or its <filename>, with boxes."""
    parser = ElementTree.XMLParser(target=_NoDoctype())
    with corruption_named(path):
        parser.feed(read_regular(path, _LARGEST))
        root = parser.close()
    stated = Path((root.findtext("filename") or "").strip()).stem
    named = by_name.get(path.stem) or by_name.get(stated) or []
    if len(named) > 1:  # takes the one in the corresponding folder
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
    """Returns the folders of a file, without those named in `inside`."""
    return tuple(p for p in file.relative_to(folder).parts[:-1] if p.lower() not in inside)


def _text(element: ElementTree.Element, name: str, place: str) -> str:
    """Returns the text of the first element at path `name`; it must not be empty."""
    found = (element.findtext(name) or "").strip()
    if not found:
        raise ValueError(f"{place} has no <{name}>")
    return found


def _number(element: ElementTree.Element, name: str, place: str) -> float:
    """Returns the text at path `name` as a number."""
    text = _text(element, name, place)
    try:
        return float(text)
    except ValueError:
        tag = name.rpartition("/")[2]
        raise ValueError(f"{place}: <{tag}> is {shown(text[:40])!r}, not a number") from None


def _find_yolo(root: Path, folder: Path, slips: Slips) -> _Found:
    """Returns the images of a domain, each with its text file; none if no image has one."""
    del root, slips
    found: _Found = []
    for image in (file for file in files_below(folder) if is_image(file.name)):
        # images/train/a.jpg has labels/train/a.txt; one outside has it beside.
        parts = list(image.relative_to(folder).with_suffix(".txt").parts)
        at = max((k for k, name in enumerate(parts[:-1]) if name.lower() in IMAGES), default=None)
        names = ["labels", "Labels"] if at is not None else []
        places = [folder.joinpath(*parts[:at], name, *parts[at + 1 :]) for name in names]
        places = places or [folder.joinpath(*parts)]
        found.append((image, next((path for path in places if path.is_file()), None)))
    return found if any(text for _, text in found) else []


def _read_yolo(
    root: Path, folders: Mapping[str, Path], found: Mapping[str, _Found], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, and domain -> its images, with boxes in shares."""
    named = _class_names([root, *folders.values()])
    boxes: dict[Path | None, list[Box]] = {None: []}
    domains: dict[str, list[Labelled]] = {}
    for domain, files in found.items():
        folder, domains[domain] = folders[domain], []
        for image, text in files:
            if text is None:
                slips.add("images without a text file, which have no boxes")
            elif text not in boxes:
                boxes[text] = [
                    _read_line(row, line.split(), f"{text}, row {row}", named)
                    for row, line in enumerate(_lines(text), 1)
                    if line.strip()
                ]
            part = part_of(image.relative_to(folder).parts[:-1])
            domains[domain].append(Labelled(image, str(text or image), boxes[text], part=part))
        for file in files_below(folder):
            below = file.relative_to(folder).parts[:-1]
            is_label = file.suffix == ".txt" and any(part.lower() in LABELS for part in below)
            if is_label and file not in boxes and file.name not in _NAMES:
                slips.add("text files without an image left out", str(file))
    if named:
        return named, domains
    # If no file names the classes, the greatest number shows how many there are.
    most = max((int(box.label) for own in boxes.values() for box in own), default=-1)
    return [str(number) for number in range(most + 1)], domains


def _class_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names in the first YAML or text file of names in these folders, if any."""
    import yaml  # installed with flax

    for folder in folders:
        described = sorted((*folder.glob("[!.]*.yaml"), *folder.glob("[!.]*.yml")))
        # Some labelling programs put the names among the labels.
        places = (folder, *(one for one in subfolders(folder) if one.name.lower() in LABELS))
        listed = [place / name for place in places for name in _NAMES]
        for path in (*described, *(path for path in listed if path.is_file())):
            if path in listed:
                names = [line.strip() for line in _lines(path) if line.strip()]
            else:
                with corruption_named(path):
                    # The safe loader creates no objects of Python classes.
                    content = yaml.safe_load(read_text(path, _LARGEST))
                if not isinstance(content, dict) or "names" not in content:
                    continue
                given: Any = content["names"]
                if isinstance(given, dict):
                    if sorted(given, key=str) != sorted(range(len(given)), key=str):
                        raise ValueError(f"{path}: `names` must be numbered from 0 without gaps")
                    given = [given[k] for k in range(len(given))]
                if not isinstance(given, list) or not all(
                    isinstance(name, str | int | float) for name in given
                ):
                    raise ValueError(f"{path}: `names` must be a list of names")
                with corruption_named(path):  # `str` refuses huge integers
                    names = [str(name) for name in given]
            twice = [name for number, name in enumerate(names) if name in names[:number]]
            if twice:
                raise ValueError(
                    f"{path} names {short(twice[0])!r} more than once: rename one of them"
                )
            return names
    return []


def _lines(path: Path) -> list[str]:
    with corruption_named(path):
        return read_text(path, _LARGEST).splitlines()


def _read_line(row: int, words: list[str], place: str, names: Sequence[str]) -> Box:
    """Returns the box of a line; its label is a name, or the number if classes have no names."""
    try:
        first, *numbers = map(float, words)
    except ValueError:
        raise ValueError(f"{place} holds {shown(' '.join(words)[:60])!r}, not numbers") from None
    if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
        raise ValueError(
            f"{place} has {len(words)} numbers; a line is 'class cx cy w h', or a class and an "
            "outline x1 y1 x2 y2 x3 y3 ..."
        )
    if not first.is_integer() or not 0 <= first < (len(names) or _MOST_CLASSES):
        known = f"whole, 0..{_MOST_CLASSES - 1}"
        if names:
            known = f"0..{len(names) - 1} ({first_few(names, 5)})"
        raise ValueError(f"{place} has class {short(words[0], 60)}; classes are {known}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{place} has a number that is not finite: correct or remove the line")
    if min(numbers) < -_SLACK or max(numbers) > 1 + _SLACK:
        raise ValueError(
            f"{place} has numbers outside [0, 1]; they must be shares of the image's width and "
            "height, not pixels"
        )
    if len(numbers) == 4:
        x, y, w, h = numbers
        corners = x - w / 2, y - h / 2, x + w / 2, y + h / 2
    else:
        across, down = numbers[::2], numbers[1::2]
        corners = min(across), min(down), max(across), max(down)
    return Box(row, names[int(first)] if names else str(int(first)), corners)


VOC = Form("Pascal VOC's XML", False, _find_voc, _read_voc)
YOLO = Form("YOLO's text files", True, _find_yolo, _read_yolo)
