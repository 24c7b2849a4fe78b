"""Mapillary Vistas (Neuhold et al., ICCV 2017), versions 1.2 and 2.0.

    {training,validation}/images/*.jpg
    {training,validation}/instances/*.png, config_v1.2.json  or  .../v2.0/instances/*.png,
    config_v2.0.json

A pixel of an instance PNG is class * 256 + number, with the classes of the config. Version 2.0 has
groups of people too, crowds where the config says that they have instances. Licence of the data: CC
BY-NC-SA.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.assemble import Squares, to_source, with_instances
from fedjax_bn.data.boxes.labelled import (
    COMMON,
    PARTS,
    Labelled,
    Slips,
    entry,
    numbers_of,
    read_json,
)
from fedjax_bn.data.label_trees import PADDING, crowd
from fedjax_bn.data.sets.folders import list_files
from fedjax_bn.data.source import Source

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
_WHERE = (
    "it must hold training and validation, each with images/*.jpg and instances/*.png, and "
    "config_v1.2.json; or v2.0/instances/*.png and config_v2.0.json (Mapillary Vistas, "
    "mapillary.com/dataset/vistas, after registration)"
)


def load(
    path: str | Path | None, *, image_size: int, classes: Sequence[str] = (), **how: Any
) -> Source:
    """Reads scenes as u8[N, image_size, image_size, 3] with their boxes: one domain, two parts.

    Args:
      classes: of the eight; empty for all.
      path, image_size, **how: as in `own.load`, with its errors.
    """
    slips, squares = Slips(), Squares(image_size, **how)
    numbers = numbers_of(COMMON, classes, "Mapillary Vistas")
    scenes = list_scenes(path, (), slips, squares)
    return to_source("vistas", Path(path), scenes, numbers, slips, squares)


def list_scenes(
    path: str | Path | None, domains: Sequence[str], slips: Slips, squares: Squares
) -> dict[str, list[Labelled]]:
    """Returns {"vistas": the labelled images}; arguments as of `load`, there are no domains."""
    del domains
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(f"data.path {path} is not a folder of Mapillary Vistas: {_WHERE}")
    root = Path(path)
    there = [(root / name, inner) for name, inner in _VERSIONS if (root / name).is_file()]
    if not there:
        raise FileNotFoundError(f"{root / _VERSIONS[0][0]} is missing: {_WHERE}")
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
                raise FileNotFoundError(f"{label} is missing: {_WHERE}")
            scenes.append(Labelled(image, str(label), part=PARTS[part]))
    if not scenes:
        raise FileNotFoundError(f"{root} has no images: {_WHERE}")
    # The cache is found by what pixels mean, which differs between configs.
    name = f"vistas-{'-'.join(map(str, sorted(by_value.items())))}"
    class_of = lambda value: by_value.get(value // 256, PADDING)  # noqa: E731
    return {"vistas": with_instances(scenes, class_of, squares, slips, root, name)}
