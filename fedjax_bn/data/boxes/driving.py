"""Cityscapes, Mapillary Vistas and BDD100K as three domains (FedCD, Table 2).

    cityscapes/...  vistas/...  bdd100k/...     each in its own form

Classes are the eight that all three share. The first two can also be read alone:

    Cityscapes (Cordts et al., CVPR 2016), and its foggy version (Sakaridis et al., IJCV 2018)
      leftImg8bit/{train,val}/CITY/CITY_SEQ_FRAME_leftImg8bit.png
      leftImg8bit_foggy/{train,val}/CITY/CITY_SEQ_FRAME_leftImg8bit_foggy_beta_0.02.png
      gtFine/{train,val}/CITY/CITY_SEQ_FRAME_gtFine_instanceIds.png or _polygons.json
    Mapillary Vistas (Neuhold et al., ICCV 2017; CC BY-NC-SA), versions 1.2 and 2.0
      {training,validation}/images/*.jpg
      {training,validation}/instances/*.png, config_v1.2.json
      or {training,validation}/v2.0/instances/*.png, config_v2.0.json

Boxes enclose the instances' pixels (class * 1000 + number in Cityscapes, class * 256 + number in
Vistas), or, without a PNG, Cityscapes' polygons, including parts that later polygons hide. Groups
are crowds: "persongroup" or an id without number in Cityscapes; in Vistas 2.0 groups of people,
unless the config denies them instances. Clear and foggy images of one scene have one name, so that
no split separates them.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes import bdd100k
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
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.folders import list_files
from fedjax_bn.data.source import Source

_Scenes = dict[str, list[Labelled]]
DOMAINS = ("cityscapes", "vistas", "bdd100k")
# number of a class in Cityscapes' PNGs -> its number in COMMON
_IDS = {24: 0, 25: 1, 26: 2, 27: 3, 28: 4, 31: 5, 32: 6, 33: 7}
# domain of Cityscapes -> its images' folder, and the end of their names
_WEATHERS = {
    "cityscapes": ("leftImg8bit", "_leftImg8bit.png"),
    "foggy": ("leftImg8bit_foggy", "_leftImg8bit_foggy_beta_0.02.png"),
}
_ENDS = ("_gtFine_instanceIds.png", "_gtFine_polygons.json")
_CITYSCAPES = (
    "it must hold leftImg8bit (or leftImg8bit_foggy) and gtFine, each with train and val of "
    "CITY/*.png (Cityscapes, cityscapes-dataset.com, after registration)"
)
_NAMES = {
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
_GROUP = "human--person--person-group"  # of version 2.0
_VERSIONS = (("config_v2.0.json", "v2.0/instances"), ("config_v1.2.json", "instances"))
_VISTAS = (
    "it must hold training and validation, each with images/*.jpg and instances/*.png, and "
    "config_v1.2.json; or v2.0/instances/*.png and config_v2.0.json (Mapillary Vistas, "
    "mapillary.com/dataset/vistas, after registration)"
)


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Returns the scenes of all three as u8[N, image_size, image_size, 3] with their boxes.

    Args:
      path: the folder that holds the three datasets' folders.
      domains: some of "cityscapes", "vistas" and "bdd100k"; empty for all.
      classes: of the eight; empty for all.
      image_size, **how: as in `own.load`, with its errors.
    """
    return _load("driving", "driving", _all_three, path, image_size, domains, classes, how)


def load_cityscapes(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Returns Cityscapes as u8[N, image_size, image_size, 3] with boxes; parts are train and val.

    Args:
      domains: "cityscapes", "foggy" (at attenuation 0.02) or both; empty for all that are there.
      classes: of the eight; empty for all.
      path, image_size, **how: as in `own.load`, with its errors.
    """
    about = "cityscapes", "Cityscapes", _list_cityscapes
    return _load(*about, path, image_size, domains, classes, how)


def load_vistas(
    path: str | Path | None, *, image_size: int, classes: Sequence[str] = (), **how: Any
) -> Source:
    """Returns Vistas as u8[N, image_size, image_size, 3] with boxes: one domain with two parts.

    Args:
      classes: of the eight; empty for all.
      path, image_size, **how: as in `own.load`, with its errors.
    """
    about = "vistas", "Mapillary Vistas", _list_vistas
    return _load(*about, path, image_size, (), classes, how)


def _load(
    name: str,
    title: str,
    list_scenes: Callable[[str | Path | None, Sequence[str], Slips, Squares], _Scenes],
    path: str | Path | None,
    image_size: int,
    domains: Sequence[str],
    classes: Sequence[str],
    how: dict[str, Any],
) -> Source:
    """Returns the source of the scenes that `list_scenes` gives for each domain."""
    slips, squares = Slips(), Squares(image_size, **how)
    numbers = numbers_of(COMMON, classes, title)
    scenes = list_scenes(path, domains, slips, squares)
    return to_source(name, Path(path), scenes, numbers, slips, squares)


def _all_three(
    path: str | Path | None, domains: Sequence[str], slips: Slips, squares: Squares
) -> _Scenes:
    """Returns the scenes of the chosen data sets, each with all its images in one domain."""
    if unknown := [name for name in domains if name not in DOMAINS]:
        raise ValueError(f"data.domains names {first_few(unknown)}; there are {', '.join(DOMAINS)}")
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(
            f"data.path {path} is not a folder: it must hold {', '.join(DOMAINS)}, each as its own "
            "reader has it"
        )
    readers = {
        "cityscapes": (_list_cityscapes, ("cityscapes",)),
        "vistas": (_list_vistas, ()),
        "bdd100k": (bdd100k.list_scenes, ("all",)),
    }
    scenes: _Scenes = {}
    for name in domains or DOMAINS:
        list_scenes, inner = readers[name]
        scenes |= list_scenes(Path(path, name), inner, slips, squares)
    return scenes


def _list_cityscapes(
    path: str | Path | None, domains: Sequence[str], slips: Slips, squares: Squares
) -> _Scenes:
    """Returns the scenes of Cityscapes by domain and file."""
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder of Cityscapes: {_CITYSCAPES}")
    root = Path(path)
    if unknown := [name for name in domains if name not in _WEATHERS]:
        raise ValueError(
            f"data.domains names {unknown[0]!r}; Cityscapes has {', '.join(_WEATHERS)}"
        )

    def class_of(value: int) -> int:
        """Returns the class of an instance, the crowd of a group, or -1."""
        return crowd(_IDS[value]) if value in _IDS else _IDS.get(value // 1000, PADDING)

    # The cache's name holds the meaning of the pixels.
    name, found = f"cityscapes-{'-'.join(map(str, sorted(_IDS.items())))}", {}
    for domain in domains or [d for d, (inner, _) in _WEATHERS.items() if (root / inner).is_dir()]:
        folder, end = _WEATHERS[domain]
        scenes, instances = [], []
        for part in ("train", "val"):
            for image in sorted((root / folder / part).glob(f"[!.]*/[!.]*{end}")):
                scene = image.name.removesuffix(end)
                place = root / "gtFine" / part / image.parent.name
                labels = [place / f"{scene}{one}" for one in _ENDS]
                label = next((one for one in labels if one.is_file()), None)
                if label is None:
                    raise FileNotFoundError(f"{labels[0]} is missing: {_CITYSCAPES}")
                one = Labelled(image, str(label), part=PARTS[part], name=scene)
                if label.suffix == ".png":
                    instances.append(one)
                else:
                    scenes.append(_read_polygons(one))
        if instances:
            scenes += with_instances(instances, class_of, squares, slips, root, name)
        found[domain] = sorted(scenes, key=lambda one: one.file)
    empty = [domain for domain, scenes in found.items() if not scenes]
    if empty or not found:
        raise FileNotFoundError(
            f"{root} has no images of {', '.join(empty) or 'any'}: {_CITYSCAPES}"
        )
    return found


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


def _list_vistas(
    path: str | Path | None, domains: Sequence[str], slips: Slips, squares: Squares
) -> _Scenes:
    """Returns {"vistas": the labelled images}; there are no domains to choose."""
    del domains
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder of Mapillary Vistas: {_VISTAS}")
    root = Path(path)
    there = [(root / name, inner) for name, inner in _VERSIONS if (root / name).is_file()]
    if not there:
        raise FileNotFoundError(f"{root / _VERSIONS[0][0]} is missing: {_VISTAS}")
    config, inner = there[0]
    by_value = {}  # number of a class in the PNGs -> its number, see `with_instances`
    for value, one in enumerate(entry(read_json(config), "labels", list, str(config))):
        label = entry(one, "name", str, f"{config}, labels, row {value + 1}")
        if label in _NAMES:
            by_value[value] = COMMON.index(_NAMES[label])
        elif label == _GROUP and one.get("instances", True):
            by_value[value] = crowd(COMMON.index("person"))
    if not by_value:
        raise ValueError(f"{config} names no class of people or vehicles; fetch it again")
    scenes = []
    for part in ("training", "validation"):
        for image in list_files(root / part / "images")[0]:
            label = root / part / inner / f"{image.stem}.png"
            if not label.is_file():
                raise FileNotFoundError(f"{label} is missing: {_VISTAS}")
            scenes.append(Labelled(image, str(label), part=PARTS[part]))
    if not scenes:
        raise FileNotFoundError(f"{root} has no images: {_VISTAS}")
    # The cache's name holds the meaning of the pixels, which differs between configs.
    name = f"vistas-{'-'.join(map(str, sorted(by_value.items())))}"
    class_of = lambda value: by_value.get(value // 256, PADDING)  # noqa: E731
    return {"vistas": with_instances(scenes, class_of, squares, slips, root, name)}
