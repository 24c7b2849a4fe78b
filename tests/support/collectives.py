"""What devices exchange, read from the text of a compiled program."""

import re
from typing import NamedTuple

import numpy as np

_EXCHANGE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\((.*)"
)


class Collective(NamedTuple):
    """One instruction in which devices exchange arrays.

    Attributes:
      kind: such as "all-reduce".
      numbers: how many numbers it gives on a device.
      groups: the devices that exchange with each other, by their place in the mesh.
    """

    kind: str
    numbers: int
    groups: tuple[tuple[int, ...], ...]


def collectives(text: str, devices: int) -> list[Collective]:
    """All collectives of a program over so many devices."""
    found = _EXCHANGE.findall(text)
    return [Collective(kind, _numbers(form), _groups(rest, devices)) for form, kind, rest in found]


def over_rows(found: list[Collective], row: int) -> list[Collective]:
    """Those in which devices of different rows of the mesh exchange, with `row` devices a row."""
    return [one for one in found if any(len({d // row for d in g}) > 1 for g in one.groups)]


def _numbers(form: str) -> int:
    """How many numbers the shapes in a text have, such as 11 for (f32[], f32[2,5]{1,0})."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", form)
    return sum(int(np.prod([int(side) for side in shape.split(",") if side])) for shape in shapes)


# Explicit groups, groups of all devices in order, and groups along axes of a mesh of devices.
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(?:\{(?P<named>\}|\{.*?\}\})"
    r"|\[(?P<shape>[\d,]+)\]<=(?P<order>\[[\d,]+\](?:T\([\d,]+\))?)"
    r"|mesh\[(?P<axes>.*?)\](?:, device_ids=\((?P<ids>.*?\))\))? \{(?P<along>.*?)\})"
)


def _groups(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups that an instruction names: {{0,1},{2,3}}, [2,2]<=[4], mesh['a'=2,'b'=2] {'a'}."""
    found = _GROUPS.search(rest)
    assert found, rest
    if found["named"]:
        named = re.findall(r"\d[\d,]*", found["named"])
        return tuple(map(_whole, named)) or (tuple(range(devices)),)
    if found["shape"]:
        places = _in_order(found["order"], devices).reshape(_whole(found["shape"]))
    else:
        sides = dict(re.findall(r"'(\w+)'=(\d+)", found["axes"]))
        places = _in_order(found["ids"] or f"[{devices}]", devices)
        places = places.reshape([int(side) for side in sides.values()])
        along = [[*sides].index(axis) for axis in re.findall(r"'(\w+)'", found["along"])]
        places = np.moveaxis(places, along, range(-len(along), 0))
        places = places.reshape(-1, np.prod(places.shape[-len(along) :]))
    return tuple(map(tuple, places.tolist()))


def _in_order(text: str, devices: int) -> np.ndarray:
    """The devices in an order such as [4] or [2,2]T(1,0)."""
    sides, axes = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    places = np.arange(devices).reshape(_whole(sides))
    return places.transpose(_whole(axes)) if axes else places


def _whole(text: str) -> tuple[int, ...]:
    """The numbers of a text such as 2,3."""
    return tuple(map(int, text.split(",")))
