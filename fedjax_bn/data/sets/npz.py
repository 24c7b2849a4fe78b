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

from fedjax_bn.data.label_trees import MASK, PyTree, as_labels, has_masks, join
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.data.source import PARTS, Pool, Source, check_source, numbered_names, parts_of
from fedjax_bn.engine.inputs import UNLABELLED, as_images

_FORM = (
    "DOMAIN__images and DOMAIN__labels, or DOMAIN__PART_images and DOMAIN__PART_labels, PART of "
    f"{', '.join(PARTS)}"
)
_ARRAY = re.compile(rf"(.+)__(?:({'|'.join(PARTS)})_)?(?:images|labels)", re.DOTALL)


class Samples(NamedTuple):
    """Samples of a part of a domain: images u8[N, H, W, C] or f32[N, ...], and their labels."""

    images: np.ndarray
    labels: PyTree


# domain -> part -> samples; the part "" is the whole domain
_Parts = dict[str, dict[str, Samples]]


def load_npz(
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

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged or in another form, or has no such domain or class.
    """
    parts, class_names = read_archive(path, domains)
    path = Path(path)
    class_names = _class_names(parts, class_names, classes, path)
    if classes:
        numbers = np.array([list(classes).index(name) for name in class_names], np.int32)
        parts = {
            domain: {
                part: samples._replace(labels=_renumbered(samples.labels, numbers))
                for part, samples in domain_parts.items()
            }
            for domain, domain_parts in parts.items()
        }
        class_names = tuple(classes)
    pools = []
    for name, domain_parts in parts.items():
        sizes = {part: len(samples.images) for part, samples in domain_parts.items()}
        images = [samples.images for samples in domain_parts.values()]
        images = images[0] if len(images) == 1 else np.concatenate(images)
        labels = join([samples.labels for samples in domain_parts.values()])
        official = None if "" in domain_parts else parts_of(sizes)
        pools.append(Pool(name, images, labels, numbered_names(name, sizes), official))
    arrays = {
        f"{_prefix(name, part)}{kind}.npy"
        for name, domain_parts in parts.items()
        for part in domain_parts
        for kind in Samples._fields
    }
    with ZipFile(path) as archive:  # its checksums identify the content without reading it again
        members = [member for member in archive.infolist() if member.filename in arrays]
    key = hash_of(sorted((member.filename, member.CRC, member.file_size) for member in members))
    return check_source(Source("npz", class_names, tuple(pools), (0.5,), (0.5,), key=key))


def read_archive(
    path: str | Path | None, domains: Sequence[str] = ()
) -> tuple[_Parts, tuple[str, ...]]:
    """Returns domain -> part -> samples, and the names of an archive's classes, if any.

    The part "" means an undivided domain. Arguments and errors are those of `load_npz`.
    """
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"data.path {path} is not a file; it must be a .npz with {_FORM}")
    path = Path(path)
    arrays = names_in_npz(path)
    parts = _parts_in(arrays, path)
    if unknown := [name for name in domains if name not in parts]:
        raise ValueError(
            f"{path} has no domain {first_few(unknown)}; it has {first_few(list(parts))}: choose "
            "data.domains of them"
        )
    chosen = [(name, part) for name in domains or parts for part in parts[name]]
    array_names = [f"{_prefix(*place)}{kind}" for place in chosen for kind in Samples._fields]
    content = read_npz(path, [*array_names, *({"classes"} & set(arrays))])
    classes = content.get("classes", np.empty(0, np.str_))
    if classes.ndim != 1 or classes.dtype.kind != "U" or len(np.unique(classes)) < len(classes):
        raise ValueError(f"{path}: classes is {classes}; it must be str [C], each name once")
    samples: _Parts = {}
    for name, part in chosen:
        images, labels = (content[f"{_prefix(name, part)}{kind}"] for kind in Samples._fields)
        place = f"{path}: {_prefix(name, part)}"
        if images.ndim < 2 or (images.dtype == np.uint8 and images.ndim != 4):
            raise ValueError(
                f"{place}images is {images.dtype} {images.shape}; it must be uint8 [N, H, W, C], "
                "or floats [N, ...]"
            )
        if len(images) != len(labels):
            raise ValueError(f"{place}images has {len(images)} samples, but {len(labels)} labels")
        if labels.ndim == 3 and labels.shape[1:] != images.shape[1:3]:
            raise ValueError(
                f"{place}labels has masks of {list(labels.shape[1:])} pixels for samples "
                f"{list(images.shape[1:])}; give a mask of each image's size"
            )
        images, labels = as_images(images, f"{place}images"), as_labels(labels, f"{place}labels")
        samples.setdefault(name, {})[part] = Samples(images, labels)
    return samples, tuple(classes.tolist())


def _prefix(domain: str, part: str) -> str:
    """Returns the prefix of a part's arrays."""
    return f"{domain}__{part}_" if part else f"{domain}__"


def _parts_in(arrays: Sequence[str], path: Path) -> dict[str, list[str]]:
    """Returns the parts of each domain, from the names of all arrays but `classes`."""
    parts: dict[str, set[str]] = {}
    for array in arrays:
        match = _ARRAY.fullmatch(array)
        if match:
            domain, part = match.groups("")
            parts.setdefault(domain, set()).add(part)
        elif array != "classes":
            raise ValueError(f"{path} has an array {array!r}; allowed are {_FORM}")
    if not parts:
        raise ValueError(f"{path} holds no samples; it needs {_FORM}")
    if mixed := [
        name for name, of_domain in parts.items() if "" in of_domain and len(of_domain) > 1
    ]:
        raise ValueError(f"{path} has {mixed[0]!r} both whole and divided; leave one out")
    return {
        domain: [part for part in ("", *PARTS) if part in of_domain]
        for domain, of_domain in parts.items()
    }


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


def _class_names(
    parts: _Parts, class_names: tuple[str, ...], classes: Sequence[str], path: Path
) -> tuple[str, ...]:
    """Returns the names of an archive's labels 0, 1, ...; their numbers if it has no names.

    `class_names` are the archive's own, if any; its classes must be among `classes`, if any.
    """
    labels = [samples.labels for of_domain in parts.values() for samples in of_domain.values()]
    if len({has_masks(tree) for tree in labels}) > 1:
        raise ValueError(f"{path} has masks for some samples only: give all the same")
    present = np.unique(np.concatenate([_present(tree) for tree in labels]))
    largest = int(present.max(initial=0))
    if has_masks(labels[0]) and not largest:
        raise ValueError(
            f"{path}: no pixel of its masks has a region: number regions from 1, for {UNLABELLED} "
            "is a pixel without a label"
        )
    names = class_names or tuple(classes[: largest + 1])
    if not names and largest >= len(present):
        raise ValueError(
            f"{path} has label {largest}, but only {len(present)} classes; labels count from 0 "
            "without gaps: renumber them, or name all classes in an array `classes`, str [C]"
        )
    names = names or tuple(map(str, range(largest + 1)))
    if largest >= len(names):
        raise ValueError(
            f"{path} has label {largest}, but classes are 0 to {len(names) - 1} "
            f"({first_few(names)}): name all classes, or correct the labels"
        )
    if unknown := [name for name in names if classes and name not in classes]:
        raise ValueError(
            f"{path} has a class {unknown[0]!r}, which is not one of {first_few(classes)}: leave "
            "it out"
        )
    return names
