"""BDD100K's driving scenes (Yu et al., CVPR 2020), with domains by scene, weather or time of day.

    images/100k/{train,val}/NAME.jpg
    labels/det_20/det_{train,val}.json  or  labels/bdd100k_labels_images_{train,val}.json

Both editions of the labels are lists of frames {"name", "attributes": {"weather", "scene",
"timeofday"}, "labels": [{"category", "box2d": {"x1", "y1", "x2", "y2"}}]}; that of 2020 goes first,
and lanes and areas of that of 2018, which have no "box2d", are skipped. Corners are included, so a
box ends at x2 + 1. A frame whose labels are missing or null has no boxes.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import shown
from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.json_rows import read_rows
from fedjax_bn.data.boxes.labelled import COMMON, PARTS, Labelled, Slips, numbers_of
from fedjax_bn.data.boxes.parsing import entry, number, of_kind
from fedjax_bn.data.source import Source

CLASSES = (*COMMON, "traffic light", "traffic sign")
_OTHER_NAMES = {
    "pedestrian": "person",
    "bike": "bicycle",
    "motor": "motorcycle",
    "van": "car",
    "caravan": "car",
}
_IGNORED = ("other person", "other vehicle", "trailer")
_ATTRIBUTES = ("weather", "scene", "timeofday")
_FILES = ("labels/det_20/det_{}.json", "labels/bdd100k_labels_images_{}.json")
_WHERE = (
    "it must hold images/100k/{train,val}/*.jpg and labels/det_20/det_{train,val}.json or "
    "labels/bdd100k_labels_images_{train,val}.json (BDD100K, bdd-data.berkeley.edu, after "
    "registration)"
)
# FedCD, Table 3; that CityStreet and Residential are of any weather is our reading.
TABLE_3 = {
    "ClearHighway": {"weather": "clear", "scene": "highway"},
    "RainyHighway": {"weather": "rainy", "scene": "highway"},
    "CityStreet": {"scene": "city street"},
    "Residential": {"scene": "residential"},
}
_Rule = Callable[[dict[str, str]], str]


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Frames as u8[N, image_size, image_size, 3] with their boxes; train and val are its parts.

    Args:
      path: the folder of images and labels.
      image_size: pixels a side of the squares.
      domains: ("scene",), ("weather",), ("timeofday",) or two of these for all their pairs; or some
        of Table 3's, which are the default; or ("all",) for one domain.
      classes: of the ten; by default the eight that driving datasets share.
      **how: as in `own.load`.

    Returns:
      Source "bdd100k"; frames that are in no domain are left out, and counted.

    Raises:
      FileNotFoundError, ValueError, OSError: as `own.load`.
    """
    slips, classes = Slips(), tuple(classes) or COMMON
    images = list_frames(path, domains, classes, slips)
    return to_source("bdd100k", Path(path), images, classes, slips, Squares(image_size, **how))


def list_frames(
    path: str | Path | None, domains: Sequence[str], classes: Sequence[str], slips: Slips
) -> dict[str, list[Labelled]]:
    """Domain -> its frames; arguments as of `load`."""
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is no folder of BDD100K: {_WHERE}")
    root, rule = Path(path), _rule(domains)
    numbers = numbers_of(CLASSES, classes, "BDD100K")
    found: dict[str, list[Labelled]] = {}
    for part in ("train", "val"):
        label_file = next((p for p in (root / f.format(part) for f in _FILES) if p.is_file()), None)
        if label_file is None:
            raise FileNotFoundError(f"{root / _FILES[0].format(part)} is missing: {_WHERE}")
        for row, frame in enumerate(read_rows(label_file), 1):
            place = f"{label_file}, frame {row}"
            domain = rule(_attributes(frame, place))
            if not domain:
                slips.add("frames that are in no domain left out")
                continue
            image = _read_frame(frame, place, root / "images" / "100k" / part, numbers, slips)
            found.setdefault(domain, []).append(image._replace(part=PARTS[part]))
    chosen = [d for d in domains if d in TABLE_3] or (sorted(found) if domains else list(TABLE_3))
    empty = [name for name in chosen if name not in found]
    if empty or not chosen:
        raise ValueError(f"{root} has no frames of {', '.join(empty) or 'any domain'}")
    return {name: found[name] for name in chosen}


def _rule(domains: Sequence[str]) -> _Rule:
    """Returns `domain(attributes)`; empty for none."""
    if tuple(domains) == ("all",):
        return lambda attributes: "bdd100k"
    if domains and set(domains) <= set(_ATTRIBUTES) and len(set(domains)) == len(domains) <= 2:

        def by_attributes(attributes: dict[str, str]) -> str:
            values = [attributes.get(name, "undefined") for name in domains]
            return "" if "undefined" in values else " ".join(v.replace("/", " or ") for v in values)

        return by_attributes
    unknown = [name for name in domains if name not in TABLE_3]
    if unknown:
        raise ValueError(
            f"data.domains={tuple(domains)} is none of BDD100K's rules: give one or two of "
            f"{', '.join(_ATTRIBUTES)}, or some of {', '.join(TABLE_3)}, or all"
        )
    wanted = {name: TABLE_3[name] for name in domains or TABLE_3}

    def of_table(attributes: dict[str, str]) -> str:
        for name, values in wanted.items():
            if all(attributes.get(key) == value for key, value in values.items()):
                return name
        return ""

    return of_table


def _attributes(frame: Any, place: str) -> dict[str, str]:
    given = of_kind(frame, dict, place).get("attributes") or {}
    of_kind(given, dict, f"{place}: 'attributes'")
    return {name: entry(given, name, str, place) for name in _ATTRIBUTES if name in given}


def _read_frame(
    frame: dict[str, Any], place: str, folder: Path, numbers: dict[str, int], slips: Slips
) -> Labelled:
    name = entry(frame, "name", str, place)
    if Path(name).name != name or name in ("", ".", "..") or not 0 < len(os.fsencode(name)) < 256:
        raise ValueError(f"{place}: 'name' {shown(name[:60])!r} is no file's name")
    labels = frame.get("labels")
    if labels is None:
        slips.add("frames without labels, which have no boxes")
    rows, classes, corners = [], [], []
    labels = [] if labels is None else labels
    for row, one in enumerate(of_kind(labels, list, f"{place}: 'labels'"), 1):
        here = f"{place}, label {row}"
        box = of_kind(one, dict, here).get("box2d")
        if box is None:
            continue  # a lane or an area
        category = entry(one, "category", str, here)
        category = _OTHER_NAMES.get(category, category)
        if category in _IGNORED:
            slips.add(f"boxes of {', '.join(_IGNORED)} left out")
        elif category not in CLASSES:
            raise ValueError(
                f"{here} is of category {shown(category[:40])!r}, which BDD100K does not have"
            )
        elif category not in numbers:
            slips.add("boxes of classes that data.classes does not name left out")
        else:
            of_kind(box, dict, f"{here}: 'box2d'")
            if not {"x1", "y1", "x2", "y2"} <= set(box):
                raise ValueError(f"{here}: 'box2d' must have x1, y1, x2 and y2")
            x1, y1, x2, y2 = (
                number(box[key], f"{here}: {key}") for key in ("x1", "y1", "x2", "y2")
            )
            rows.append(row)
            classes.append(numbers[category])
            corners.append((x1, y1, x2 + 1, y2 + 1) if x2 >= x1 and y2 >= y1 else (x1, y1, x2, y2))
    file = folder / name
    return Labelled(file, f"{place} ({name})", classes, corners, rows, name=f"bdd100k/{name}")
