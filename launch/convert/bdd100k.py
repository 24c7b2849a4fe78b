"""Makes domains of BDD100K's driving scenes (Yu et al., CVPR 2020) in COCO's form.

    python launch/convert/bdd100k.py FOLDER TARGET [--by table3] [--signs]

FOLDER (bdd-data.berkeley.edu, after registration) holds

    images/100k/{train,val}/NAME.jpg
    labels/det_20/det_{train,val}.json  or  labels/bdd100k_labels_images_{train,val}.json

and TARGET becomes TARGET/DOMAIN/annotations/instances_{train,val}.json with links to the images.
Domains are those of FedCD's Table 3, where CityStreet and Residential are of any weather; or the
values of --by weather, scene or timeofday; or one, bdd100k, --by all. Frames in no domain are left
out. Corner pixels belong to the box, so it ends at x2 + 1. A frame without labels has no boxes.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coco_form import COMMON, Box, write_coco

from fedjax_bn.data.sets.files import corruption_named

TABLE_3 = {
    "ClearHighway": {"weather": "clear", "scene": "highway"},
    "RainyHighway": {"weather": "rainy", "scene": "highway"},
    "CityStreet": {"scene": "city street"},
    "Residential": {"scene": "residential"},
}
SIGNS = ("traffic light", "traffic sign")
# Names of classes in the edition of 2020, and in that of 2018.
OTHER_NAMES = {
    **{"pedestrian": "person", "bike": "bicycle", "motor": "motorcycle"},
    **{"van": "car", "caravan": "car"},
}


def domain_of(attributes: Mapping[str, str], rule: str) -> str:
    """Returns the name of a frame's domain; "" for a frame in no domain."""
    if rule == "all":
        return "bdd100k"
    if rule != "table3":
        value = attributes.get(rule, "undefined").replace("/", " or ")
        return "" if value == "undefined" else value
    fitting = (name for name, values in TABLE_3.items() if values.items() <= attributes.items())
    return next(fitting, "")


def boxes_of(frame: Mapping[str, Any]) -> list[Box]:
    """Returns the boxes of a frame; lanes and areas have no "box2d"."""
    boxes = []
    for row in frame.get("labels") or ():
        if row.get("box2d"):
            x1, y1, x2, y2 = (float(row["box2d"][edge]) for edge in ("x1", "y1", "x2", "y2"))
            label = OTHER_NAMES.get(row["category"], row["category"])
            boxes.append(Box(label, (x1, y1, x2 + 1, y2 + 1)))
    return boxes


def convert(folder: Path, target: Path, rule: str, classes: tuple[str, ...]) -> None:
    """Writes a file for each part of each domain."""
    for part in ("train", "val"):
        label_file = folder / f"labels/det_20/det_{part}.json"
        if not label_file.is_file():
            label_file = folder / f"labels/bdd100k_labels_images_{part}.json"
        domains: dict[str, dict[Path, list[Box]]] = {}
        with corruption_named(label_file):
            for frame in json.loads(label_file.read_text("utf-8-sig")):
                if domain := domain_of(frame.get("attributes") or {}, rule):
                    image = folder / "images" / "100k" / part / Path(frame["name"]).name
                    domains.setdefault(domain, {})[image] = boxes_of(frame)
        for domain, labelled in sorted(domains.items()):
            write_coco(target / domain, part, labelled, classes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    rules = ("table3", "weather", "scene", "timeofday", "all")
    parser.add_argument("--by", choices=rules, default="table3")
    parser.add_argument("--signs", action="store_true", help="also traffic lights and signs")
    options = parser.parse_args()
    chosen = (*COMMON, *SIGNS) if options.signs else COMMON
    convert(options.folder, options.target, options.by, chosen)
