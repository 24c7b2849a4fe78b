"""Cityscapes (Cordts et al., CVPR 2016), and its foggy version (Sakaridis et al., IJCV 2018).

    leftImg8bit/{train,val}/CITY/CITY_SEQ_FRAME_leftImg8bit.png
    leftImg8bit_foggy/{train,val}/CITY/CITY_SEQ_FRAME_leftImg8bit_foggy_beta_0.02.png
    gtFine/{train,val}/CITY/CITY_SEQ_FRAME_gtFine_instanceIds.png or _polygons.json

Boxes are those of the instances' pixels (id * 1000 + number), or else of the polygons, of which
later ones hide parts. Groups ("persongroup", or an id without number) are crowds. Clear and foggy
images of one scene have one name, so that no split separates them.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.instances import read_all, with_instances
from fedjax_bn.data.boxes.labelled import COMMON, CROWDS, PARTS, Labelled, Slips, numbers_of
from fedjax_bn.data.boxes.parsing import entry, number, read_json
from fedjax_bn.data.label_trees import PADDING, crowd
from fedjax_bn.data.source import Source

_IDS = {24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train", 32: "motorcycle"}
_IDS[33] = "bicycle"
# domain -> the folder of its images, and the end of their names
_DOMAINS = {
    "cityscapes": ("leftImg8bit", "_leftImg8bit.png"),
    "foggy": ("leftImg8bit_foggy", "_leftImg8bit_foggy_beta_0.02.png"),
}
_ENDS = ("_gtFine_instanceIds.png", "_gtFine_polygons.json")
_WHERE = (
    "it must hold leftImg8bit (or leftImg8bit_foggy) and gtFine, each with train and val of "
    "CITY/*.png (Cityscapes, cityscapes-dataset.com, after registration)"
)


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Scenes as u8[N, image_size, image_size, 3] with their boxes; train and val are its parts.

    Args:
      path: the folder of images and labels.
      image_size: pixels a side of the squares.
      domains: "cityscapes", "foggy" (at attenuation 0.02) or both; empty for those that are there.
      classes: of the eight; empty for all.
      **how: as in `own.load`.

    Returns:
      Source "cityscapes".

    Raises:
      FileNotFoundError, ValueError, OSError: as `own.load`.
    """
    slips, classes = Slips(), tuple(classes) or COMMON
    squares = Squares(image_size, **how)
    scenes = list_scenes(path, domains, classes, slips, squares)
    return to_source("cityscapes", Path(path), scenes, classes, slips, squares)


def list_scenes(
    path: str | Path | None,
    domains: Sequence[str],
    classes: Sequence[str],
    slips: Slips,
    squares: Squares,
) -> dict[str, list[Labelled]]:
    """Domain -> its scenes; arguments as of `load`."""
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is no folder of Cityscapes: {_WHERE}")
    root, numbers = Path(path), numbers_of(COMMON, classes, "Cityscapes")
    unknown = [name for name in domains if name not in _DOMAINS]
    if unknown:
        raise ValueError(f"data.domains names {unknown[0]!r}; Cityscapes has {', '.join(_DOMAINS)}")
    chosen = domains or [name for name, (folder, _) in _DOMAINS.items() if (root / folder).is_dir()]
    found = {name: _list_domain(root, name, numbers, slips, squares) for name in chosen}
    empty = [name for name, scenes in found.items() if not scenes]
    if empty or not found:
        raise FileNotFoundError(f"{root} has no images of {', '.join(empty) or 'any'}: {_WHERE}")
    return found


def _list_domain(
    root: Path, domain: str, numbers: dict[str, int], slips: Slips, squares: Squares
) -> list[Labelled]:
    """The labelled images of a domain, by name."""
    folder, end = _DOMAINS[domain]
    scenes, instances, polygons = [], [], []
    for part in ("train", "val"):
        for image in sorted((root / folder / part).glob(f"*/*{end}")):
            scene = image.name.removesuffix(end)
            place = root / "gtFine" / part / image.parent.name
            label = next((p for p in (place / f"{scene}{e}" for e in _ENDS) if p.is_file()), None)
            if label is None:
                raise FileNotFoundError(f"{place / scene}{_ENDS[0]} is missing: {_WHERE}")
            one = Labelled(image, str(label), (), (), (), part=PARTS[part], name=scene)
            (instances if label.suffix == ".png" else polygons).append((label, one))
    ids = {number: numbers[name] for number, name in _IDS.items() if name in numbers}
    if instances:
        files = [label for label, _ in instances]
        digest = f"cityscapes-{'-'.join(map(str, sorted(ids.items())))}"
        boxes = read_all(files, partial(_class_of, ids), squares, root=root, name=digest)
        for (_, one), found in zip(instances, boxes, strict=True):
            scenes.append(with_instances(one, found, slips))
    scenes += [_read_polygons(label, one, numbers, slips) for label, one in polygons]
    return sorted(scenes, key=lambda one: one.file)


def _class_of(ids: dict[int, int], value: int) -> int:
    """The class of an instance, of a group of some, or none."""
    if value in ids:
        return crowd(ids[value])
    return ids.get(value // 1000, PADDING)


def _read_polygons(path: Path, one: Labelled, numbers: dict[str, int], slips: Slips) -> Labelled:
    content = read_json(path)
    size = tuple(entry(content, key, int, str(path)) for key in ("imgWidth", "imgHeight"))
    rows, classes, corners = [], [], []
    for row, each in enumerate(entry(content, "objects", list, str(path)), 1):
        place = f"{path}, row {row}"
        label = entry(each, "label", str, place)
        single = label.removesuffix("group")
        if single in numbers:
            rows.append(row)
            classes.append(numbers[single] if label == single else crowd(numbers[single]))
            if label != single:
                slips.add(CROWDS)
            corners.append(_extent(entry(each, "polygon", list, place), place))
    return one._replace(classes=classes, corners=corners, rows=rows, size=size)


def _extent(polygon: list[Any], place: str) -> tuple[float, ...]:
    """The box of a polygon [[x, y], ...]."""
    if not polygon or not all(isinstance(point, list) and len(point) == 2 for point in polygon):
        raise ValueError(f"{place}: 'polygon' must be a list of [x, y]")
    points = [[number(value, f"{place}: 'polygon'") for value in point] for point in polygon]
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError(
            f"{place}: 'polygon' has a number that is not finite: correct or remove it"
        )
    across, down = zip(*points, strict=True)
    return min(across), min(down), max(across), max(down)
