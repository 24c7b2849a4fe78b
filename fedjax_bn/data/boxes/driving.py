"""Cityscapes, Mapillary Vistas and BDD100K as three domains (FedCD, Table 2).

    cityscapes/...  vistas/...  bdd100k/...     each in its own form

Classes are the eight that all three have.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes import bdd100k, cityscapes, vistas
from fedjax_bn.data.boxes.assemble import Squares, to_source
from fedjax_bn.data.boxes.labelled import COMMON, Slips, numbers_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.source import Source

# domain -> its reader, and the domains that are read
_READERS = {
    "cityscapes": (cityscapes, ("cityscapes",)),
    "vistas": (vistas, ()),
    "bdd100k": (bdd100k, ("all",)),
}
DOMAINS = tuple(_READERS)


def load(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    **how: Any,
) -> Source:
    """Reads the scenes of all three as u8[N, image_size, image_size, 3] with their boxes.

    Args:
      path: the folder that holds theirs.
      domains: some of "cityscapes", "vistas" and "bdd100k"; empty for all.
      classes: of the eight; empty for all.
      image_size, **how: as in `own.load`, with its errors.
    """
    unknown = [name for name in domains if name not in _READERS]
    if unknown:
        raise ValueError(f"data.domains names {first_few(unknown)}; there are {', '.join(DOMAINS)}")
    if not path or not Path(path).is_dir():
        raise FileNotFoundError(
            f"data.path {path} is not a folder: it must hold {', '.join(DOMAINS)}, each as its own "
            "reader has it"
        )
    root, slips, squares = Path(path), Slips(), Squares(image_size, **how)
    numbers, scenes = numbers_of(COMMON, classes, "driving"), {}
    for name in domains or DOMAINS:
        reader, inner = _READERS[name]
        scenes |= reader.list_scenes(root / name, inner, slips, squares)
    return to_source("driving", root, scenes, numbers, slips, squares)
