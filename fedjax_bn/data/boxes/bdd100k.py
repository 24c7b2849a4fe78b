"""BDD100K's driving scenes (Yu et al., CVPR 2020), with domains by scene, weather or time of day.

    images/100k/{train,val}/NAME.jpg
    labels/det_20/det_{train,val}.json  or  labels/bdd100k_labels_images_{train,val}.json

Both editions of the labels are lists of frames {"name", "attributes": {"weather", "scene",
"timeofday"}, "labels": [{"category", "box2d": {"x1", "y1", "x2", "y2"}}]}; if both are there, the
edition of 2020 is read. The lanes and areas of 2018, which have no "box2d", are skipped. Corner
pixels belong to the box, so it ends at x2 + 1. A frame whose labels are missing or null has no
boxes.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import shown
from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.labelled import (
    COMMON,
    PARTS,
    Box,
    Labelled,
    Slips,
    bytes_of_name,
    entry,
    numbers_of,
    of_kind,
)
from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import Source

_LARGEST = 2**34  # bytes of labels, which are not all in memory at once
_CHUNK = 2**20  # characters that are read at a time
_LONGEST = 2**27  # characters of a frame; the longest of BDD100K has some hundred thousand
_SPACE = re.compile(r"[ \t\n\r]*")
CLASSES = (*COMMON, "traffic light", "traffic sign")
_OTHER_NAMES = {"pedestrian": "person", "bike": "bicycle", "motor": "motorcycle"}
_OTHER_NAMES |= {"van": "car", "caravan": "car"}
_IGNORED = ("other person", "other vehicle", "trailer")
_ATTRIBUTES = ("weather", "scene", "timeofday")
_FILES = ("labels/det_20/det_{}.json", "labels/bdd100k_labels_images_{}.json")
_WHERE = (
    "it must hold images/100k/{train,val}/*.jpg and labels/det_20/det_{train,val}.json or "
    "labels/bdd100k_labels_images_{train,val}.json (BDD100K, bdd-data.berkeley.edu, after "
    "registration)"
)
# FedCD, Table 3; we read CityStreet and Residential as any weather.
TABLE_3 = {
    "ClearHighway": {"weather": "clear", "scene": "highway"},
    "RainyHighway": {"weather": "rainy", "scene": "highway"},
    "CityStreet": {"scene": "city street"},
    "Residential": {"scene": "residential"},
}


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Returns frames as u8[N, image_size, image_size, 3] with boxes; parts are train and val.

    Frames in no domain are left out and counted.

    Args:
      domains: ("scene",), ("weather",), ("timeofday",) or two of these for all their pairs; or some
        of Table 3's, which are the default; or ("all",) for one domain.
      classes: of the ten; by default the eight that driving datasets share.
      path, image_size, **how: as in `own.load`, with its errors.
    """
    slips, squares = Slips(), Squares(image_size, **how)
    numbers = numbers_of(CLASSES, classes or COMMON, "BDD100K")
    frames = list_scenes(path, domains, slips, squares)
    return to_source("bdd100k", Path(path), frames, numbers, slips, squares)


def list_scenes(
    path: str | Path | None, domains: Sequence[str], slips: Slips, squares: Squares
) -> dict[str, list[Labelled]]:
    """Returns domain -> its frames; arguments are those of `load`."""
    del squares
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder of BDD100K: {_WHERE}")
    root, domain_of = Path(path), _rule(domains)
    found: dict[str, list[Labelled]] = {}
    for part in ("train", "val"):
        label_file = next((p for p in (root / f.format(part) for f in _FILES) if p.is_file()), None)
        if label_file is None:
            raise FileNotFoundError(f"{root / _FILES[0].format(part)} is missing: {_WHERE}")
        for row, frame in enumerate(_read_rows(label_file), 1):
            place = f"{label_file}, frame {row}"
            given = of_kind(frame, dict, place).get("attributes") or {}
            of_kind(given, dict, f"{place}: 'attributes'")
            there = [name for name in _ATTRIBUTES if name in given]
            domain = domain_of({name: entry(given, name, str, place) for name in there})
            if not domain:
                slips.add("frames that are in no domain left out")
                continue
            image = _read_frame(frame, place, root / "images" / "100k" / part, slips)
            found.setdefault(domain, []).append(image._replace(part=PARTS[part]))
    # Rules by attributes make a domain of every value found; chosen domains of Table 3 must exist.
    chosen = [d for d in domains if d in TABLE_3] or (sorted(found) if domains else list(TABLE_3))
    empty = [name for name in chosen if name not in found]
    if empty or not chosen:
        raise ValueError(f"{root} has no frames of {', '.join(empty) or 'any domain'}")
    return {name: found[name] for name in chosen}


def _rule(domains: Sequence[str]) -> Callable[[dict[str, str]], str]:
    """Returns `domain(attributes)`, the name of a frame's domain; "" for a frame in no domain."""
    if tuple(domains) == ("all",):
        return lambda attributes: "bdd100k"
    if domains and set(domains) <= set(_ATTRIBUTES) and len(set(domains)) == len(domains) <= 2:

        def by_attributes(attributes: dict[str, str]) -> str:
            values = [attributes.get(name, "undefined") for name in domains]
            return "" if "undefined" in values else " ".join(v.replace("/", " or ") for v in values)

        return by_attributes
    if any(name not in TABLE_3 for name in domains):
        raise ValueError(
            f"data.domains={tuple(domains)} is not a rule of BDD100K: give one or two of "
            f"{', '.join(_ATTRIBUTES)}, or some of {', '.join(TABLE_3)}, or all"
        )

    def by_table(attributes: dict[str, str]) -> str:
        for name in domains or TABLE_3:
            if TABLE_3[name].items() <= attributes.items():
                return name
        return ""

    return by_table


def _read_frame(frame: dict[str, Any], place: str, folder: Path, slips: Slips) -> Labelled:
    """Returns a frame with its boxes."""
    name = entry(frame, "name", str, place)
    length = bytes_of_name(name, f"{place}: 'name'")
    if Path(name).name != name or name in ("", ".", "..") or length > 255:
        raise ValueError(f"{place}: 'name' {shown(name[:60])!r} is not the name of a file")
    labels, boxes = frame.get("labels"), []
    if labels is None:
        slips.add("frames without labels, which have no boxes")
        labels = []
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
        else:
            edges = ("x1", "y1", "x2", "y2")
            x1, y1, x2, y2 = (entry(box, edge, float, f"{here}: 'box2d'") for edge in edges)
            if x2 >= x1 and y2 >= y1:  # else the box has no area, and `to_source` counts it
                x2, y2 = x2 + 1, y2 + 1
            boxes.append(Box(row, category, (x1, y1, x2, y2)))
    return Labelled(folder / name, f"{place} ({name})", boxes, name=f"bdd100k/{name}")


def _read_rows(path: Path) -> Iterator[Any]:
    """Yields the values of a JSON file that is one long list, without holding its whole text.

    BDD100K's labels of 2018 have 1.4 GB.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: the file is damaged, not a list, or a value is absurdly long.
    """
    decoder = json.JSONDecoder()
    # `mark` must precede the next value, and is expected at `at`.
    text, at, mark, ended, more = "", 0, "[", False, True
    with (
        corruption_named(path),
        open_regular(path, _LARGEST) as raw,
        TextIOWrapper(raw, "utf-8-sig") as file,
    ):
        while True:
            if more:
                left = text[at:]
                if len(left) > _LONGEST:
                    raise ValueError(f"a value of its list has over {_LONGEST:,} characters")
                # Reads as much as is left, so that a long value is parsed only a few times.
                new = file.read(max(_CHUNK, len(left)))
                text, at, ended = left + new, 0, not new
            first = _SPACE.match(text, at).end()
            start = _SPACE.match(text, first + 1).end()
            more = start == len(text) and not ended
            if more:
                continue
            found = text[first : first + 1]
            if found == "]" and mark == ",":
                if start < len(text):
                    raise ValueError("something follows its list")
                return
            if found != mark and mark == "[":
                raise ValueError("it must be a list")
            if found != mark:
                raise ValueError(f"a value of its list is followed by {found or 'nothing'!r}")
            if mark == "[" and text[start : start + 1] == "]":
                at, mark = start, ","
                continue
            try:
                value, end = decoder.raw_decode(text, start)
            except json.JSONDecodeError:  # the value may continue in the next chunk
                if ended:
                    raise
                more = True
                continue
            # A number that ends the text may continue in the next chunk, unless a comma follows.
            following = _SPACE.match(text, end).end()
            more = not ended and text[following : following + 1] not in (",", "]")
            if not more:
                at, mark = end, ","
                yield value
