"""Samples of one's own in a NumPy archive: `.npz` with arrays of every domain.

    DOMAIN__images   u8[N, H, W, C], or f32[N, ...]     such as photo__images, photo__labels
    DOMAIN__labels   integers [N], counted from 0; or masks, integers or bools [N, H, W], with the
                     class of each pixel, 0 for the background and 255 for a pixel without a label

or, if a domain is divided, `DOMAIN__train_images` and `DOMAIN__train_labels`, and likewise
`validation` and `test`; these become its official parts. Optionally `classes`, str[C], names the
classes; without it they are 0 to the largest label. Bytes reach a model as (u8/255 - 0.5)/0.5,
floats unchanged. Shapes except for N, and dtypes, are the same in all domains.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.domain import Split, join_splits
from fedjax_bn.data.labels import MASK, as_labels, has_masks
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.files import names_in_npz, read_npz
from fedjax_bn.data.source import PARTS, Pool, Source, check_source, numbered_names, parts_of
from fedjax_bn.engine.inputs import UNLABELLED, as_images

_FORM = f"DOMAIN__images, _labels, or DOMAIN__PART_images, _labels, PART of {', '.join(PARTS)}"
_ARRAY = re.compile(rf"((.+)__(?:({'|'.join(PARTS)})_)?)(?:images|labels)", re.DOTALL)
_ORDER = ("", *PARTS)  # of the parts; "" is the whole domain
_Parts = dict[str, dict[str, Split]]  # domain -> part -> samples


def load_npz(
    path: str | Path | None, *, domains: Sequence[str] = (), classes: Sequence[str] = ()
) -> Source:
    """Returns an archive as u8[N, H, W, C] or f32[N, ...], one pool per domain, in memory.

    Samples are named DOMAIN/NUMBER or DOMAIN/PART/NUMBER.
    The archive need not have all `classes`; without any they are its own.
    """
    parts, archive_classes = read_archive(path, domains)
    class_names = _class_names(parts, archive_classes, classes, path)
    table, pools, content = np.full(max(256, len(class_names)), UNLABELLED, np.int32), [], []
    table[: len(class_names)] = [(classes or class_names).index(name) for name in class_names]
    for name, domain_parts in parts.items():
        sizes = {part: len(samples.images) for part, samples in domain_parts.items()}
        whole, *others = domain_parts.values()
        images, labels, _ = join_splits([whole, *others]) if others else whole
        content += [images, labels[MASK] if has_masks(labels) else labels]
        # The labels 0 to C - 1 get the numbers of their classes.
        bytes_of = table.astype(np.uint8)
        labels = {MASK: bytes_of[labels[MASK]]} if has_masks(labels) else table[labels]
        official = None if "" in domain_parts else parts_of(sizes)
        pools.append(Pool(name, images, labels, numbered_names(name, sizes), official))
    class_names, key = tuple(classes) or class_names, hash_of(*content)
    return check_source(Source("npz", class_names, tuple(pools), (0.5,), (0.5,), key=key))


def read_archive(
    path: str | Path | None, domains: Sequence[str] = ()
) -> tuple[_Parts, tuple[str, ...]]:
    """Returns domain -> part ("" if whole) -> samples, and the names of classes, if any."""
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"data.path {path} is not a file; it must be a .npz with {_FORM}")
    path = Path(path)
    arrays = names_in_npz(path)
    matches = {array: _ARRAY.fullmatch(array) for array in arrays if array != "classes"}
    prefixes: dict[str, dict[str, str]] = {}  # domain -> part -> prefix of its arrays
    for prefix, domain, part in (match.groups("") for match in matches.values() if match):
        prefixes.setdefault(domain, {})[part] = prefix
    faults = [array for array, match in matches.items() if not match]
    faults += [name for name, parts in prefixes.items() if "" in parts and len(parts) > 1]
    faults += [f"no domain {name}" for name in domains if name not in prefixes]
    if faults or not prefixes:
        wrong = f"{path} has {first_few(faults) or 'no arrays'}; it must have {_FORM}, a domain"
        domain_names = first_few(list(prefixes)) or "none"
        raise ValueError(f"{wrong} either whole or divided, and has the domains {domain_names}")
    chosen = {name: prefixes[name] for name in domains or prefixes}
    all_prefixes = [prefix for parts in chosen.values() for prefix in parts.values()]
    names = [f"{prefix}{kind}" for prefix in all_prefixes for kind in ("images", "labels")]
    content = read_npz(path, [*names, *({"classes"} & set(arrays))])
    classes = content.get("classes", np.empty(0, np.str_))
    if classes.ndim != 1 or classes.dtype.kind != "U" or len(np.unique(classes)) < len(classes):
        raise ValueError(f"{path}: classes is {classes}; it must be str [C], each name once")
    samples: _Parts = {
        name: {part: _read_split(path, parts[part], content) for part in _ORDER if part in parts}
        for name, parts in chosen.items()
    }
    return samples, tuple(classes.tolist())


def _read_split(path: Path, prefix: str, content: Mapping[str, np.ndarray]) -> Split:
    """Returns the samples of the arrays with a prefix."""
    images, labels = content[f"{prefix}images"], content[f"{prefix}labels"]
    is_form = images.ndim == 4 if images.dtype == np.uint8 else images.ndim > 1
    if not is_form or labels.shape not in (images.shape[:1], images.shape[:3]):
        form = f"{images.dtype} {images.shape} with labels {labels.shape}"
        raise ValueError(
            f"{path}: {prefix}images is {form}; give uint8 [N, H, W, C] or floats [N, ...], with "
            f"{prefix}labels [N] or [N, H, W]"
        )
    place = f"{path}: {prefix}"
    return Split(as_images(images, f"{place}images"), as_labels(labels, f"{place}labels"))


def _class_names(
    parts: _Parts, archive_classes: Sequence[str], classes: Sequence[str], path: str | Path
) -> tuple[str, ...]:
    """Returns the names of an archive's labels 0, 1, ...; their numbers if it has no names."""
    trees = [samples.labels for domain_parts in parts.values() for samples in domain_parts.values()]
    are_masks = has_masks(trees[0])
    present = np.unique(np.concatenate([np.unique(t[MASK] if has_masks(t) else t) for t in trees]))
    present = present[present != UNLABELLED] if are_masks else present
    largest, labels = int(present.max(initial=0)), first_few(list(map(str, present)))
    names = tuple(archive_classes or classes[: largest + 1] or map(str, range(largest + 1)))
    # Without names, a label that is missing may be a mistake, such as labels that begin at 1.
    has_gaps = largest >= len(present) or (are_masks and not largest)
    if not archive_classes and not classes and has_gaps:
        raise ValueError(
            f"{path} has the labels {labels}, which do not count from 0 (regions of masks from 1): "
            "renumber them, or name all classes in an array `classes`, str [C]"
        )
    if largest >= len(names) or not set(names) <= set(classes or names):
        few, all_names = first_few(names), first_few(classes or names)
        raise ValueError(f"{path} has label {largest} and classes {few}; name all, as {all_names}")
    return names
