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
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.assemble import Squares, to_source, with_instances
from fedjax_bn.data.boxes.labelled import (
    COMMON,
    PARTS,
    Box,
    Labelled,
    Slips,
    entry,
    numbers_of,
    of_kind,
    read_json,
)
from fedjax_bn.data.label_trees import PADDING, crowd
from fedjax_bn.data.source import Source

# number of a class in the PNGs -> its number in COMMON
_IDS = {24: 0, 25: 1, 26: 2, 27: 3, 28: 4, 31: 5, 32: 6, 33: 7}
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
    """Reads scenes as u8[N, image_size, image_size, 3] with their boxes; train and val are parts.

    Args:
      domains: "cityscapes", "foggy" (at attenuation 0.02) or both; empty for those that are there.
      classes: of the eight; empty for all.
      path, image_size, **how: as in `own.load`, with its errors.
    """
    slips, squares = Slips(), Squares(image_size, **how)
    numbers = numbers_of(COMMON, classes, "Cityscapes")
    scenes = list_scenes(path, domains, slips, squares)
    return to_source("cityscapes", Path(path), scenes, numbers, slips, squares)


def list_scenes(
    path: str | Path | None, domains: Sequence[str], slips: Slips, squares: Squares
) -> dict[str, list[Labelled]]:
    """Returns domain -> its scenes, by name; arguments as of `load`."""
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder of Cityscapes: {_WHERE}")
    root = Path(path)
    unknown = [name for name in domains if name not in _DOMAINS]
    if unknown:
        raise ValueError(f"data.domains names {unknown[0]!r}; Cityscapes has {', '.join(_DOMAINS)}")
    chosen = domains or [name for name, (folder, _) in _DOMAINS.items() if (root / folder).is_dir()]

    def class_of(value: int) -> int:
        """Returns the class of an instance, of a group of some, or -1."""
        return crowd(_IDS[value]) if value in _IDS else _IDS.get(value // 1000, PADDING)

    # The cache is found by what pixels mean.
    name, found = f"cityscapes-{'-'.join(map(str, sorted(_IDS.items())))}", {}
    for domain in chosen:
        instances, polygons = _files_of(root, domain)
        scenes = [_read_polygons(one) for one in polygons]
        if instances:
            scenes += with_instances(instances, class_of, squares, slips, root, name)
        found[domain] = sorted(scenes, key=lambda one: one.file)
    empty = [domain for domain, scenes in found.items() if not scenes]
    if empty or not found:
        raise FileNotFoundError(f"{root} has no images of {', '.join(empty) or 'any'}: {_WHERE}")
    return found


def _files_of(root: Path, domain: str) -> tuple[list[Labelled], list[Labelled]]:
    """Returns the images of a domain without boxes: those labelled by instances, by polygons."""
    folder, end = _DOMAINS[domain]
    instances, polygons = [], []
    for part in ("train", "val"):
        for image in sorted((root / folder / part).glob(f"*/*{end}")):
            scene = image.name.removesuffix(end)
            place = root / "gtFine" / part / image.parent.name
            label = next((p for p in (place / f"{scene}{e}" for e in _ENDS) if p.is_file()), None)
            if label is None:
                raise FileNotFoundError(f"{place / scene}{_ENDS[0]} is missing: {_WHERE}")
            one = Labelled(image, str(label), part=PARTS[part], name=scene)
            (instances if label.suffix == ".png" else polygons).append(one)
    return instances, polygons


def _read_polygons(one: Labelled) -> Labelled:
    """Returns the image with the boxes of its polygons [[x, y], ...]."""
    content = read_json(Path(one.place))
    size = tuple(entry(content, key, int, one.place) for key in ("imgWidth", "imgHeight"))
    boxes = []
    for row, each in enumerate(entry(content, "objects", list, one.place), 1):
        place = f"{one.place}, row {row}"
        label = entry(each, "label", str, place)
        single = label.removesuffix("group")
        if single not in COMMON:
            continue
        polygon = entry(each, "polygon", list, place)
        if not polygon or not all(isinstance(point, list) and len(point) == 2 for point in polygon):
            raise ValueError(f"{place}: 'polygon' must be a list of [x, y]")
        points = [[of_kind(value, float, f"{place}: 'polygon'") for value in p] for p in polygon]
        across, down = zip(*points, strict=True)
        if not all(map(math.isfinite, (*across, *down))):  # `min` may pass over NaN
            raise ValueError(
                f"{place}: 'polygon' has a number that is not finite: correct or remove it"
            )
        corners = (min(across), min(down), max(across), max(down))
        boxes.append(Box(row, single, corners, crowd=label != single))
    return one._replace(boxes=boxes, size=size)
