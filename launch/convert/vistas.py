"""Makes a domain of Mapillary Vistas (Neuhold et al., ICCV 2017) in COCO's form.

    python launch/convert/vistas.py FOLDER TARGET/vistas

FOLDER (mapillary.com/dataset/vistas, after registration) holds version 1.2 or 2.0:

    {training,validation}/images/*.jpg
    {training,validation}/instances/*.png, config_v1.2.json
    or {training,validation}/v2.0/instances/*.png, config_v2.0.json

Boxes enclose the instances' pixels, of class * 256 + number. Groups of people are crowds, unless
the config of version 2.0 denies them instances.
"""

import argparse
import json
from pathlib import Path

from coco_form import COMMON, Box, boxes_around, write_coco

from fedjax_bn.data.sets.files import corruption_named

NAMES = {
    "human--person": "person",
    "human--person--individual": "person",
    "human--rider--bicyclist": "rider",
    "human--rider--motorcyclist": "rider",
    "human--rider--other-rider": "rider",
    "object--vehicle--car": "car",
    "object--vehicle--truck": "truck",
    "object--vehicle--bus": "bus",
    "object--vehicle--on-rails": "train",
    "object--vehicle--motorcycle": "motorcycle",
    "object--vehicle--bicycle": "bicycle",
}
GROUP = "human--person--person-group"  # of version 2.0


def convert(folder: Path, target: Path) -> None:
    """Writes a file for each part."""
    newest = (folder / "config_v2.0.json").is_file()
    config = folder / ("config_v2.0.json" if newest else "config_v1.2.json")
    with corruption_named(config):
        rows = json.loads(config.read_text())["labels"]
        names = {number: row["name"] for number, row in enumerate(rows)}
        crowds = {
            number
            for number, row in enumerate(rows)
            if row["name"] == GROUP and row.get("instances", True)
        }

    def boxes_in(instances: Path) -> list[Box]:
        boxes = []
        for value, corners in boxes_around(instances):
            number = value // 256
            if number in crowds:
                boxes.append(Box("person", corners, crowd=True))
            elif names.get(number) in NAMES:
                boxes.append(Box(NAMES[names[number]], corners))
        return boxes

    for part, short in (("training", "train"), ("validation", "val")):
        instances = folder / part / ("v2.0/instances" if newest else "instances")
        images = sorted((folder / part / "images").glob("[!.]*.jpg"))
        labelled = {image: boxes_in(instances / f"{image.stem}.png") for image in images}
        write_coco(target, short, labelled, COMMON)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    convert(options.folder, options.target)
