"""Samples of one's own in a NumPy archive: `.npz` with arrays of every domain.

    DOMAIN__images   u8[N, H, W, C], or f32[N, ...]     such as photo__images, photo__labels
    DOMAIN__labels   integers [N], counted from 0; or masks, integers or bools [N, H, W], with the
                     class of each pixel, 0 for the background and 255 for a pixel without a label

or, if a domain is divided, `DOMAIN__train_images` and `DOMAIN__train_labels`, and likewise
`validation` and `test`; these become its official parts. Optionally `classes`, str[C], names the
classes; without it they are 0 to the largest label. Bytes reach a model as (u8/255 - 0.5)/0.5,
floats unchanged; floats that hold bytes are refused. Shapes except for N, and dtypes, must be the
same in all domains.
`numpy.savez(path, photo__images=..., photo__labels=...)` writes such a file.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np

from fedjax_bn.arguments.text import short
from fedjax_bn.data.label_trees import MASK, PyTree, as_labels, has_masks, join
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.arrays import forms_in_npz, names_in_npz, read_npz
from fedjax_bn.data.source import PARTS, Pool, Source, check_source, numbered_names, parts_of
from fedjax_bn.engine.inputs import UNLABELLED, as_images, check_channels_last, check_image_dtype

_FORM = (
    "DOMAIN__images and DOMAIN__labels, or DOMAIN__PART_images and DOMAIN__PART_labels, PART of "
    f"{', '.join(PARTS)}"
)
_ARRAY = re.compile(rf"((.+)__(?:({'|'.join(PARTS)})_)?)(images|labels)", re.DOTALL)


class _Part(NamedTuple):
    """Samples of a part of a domain: images u8[N, H, W, C] or f32[N, ...], and their labels."""

    images: np.ndarray
    labels: PyTree


_Parts = dict[str, dict[str, _Part]]  # domain -> part -> samples; the part "" is the whole domain


def load(
    path: str | Path | None, *, domains: Sequence[str] = (), classes: Sequence[str] = ()
) -> Source:
    """Returns an archive as u8[N, H, W, C] or f32[N, ...], one pool per domain, in memory.

    Args:
      path: the file.
      domains: names, in that order; empty for all, in the file's order.
      classes: names in the order of the labels; the archive need not have all. Empty for the
        archive's own.

    Returns:
      Source "npz", with official parts if a domain is divided. Samples are named DOMAIN/NUMBER or
      DOMAIN/PART/NUMBER.
    """
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"data.path {path} is not a file; it must be a .npz with {_FORM}")
    path = Path(path)
    parts, own = read_archive(path, domains)
    forms = {
        f"{_prefix(name, part)}images": f"{one.images.dtype} {list(one.images.shape[1:])}"
        for name, there in parts.items()
        for part, one in there.items()
    }
    first, form = next(iter(forms.items()))
    if other := next((name for name in forms if forms[name] != form), ""):
        raise ValueError(
            f"{path}: {other} has samples {forms[other]}, but {first} has {form}; bring all "
            "domains to one form"
        )
    names = _classes(parts, own, classes, path)
    if classes:
        numbers = np.array([list(classes).index(name) for name in names], np.int32)
        parts = {
            domain: {
                part: one._replace(labels=_renumbered(one.labels, numbers))
                for part, one in there.items()
            }
            for domain, there in parts.items()
        }
        names = tuple(classes)
    pools = []
    for name, there in parts.items():
        sizes = {part: len(one.images) for part, one in there.items()}
        images = [one.images for one in there.values()]
        images = images[0] if len(images) == 1 else np.concatenate(images)
        labels = join([one.labels for one in there.values()])
        divided = None if "" in there else parts_of(sizes)
        pools.append(Pool(name, images, labels, numbered_names(name, sizes), divided))
    read = {f"{name.removesuffix('images')}{kind}.npy" for name in forms for kind in _Part._fields}
    with ZipFile(path) as archive:  # its checksums identify the content without reading it again
        members = [one for one in archive.infolist() if one.filename in read]
    key = hash_of(sorted((one.filename, one.CRC, one.file_size) for one in members))
    return check_source(Source("npz", names, tuple(pools), (0.5,), (0.5,), key=key))


def read_archive(path: Path, domains: Sequence[str] = ()) -> tuple[_Parts, tuple[str, ...]]:
    """Returns domain -> part -> (images, labels), and the names of an archive's classes, if any.

    The part "" means an undivided domain. Arguments and errors are those of `load`.
    """
    keys = names_in_npz(path)
    there = _parts_there([key for key in keys if key != "classes"], path)
    if unknown := [name for name in domains if name not in there]:
        raise ValueError(
            f"{path} has no domain {first_few(unknown)}; it has {first_few(list(there))}: choose "
            "data.domains of them"
        )
    wanted = [(name, part) for name in domains or there for part in there[name]]
    arrays = [f"{_prefix(*one)}{kind}" for one in wanted for kind in _Part._fields]
    arrays += {"classes"} & set(keys)
    forms = forms_in_npz(path, arrays)
    for one in wanted:  # checked before anything is unpacked
        _check_form(forms, _prefix(*one), path)
    content = read_npz(path, arrays)
    classes = content.get("classes", np.empty(0, np.str_))
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise ValueError(f"{path}: classes is {classes.dtype} {classes.shape}; it must be str [C]")
    if len(set(classes.tolist())) < len(classes):
        raise ValueError(f"{path}: classes has a name twice; each class needs its own")
    parts: _Parts = {}
    for name, part in wanted:
        prefix = f"{path}: {_prefix(name, part)}"
        images = as_images(content[f"{_prefix(name, part)}images"], f"{prefix}images")
        labels = as_labels(content[f"{_prefix(name, part)}labels"], f"{prefix}labels")
        if images.dtype != np.uint8 and not np.isfinite(images).all():
            place = tuple(np.argwhere(~np.isfinite(images))[0].tolist())
            raise ValueError(
                f"{prefix}images has {images[place]} at index {place}; numbers must be finite: "
                "drop the sample or impute it"
            )
        parts.setdefault(name, {})[part] = _Part(images, labels)
    labels = [one.labels for there in parts.values() for one in there.values()]
    kinds = set(map(has_masks, labels))
    if len(kinds) > 1:
        raise ValueError(
            f"{path} has masks for some samples and one class for others: give all the same"
        )
    if True in kinds and not any(_present(one).any() for one in labels):
        raise ValueError(
            f"{path}: no pixel of its masks has a region: number regions from 1, for {UNLABELLED} "
            "is a pixel without a label"
        )
    return parts, tuple(classes.tolist())


def _prefix(name: str, part: str) -> str:
    """Returns the prefix of a part's arrays."""
    return f"{name}__{part}_" if part else f"{name}__"


def _parts_there(keys: Sequence[str], path: Path) -> dict[str, list[str]]:
    """Returns the parts of each domain, from the names of all arrays but `classes`."""
    there: dict[str, list[str]] = {}
    for key in keys:
        match = _ARRAY.fullmatch(key)
        if not match:
            raise ValueError(f"{path} has an array {short(key)!r}; allowed are {_FORM}")
        prefix, name, part, kind = match.groups("")
        twin = "labels" if kind == "images" else "images"
        if f"{prefix}{twin}" not in keys:
            raise ValueError(f"{path} lacks the array {short(prefix)}{twin}; write it again")
        there.setdefault(name, [])
        there[name] += [part] * (part not in there[name])
    if not there:
        raise ValueError(f"{path} holds no arrays; it needs {_FORM}")
    for name, parts in there.items():
        if "" in parts and len(parts) > 1:
            raise ValueError(
                f"{path} has {short(name)!r} both whole ({short(name)}__images) and divided; leave "
                "one out"
            )
    return {name: [part for part in ("", *PARTS) if part in own] for name, own in there.items()}


def _check_form(forms: dict[str, np.ndarray], prefix: str, path: Path) -> None:
    """Raises ValueError unless a part's arrays have the shapes and dtypes of samples."""
    images, labels = (forms[f"{prefix}{kind}"] for kind in _Part._fields)
    place = f"{path}: {short(prefix)}images"
    check_image_dtype(images.dtype, place)
    check_channels_last(images.shape, place)
    if images.ndim < 2 or (images.dtype == np.uint8 and images.ndim != 4):
        raise ValueError(
            f"{place} is {images.dtype} {images.shape}; it must be uint8 [N, H, W, C], or floats "
            "[N, ...]"
        )
    if labels.ndim == 3 and labels.shape[1:] != images.shape[1:3]:
        raise ValueError(
            f"{path}: {short(prefix)}labels has masks of {list(labels.shape[1:])} pixels for "
            f"samples {list(images.shape[1:])}; give a mask of each image's size"
        )
    if labels.ndim in (1, 3) and len(images) != len(labels):
        raise ValueError(
            f"{path}: {short(prefix.rstrip('_'))} has {len(images)} images but {len(labels)} "
            "labels; every image needs one label"
        )
    if not len(images):
        raise ValueError(f"{place} is empty; give it samples or leave it out")


def _present(labels: PyTree) -> np.ndarray:
    """Returns the classes that labels have, rising."""
    if has_masks(labels):
        return np.flatnonzero(np.bincount(labels[MASK].ravel(), minlength=256)[:UNLABELLED])
    return np.unique(labels)


def _renumbered(labels: PyTree, numbers: np.ndarray) -> PyTree:
    """Returns labels with numbers i32[C] instead of the classes 0 to C - 1."""
    if not has_masks(labels):
        return numbers[labels]
    table = np.full(256, UNLABELLED, np.uint8)
    table[: len(numbers)] = numbers
    return {MASK: table[labels[MASK]]}


def _classes(
    parts: _Parts, names: tuple[str, ...], classes: Sequence[str], path: Path
) -> tuple[str, ...]:
    """Returns the names of an archive's labels 0, 1, ...; their numbers if it has no names.

    `names` are the archive's own, if any; its classes must be among `classes`, if any.
    """
    found = np.unique(
        np.concatenate([_present(one.labels) for own in parts.values() for one in own.values()])
    )
    last = int(found[-1])
    known = names or tuple(classes[: last + 1])
    if known and last >= len(known):
        there = f"`classes` names {len(names)}" if names else f"there are {len(known)} classes"
        raise ValueError(
            f"{path} has label {last}, but {there}, 0 to {len(known) - 1}; name all classes, or "
            "correct the labels"
        )
    if unknown := [name for name in known if classes and name not in classes]:
        raise ValueError(
            f"{path} has a class {short(unknown[0])!r}, which is not one of {first_few(classes)}: "
            "leave it out"
        )
    if not known and last >= len(found):
        absent = int(np.setdiff1d(np.arange(len(found) + 1), found)[0])
        raise ValueError(
            f"{path} has label {last}, but no sample of class {absent}; labels count from 0 "
            "without gaps: renumber them, or name all classes in an array `classes`, str [C]"
        )
    return known or tuple(map(str, found))
