"""Makes a domain of Cityscapes (Cordts et al., CVPR 2016), clear or foggy, in COCO's form.

    python launch/convert/cityscapes.py FOLDER TARGET/cityscapes [--foggy]

FOLDER (cityscapes-dataset.com, after registration) holds

    leftImg8bit/{train,val}/CITY/CITY_SEQ_FRAME_leftImg8bit.png
    leftImg8bit_foggy/{train,val}/CITY/CITY_SEQ_FRAME_leftImg8bit_foggy_beta_0.02.png
                                         (Sakaridis et al., IJCV 2018)
    gtFine/{train,val}/CITY/CITY_SEQ_FRAME_gtFine_instanceIds.png

Boxes enclose the instances' pixels, of class * 1000 + number; a class without a number is a crowd.
Clear and foggy images show the same scenes: keep the official split, which divides both alike.
"""

import argparse
from pathlib import Path

from coco_form import COMMON, Box, boxes_around, write_coco

IDS = {24: 0, 25: 1, 26: 2, 27: 3, 28: 4, 31: 5, 32: 6, 33: 7}  # class in a PNG -> in COMMON
WEATHERS = {
    False: ("leftImg8bit", "_leftImg8bit.png"),
    True: ("leftImg8bit_foggy", "_leftImg8bit_foggy_beta_0.02.png"),
}


def boxes_in(instances: Path) -> list[Box]:
    """Returns the boxes of a PNG of instances."""
    boxes = []
    for value, corners in boxes_around(instances):
        kind = IDS.get(value, IDS.get(value // 1000))
        if kind is not None:
            boxes.append(Box(COMMON[kind], corners, crowd=value in IDS))
    return boxes


def convert(folder: Path, target: Path, foggy: bool) -> None:
    """Writes a file for each part."""
    inner, end = WEATHERS[foggy]
    for part in ("train", "val"):
        images = sorted((folder / inner / part).glob(f"[!.]*/[!.]*{end}"))
        if not images:
            raise FileNotFoundError(f"{folder / inner / part} has no CITY/*{end}")
        truth = folder / "gtFine" / part
        labelled = {
            image: boxes_in(
                truth / image.parent.name / f"{image.name.removesuffix(end)}_gtFine_instanceIds.png"
            )
            for image in images
        }
        write_coco(target, part, labelled, COMMON)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--foggy", action="store_true", help="the images in fog")
    options = parser.parse_args()
    convert(options.folder, options.target, options.foggy)
