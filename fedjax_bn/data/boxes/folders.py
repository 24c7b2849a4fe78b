"""Folders of images with boxes: what is a domain, and which files are in it."""

import os
from collections.abc import Sequence
from pathlib import Path

from fedjax_bn.data.boxes.labelled import part_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.folders import is_image, subfolders

# Folders that a set of images with boxes is made of, in small letters.
IMAGES = ("images", "jpegimages", "imgs")
LABELS = ("labels", "annotations", "xmls")
_INSIDE = (*IMAGES, *LABELS, "imagesets")


def domain_folders(path: Path, domains: Sequence[str], where: str) -> dict[str, Path]:
    """The folder of each domain: the folders in `path`, or `path` itself where it is one set.

    Args:
      path: the dataset's folder.
      domains: which ones, in that order; empty for all, by name.
      where: what must lie there, to end a sentence with.

    Raises:
      FileNotFoundError: there is no such folder, no domain, or not one that is asked for.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"data.path {path} is no folder: {where}")
    found = {one.name: one for one in subfolders(path) if not _is_inside(one.name)}
    if len(found) < len(subfolders(path)) or not found or _holds_labelled_images(path):
        found = {path.resolve().name: path}
    missing = [name for name in domains if name not in found]
    if missing:
        raise FileNotFoundError(
            f"data.domains names {first_few(missing)}, but data.path {path} has "
            f"{first_few(list(found))}: {where}"
        )
    return {name: found[name] for name in domains or found}


def _holds_labelled_images(folder: Path) -> bool:
    """Whether images lie in a folder itself, with labels beside them: a picture alone is no set."""
    files = [one for one in folder.iterdir() if one.is_file()]
    labels = {one.stem for one in files if one.suffix.lower() in (".txt", ".xml")}
    of_all = any(one.suffix.lower() == ".json" for one in files)
    return any(is_image(one.name) and (of_all or one.stem in labels) for one in files)


def _is_inside(name: str) -> bool:
    """Whether a folder of that name is part of a set, not a set of its own."""
    return name.lower() in _INSIDE or part_of([name]) is not None


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and below it by name, hidden ones left out; links lead on, but once."""
    found, seen = [], {os.path.realpath(folder)}
    for place, inner, names in os.walk(folder, followlinks=True):
        shown = sorted(name for name in inner if not name.startswith("."))
        real = {name: os.path.realpath(os.path.join(place, name)) for name in shown}
        inner[:] = [name for name in shown if real[name] not in seen]
        seen.update(real.values())
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def counterpart(file: Path, root: Path, old: Sequence[str], new: Sequence[str]) -> list[Path]:
    """Where the file beside another may lie, without suffix: the last folder `old` is then `new`.

    images/train/a.jpg -> labels/train/a; a file below none of `old` has its counterpart beside it.
    """
    parts = list(file.relative_to(root).with_suffix("").parts)
    places = [k for k, name in enumerate(parts[:-1]) if name.lower() in old]
    if not places:
        return [root.joinpath(*parts)]
    at = places[-1]
    return [root.joinpath(*parts[:at], name, *parts[at + 1 :]) for name in new]
