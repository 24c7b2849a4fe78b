"""Writes COCO's JSON beside images with boxes in the form of Pascal VOC.

    python launch/convert/voc.py FOLDER

    annotations/NAME.xml   images/NAME.jpg     (or Annotations and JPEGImages, or together)

Corners in VOC (Everingham et al., IJCV 2010) are whole pixels counted from 1, both included, so a
box begins at xmin - 1 and ends at xmax. "Difficult" objects are boxes like all others. Images are
divided by the lists ImageSets/Main/{train,val,test}.txt, if there are any. Run it for each domain.
"""

import argparse
from pathlib import Path
from xml.etree import ElementTree

from coco_form import Box, write_coco

from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import files_below, is_image


def read_boxes(path: Path) -> list[Box]:
    """Returns the boxes of an XML file."""
    boxes = []
    with corruption_named(path):
        for row in ElementTree.parse(path).getroot().findall("object"):
            edges = (row.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax"))
            x1, y1, x2, y2 = map(float, edges)
            boxes.append(Box(row.findtext("name").strip(), (x1 - 1, y1 - 1, x2, y2)))
    return boxes


def convert(folder: Path) -> None:
    """Writes a file for each list, or one of all images that have an XML file."""
    files = files_below(folder)
    images = {file.stem: file for file in files if is_image(file.name)}
    boxes = {file.stem: read_boxes(file) for file in files if file.suffix == ".xml"}
    if absent := sorted(set(boxes) - set(images)):
        raise FileNotFoundError(f"{folder} has no image of {', '.join(absent)}")
    classes = sorted({box.label for rows in boxes.values() for box in rows})
    parts = {
        part: list_file.read_text().split()
        for part in ("train", "val", "test")
        if (list_file := folder / "ImageSets" / "Main" / f"{part}.txt").is_file()
    }
    for part, names in (parts or {"all": sorted(boxes)}).items():
        write_coco(folder, part, {images[name]: boxes[name] for name in names}, classes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    convert(parser.parse_args().folder)
