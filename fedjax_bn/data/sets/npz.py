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
from typing import NamedTuple
from zipfile import ZipFile, is_zipfile

import numpy as np

from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pools import PARTS, numbered_names, parts_of
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import Pool, Source, check_source

_FORM = (
    "DOMAIN__images and DOMAIN__labels, or DOMAIN__PART_images and DOMAIN__PART_labels, PART of "
    f"{', '.join(PARTS)}"
)


class Part(NamedTuple):
    """Samples of one part of a domain.

    images: u8[N, H, W, C] or f32[N, ...].
    labels: i32[N], at least 0.
    """

    images: np.ndarray
    labels: np.ndarray


def load(path: str | Path | None, *, domains: Sequence[str] = ()) -> Source:
    """An archive as u8[N, H, W, C] or f32[N, ...], one pool a domain; all of it is held in memory.

    Args:
      path: the file.
      domains: which ones, in that order; empty for all, in the file's order.

    Returns:
      Source "npz", with official parts where a domain is divided. Samples are named DOMAIN/NUMBER
      or DOMAIN/PART/NUMBER.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is corrupt, an array is missing, unknown or of a wrong form, or a label
        is none of the classes'.
    """
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"data.path {path} is no file; it must be a .npz with {_FORM}")
    path = Path(path)
    parts, classes = read_archive(path, domains)
    _check_alike(parts, path)
    classes = _check_classes(parts, classes, path)
    pools = tuple(_pool(name, own) for name, own in parts.items())
    half = (0.5,)
    return check_source(Source("npz", classes, pools, half, half, key=_key(path, parts)))


def read_archive(
    path: Path, domains: Sequence[str] = ()
) -> tuple[dict[str, dict[str, Part]], tuple[str, ...]]:
    """The domains of an archive, each with its parts, and the names of its classes.

    Args:
      path: of a `.npz` of the form above.
      domains: which ones, in that order; empty for all, in the file's order.

    Returns:
      name -> part -> samples, the part "" where a domain is not divided; and the classes' names,
      none where the archive has none.

    Raises:
      ValueError: the file is corrupt, an array is missing, unknown or of a wrong form, or a label
        is negative or too large.
    """
    if not is_zipfile(path):
        raise ValueError(f"{path} is no .npz archive, or is cut short; fetch or write it again")
    with corruption_named(path), np.load(path) as archive:
        keys = list(archive.files)
    there = _parts_there([key for key in keys if key != "classes"], path)
    if not there:
        raise ValueError(f"{path} holds no arrays; it needs {_FORM}")
    unknown = [name for name in domains if name not in there]
    if unknown:
        raise ValueError(
            f"{path} has no domain {first_few(unknown)}; it has {', '.join(there)}: choose "
            "data.domains of them"
        )
    with corruption_named(path), np.load(path) as archive:
        arrays = {
            name: {part: _arrays(archive, name, part) for part in there[name]}
            for name in domains or there
        }
        classes = archive["classes"] if "classes" in keys else np.empty(0, np.str_)
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise ValueError(f"{path}: classes is {classes.dtype} {classes.shape}; it must be str [C]")
    checked = {
        name: {part: _check_part(*both, _prefix(name, part), path) for part, both in own.items()}
        for name, own in arrays.items()
    }
    return checked, tuple(classes.tolist())


def _prefix(name: str, part: str) -> str:
    return f"{name}__{part}_" if part else f"{name}__"


def _arrays(archive: Mapping[str, np.ndarray], name: str, part: str) -> tuple[np.ndarray, ...]:
    return tuple(archive[f"{_prefix(name, part)}{kind}"] for kind in ("images", "labels"))


def _parts_there(keys: Sequence[str], path: Path) -> dict[str, list[str]]:
    """The parts of each domain, from the arrays' names.

    Raises:
      ValueError: a name is of another form, images have no labels, or a domain is both divided and
        not.
    """
    there: dict[str, list[str]] = {}
    for key in keys:
        name, _, rest = key.rpartition("__")
        part, _, kind = rest.rpartition("_")
        if not name or kind not in ("images", "labels") or part not in ("", *PARTS):
            raise ValueError(f"{path} has an array {key!r}; allowed are {_FORM}")
        if rest != (f"{part}_{kind}" if part else kind):
            raise ValueError(f"{path} has an array {key!r}; allowed are {_FORM}")
        there.setdefault(name, [])
        there[name] += [part] * (part not in there[name])
    for name, parts in there.items():
        for part in parts:
            for kind in ("images", "labels"):
                if f"{_prefix(name, part)}{kind}" not in keys:
                    raise ValueError(
                        f"{path} lacks the array {_prefix(name, part)}{kind}; write it again"
                    )
        if "" in parts and len(parts) > 1:
            raise ValueError(
                f"{path} has {name!r} both whole ({name}__images) and divided "
                f"({_prefix(name, parts[-1])}images); leave one out"
            )
    return {name: [part for part in ("", *PARTS) if part in own] for name, own in there.items()}


def _check_part(images: np.ndarray, labels: np.ndarray, prefix: str, path: Path) -> Part:
    """Images and labels as they are kept; nothing is cast before its range is known."""
    bytes_of_images = images.dtype == np.uint8 and images.ndim == 4
    if not (bytes_of_images or (images.dtype == np.float32 and images.ndim >= 2)):
        raise ValueError(
            f"{path}: {prefix}images is {images.dtype} {images.shape}; it must be uint8 "
            "[N, H, W, C], or float32 [N, ...]"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise ValueError(
            f"{path}: {prefix}labels is {labels.dtype} {labels.shape}; it must be integers [N]"
        )
    if len(images) != len(labels):
        raise ValueError(
            f"{path}: {prefix.rstrip('_')} has {len(images)} images but {len(labels)} labels; "
            "every image needs one label"
        )
    if not len(labels):
        raise ValueError(f"{path}: {prefix}images is empty; give it samples or leave it out")
    wrong = np.flatnonzero((labels < 0) | (labels > np.iinfo(np.int32).max))
    if wrong.size:
        raise ValueError(
            f"{path}: {prefix}labels has {labels[wrong[0]]} at index {wrong[0]}; labels are "
            "numbers of classes, counted from 0"
        )
    if images.dtype == np.float32 and not np.isfinite(images).all():
        place = tuple(np.argwhere(~np.isfinite(images))[0].tolist())
        raise ValueError(
            f"{path}: {prefix}images has {images[place]} at index {place}; numbers must be finite: "
            "drop the sample or impute it"
        )
    return Part(images, labels.astype(np.int32))


def _check_alike(domains: Mapping[str, Mapping[str, Part]], path: Path) -> None:
    """Raises ValueError unless all images have one form."""
    forms = {
        f"{_prefix(name, part)}images": (str(own.images.dtype), own.images.shape[1:])
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
        f"{_prefix(name, part)}{kind}.npy"
        for name, parts in domains.items()
        for part in parts
        for kind in Part._fields
    }
    with ZipFile(path) as archive:
        members = [one for one in archive.infolist() if one.filename in read]
    return hash_of(sorted((one.filename, one.CRC, one.file_size) for one in members))
