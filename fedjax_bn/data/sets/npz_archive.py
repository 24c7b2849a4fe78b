"""NumPy archives with the arrays of several domains, checked before anything is cast: see `npz`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.arguments.text import short
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pools import PARTS
from fedjax_bn.data.sets.arrays import forms_in_npz, names_in_npz, read_npz
from fedjax_bn.engine.inputs import as_images, check_image_dtype, class_labels

FORM = (
    "DOMAIN__images and DOMAIN__labels, or DOMAIN__PART_images and DOMAIN__PART_labels, PART of "
    f"{', '.join(PARTS)}"
)


class Part(NamedTuple):
    """Samples of one part of a domain.

    images: u8[N, H, W, C] or f32[N, ...], as `inputs.as_images` makes them.
    labels: i32[N], at least 0.
    """

    images: np.ndarray
    labels: np.ndarray


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
    keys = names_in_npz(path)
    there = _parts_there([key for key in keys if key != "classes"], path)
    if not there:
        raise ValueError(f"{path} holds no arrays; it needs {FORM}")
    unknown = [name for name in domains if name not in there]
    if unknown:
        raise ValueError(
            f"{path} has no domain {first_few(unknown)}; it has {first_few(list(there))}: choose "
            "data.domains of them"
        )
    wanted = [one for name in domains or there for one in _array_names(name, there[name])]
    wanted += {"classes"} & set(keys)
    forms = forms_in_npz(path, wanted)
    for name in domains or there:
        for part in there[name]:
            _check_form(forms, name, part, path)
    arrays = read_npz(path, wanted)
    classes = arrays.get("classes", np.empty(0, np.str_))
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise ValueError(f"{path}: classes is {classes.dtype} {classes.shape}; it must be str [C]")
    if len(set(classes.tolist())) < len(classes):
        raise ValueError(f"{path}: classes has a name twice; each class needs its own")
    checked = {
        name: {part: _checked_part(arrays, name, part, path) for part in there[name]}
        for name in domains or there
    }
    return checked, tuple(classes.tolist())


def array_prefix(name: str, part: str) -> str:
    """What the names of a part's arrays begin with; the part "" is the whole domain."""
    return f"{name}__{part}_" if part else f"{name}__"


def _array_names(name: str, parts: Sequence[str]) -> list[str]:
    """The names of the arrays of some parts: images, then labels, of each."""
    return [f"{array_prefix(name, part)}{kind}" for part in parts for kind in Part._fields]


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
            raise ValueError(f"{path} has an array {short(key)!r}; allowed are {FORM}")
        if rest != (f"{part}_{kind}" if part else kind):
            raise ValueError(f"{path} has an array {short(key)!r}; allowed are {FORM}")
        there.setdefault(name, [])
        there[name] += [part] * (part not in there[name])
    for name, parts in there.items():
        for part in parts:
            for kind in ("images", "labels"):
                if f"{array_prefix(name, part)}{kind}" not in keys:
                    raise ValueError(
                        f"{path} lacks the array {short(array_prefix(name, part))}{kind}; write "
                        "it again"
                    )
        if "" in parts and len(parts) > 1:
            raise ValueError(
                f"{path} has {short(name)!r} both whole ({short(name)}__images) and divided "
                f"({array_prefix(name, parts[-1])}images); leave one out"
            )
    return {name: [part for part in ("", *PARTS) if part in own] for name, own in there.items()}


def _check_form(forms: Mapping[str, np.ndarray], name: str, part: str, path: Path) -> None:
    """Raises ValueError unless shapes and dtypes of a part's arrays are those of samples."""
    images, labels = (forms[one] for one in _array_names(name, [part]))
    prefix = array_prefix(name, part)
    check_image_dtype(images.dtype, f"{path}: {short(prefix)}images")
    if images.ndim < 2 or (images.dtype == np.uint8 and images.ndim != 4):
        raise ValueError(
            f"{path}: {short(prefix)}images is {images.dtype} {images.shape}; it must be uint8 "
            "[N, H, W, C], or floats [N, ...]"
        )
    if labels.ndim == 1 and len(images) != len(labels):
        raise ValueError(
            f"{path}: {short(prefix.rstrip('_'))} has {len(images)} images but {len(labels)} "
            "labels; every image needs one label"
        )
    if not len(images):
        raise ValueError(f"{path}: {short(prefix)}images is empty; give it samples or leave it out")


def _checked_part(arrays: Mapping[str, np.ndarray], name: str, part: str, path: Path) -> Part:
    """Images and labels as they are kept; nothing is cast before its range is known."""
    images, labels = (arrays[one] for one in _array_names(name, [part]))
    prefix = array_prefix(name, part)
    images = as_images(images, f"{path}: {prefix}images")
    labels = class_labels(labels, f"{path}: {prefix}labels")
    if images.dtype != np.uint8 and not np.isfinite(images).all():
        place = tuple(np.argwhere(~np.isfinite(images))[0].tolist())
        raise ValueError(
            f"{path}: {prefix}images has {images[place]} at index {place}; numbers must be finite: "
            "drop the sample or impute it"
        )
    return Part(images, labels)
