"""Samples of one's own in a NumPy archive: `.npz` with arrays of every domain.

    DOMAIN__images   u8[N, H, W, C], or f32[N, ...]     such as photo__images, photo__labels
    DOMAIN__labels   integers [N], counted from 0

or, where a domain comes divided, `DOMAIN__train_images` and `DOMAIN__train_labels`, and likewise
`validation` and `test`, of which those that there are become its official parts. Optionally
`classes`, str[C], names the classes; without it they are 0 to the largest label. Bytes reach a
model as (u8/255 - 0.5)/0.5, floats as they are. Shapes but for N, and the kind of number, are the
same in all domains. `numpy.savez(path, photo__images=..., photo__labels=...)` writes such a file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from fedjax_bn.arguments.text import short
from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pools import numbered_names, parts_of
from fedjax_bn.data.sets.npz_archive import FORM, Part, array_prefix, read_archive
from fedjax_bn.data.source import Pool, Source, check_source


def load(
    path: str | Path | None, *, domains: Sequence[str] = (), classes: Sequence[str] = ()
) -> Source:
    """An archive as u8[N, H, W, C] or f32[N, ...], one pool a domain; all of it is held in memory.

    Args:
      path: the file.
      domains: which ones, in that order; empty for all, in the file's order.
      classes: names in the order of the labels, of which the archive need not have all; empty for
        the archive's own.

    Returns:
      Source "npz", with official parts where a domain is divided. Samples are named DOMAIN/NUMBER
      or DOMAIN/PART/NUMBER.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is corrupt, an array is missing, unknown or of a wrong form, or a label
        is none of the classes'.
    """
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"data.path {path} is no file; it must be a .npz with {FORM}")
    path = Path(path)
    parts, names = read_archive(path, domains)
    _check_alike(parts, path)
    if classes:
        numbers = _numbers(parts, names, classes, path)
        parts = {
            domain: {part: own._replace(labels=numbers[own.labels]) for part, own in there.items()}
            for domain, there in parts.items()
        }
        names = tuple(classes)
    classes = _check_classes(parts, names, path)
    pools = tuple(_pool(name, own) for name, own in parts.items())
    half = (0.5,)
    return check_source(Source("npz", classes, pools, half, half, key=_key(path, parts)))


def _check_alike(domains: Mapping[str, Mapping[str, Part]], path: Path) -> None:
    """Raises ValueError unless all images have one form."""
    forms = {
        f"{array_prefix(name, part)}images": (str(own.images.dtype), own.images.shape[1:])
        for name, parts in domains.items()
        for part, own in parts.items()
    }
    (first, form), *others = forms.items()
    for name, other in others:
        if other != form:
            raise ValueError(
                f"{path}: {name} has samples {other[0]} {list(other[1])}, but {first} has "
                f"{form[0]} {list(form[1])}; bring all domains to one form"
            )


def _check_classes(
    domains: Mapping[str, Mapping[str, Part]], names: tuple[str, ...], path: Path
) -> tuple[str, ...]:
    """The names of the classes; without any given, their numbers.

    Raises:
      ValueError: a label has no name; or, without names, a number below the largest is no label.
    """
    found = np.unique(
        np.concatenate([part.labels for own in domains.values() for part in own.values()])
    )
    if names and found[-1] >= len(names):
        raise ValueError(
            f"{path} has label {found[-1]}, but `classes` names {len(names)}, 0 to "
            f"{len(names) - 1}; name all classes, or correct the labels"
        )
    if not names and found[-1] >= len(found):
        absent = int(np.setdiff1d(np.arange(len(found) + 1), found)[0])
        raise ValueError(
            f"{path} has label {found[-1]}, but no sample of class {absent}; labels count from 0 "
            "without gaps: renumber them, or name all classes in an array `classes`, str [C]"
        )
    return names or tuple(map(str, found))


def _numbers(
    domains: Mapping[str, Mapping[str, Part]],
    names: tuple[str, ...],
    classes: Sequence[str],
    path: Path,
) -> np.ndarray:
    """The number among `classes` of each label of an archive, i32[C].

    Raises:
      ValueError: it has a class that is none of them.
    """
    labels = [int(part.labels.max()) for own in domains.values() for part in own.values()]
    names = names or tuple(classes[: max(labels) + 1])
    if max(labels) >= len(names):
        raise ValueError(
            f"{path} has label {max(labels)}, but there are {len(names)} classes, 0 to "
            f"{len(names) - 1}: correct the labels, or leave such samples out"
        )
    for name in names:
        if name not in classes:
            raise ValueError(
                f"{path} has a class {short(name)!r}, which is none of {first_few(classes)}: "
                "leave it out"
            )
    return np.array([list(classes).index(name) for name in names], np.int32)


def _pool(name: str, parts: Mapping[str, Part]) -> Pool:
    sizes = {part: len(own.labels) for part, own in parts.items()}
    images, labels = ([getattr(own, kind) for own in parts.values()] for kind in Part._fields)
    whole = "" in parts
    return Pool(
        name=name,
        images=images[0] if len(images) == 1 else np.concatenate(images),
        labels=np.concatenate(labels),
        names=numbered_names(name, sizes),
        parts=None if whole else parts_of(sizes),
    )


def _key(path: Path, domains: Mapping[str, Mapping[str, Part]]) -> str:
    """Tells the arrays that were read from any others, by the archive's own checksums."""
    read = {
        f"{array_prefix(name, part)}{kind}.npy"
        for name, parts in domains.items()
        for part in parts
        for kind in Part._fields
    }
    with ZipFile(path) as archive:
        members = [one for one in archive.infolist() if one.filename in read]
    return hash_of(sorted((one.filename, one.CRC, one.file_size) for one in members))
