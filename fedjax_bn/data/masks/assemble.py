"""Makes a source from pairs of files, an image and its mask: pixels, and a class for each of them.

The values of all masks together are 0 and 255 for the background and one region, or 0 to C - 1 with
255 for a pixel without a label. Other values need names that state them, such as
`data.classes=background=255,disc=128,cup=0`, or `prostate=1+2` for two values of one class.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.labels import MASK, SPACING, VOLUME
from fedjax_bn.data.pixels.cache import Write, cached_array, cached_numbers
from fedjax_bn.data.pixels.decode import hash_of_files
from fedjax_bn.data.source import TRAIN, Pool, Source, check_source
from fedjax_bn.data.threads import in_threads
from fedjax_bn.engine.inputs import UNLABELLED

RESIZE, TILES = "resize", "tiles"  # ways of images to squares
_VALUES = (
    "save at least two of 0 to C - 1 for C classes, or 0 and 255, or state what values are, as by "
    "data.classes=background=0,disc=128,cup=255"
)
_FORM = 4  # raise it when the same files would give other masks


class Pair(NamedTuple):
    """An image and its mask."""

    image: Path
    mask: Path
    name: str  # of the sample, such as its image's file. Samples with one name are never separated
    part: int | None = None  # TRAIN, VALIDATION or TEST, if the dataset states it


class Conversion(Protocol):
    """The conversion of pairs of one kind of file into squares of `image_size` pixels a side."""

    image_size: int
    form: str  # differs from other conversions', for the name in the cache
    numbered: bool  # whether squares have the number of their pair as `volume`
    constants: tuple[tuple[float, ...], tuple[float, ...]]  # mean and std as in `Source`
    threads: int | None  # at most; None for the machine's
    # the number of a pair's squares, and bool[256] of its mask's values
    look: Callable[[Pair], tuple[int, np.ndarray]]
    # with the class u8[256] of each value: squares u8[n, S, S, 4], channels and classes; a result
    convert: Callable[[Pair, np.ndarray], tuple[np.ndarray, Any]]
    describe: Callable[[Sequence[Any]], tuple[str, ...]]  # notes on the results of all pairs
    spacing: Callable[[Pair], tuple[float, float, float]] | None  # as in `data.labels`


def paired_source(
    name: str,
    root: Path,
    domains: Mapping[str, Sequence[Pair]],
    conversion: Conversion,
    classes: Sequence[str] = (),
    notes: Sequence[str] = (),
    *,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Source:
    """Returns the images u8[N, size, size, 3] and masks u8[N, size, size] of all domains.

    Parts are official in a domain whose pairs all have one, some of them TRAIN. `domains` are
    domain -> its pairs of files below `root`, at least one each; `notes` are further ones for the
    user; `classes` are as in `classes_of`, `cache` and `progress` as in `pixels.decode`. A
    ValueError names a file that cannot be read, does not suit its image or has unknown values.
    """
    pairs = [pair for members in domains.values() for pair in members]
    owners = [domain for domain, members in domains.items() for _ in members]

    def look(pair: Pair) -> list[int]:
        count, values = conversion.look(pair)
        return [count, *values.tolist()]

    digest = hash_of_files([file for pair in pairs for file in pair[:2]], root, _FORM)
    place = f"{root.resolve().name}-{conversion.form}-{digest}"
    # Counts and values of all files come first, because faults show here, before hours of decoding.
    rows = cached_numbers(cache, f"looking at masks-{place}", pairs, look, 257, progress)
    counts, present, files = rows[:, 0], rows[:, 1:].astype(bool), [pair.mask for pair in pairs]
    class_names, table, class_note = classes_of(present, owners, files, classes)
    ends = np.cumsum([0, *counts])

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> Any:
            squares, result = conversion.convert(pairs[k], table)
            write(squares, int(ends[k]))
            return result

        how = "images with masks", progress, conversion.threads
        return conversion.describe(list(in_threads(convert, range(len(pairs)), *how)))

    shape = (int(ends[-1]), conversion.image_size, conversion.image_size, 4)
    # Pixels and classes are one array, so that a cache never has images without their masks.
    stored, converted = cached_array(cache, f"masks-{table.tobytes().hex()}-{place}", shape, make)
    pools, stop = [], 0
    for domain, members in domains.items():
        # Pairs of a domain follow each other, so that a slice needs no copy of the pixels.
        start, stop = stop, stop + len(members)
        rows, tiles = slice(int(ends[start]), int(ends[stop])), counts[start:stop]
        labels = {MASK: stored[rows, ..., 3]}
        if conversion.numbered:
            labels[VOLUME] = np.repeat(np.arange(start, stop, dtype=np.int32), tiles)
        if conversion.spacing:
            spacing = np.array([conversion.spacing(pair) for pair in members], np.float32)
            labels[SPACING] = np.repeat(spacing, tiles, 0)
        parts = [pair.part for pair in members]
        # A split is official only if it says of every image what it is for.
        is_official = None not in parts and TRAIN in parts
        official = np.repeat(np.array(parts, np.int8), tiles) if is_official else None
        names = np.repeat([pair.name for pair in members], tiles)
        pools.append(Pool(domain, stored[rows, ..., :3], labels, names, official))
    sizes = ", ".join(f"{domain} {len(members)}" for domain, members in domains.items())
    squares = f"{len(stored)} squares of {conversion.image_size} pixels"
    notes = (*notes, f"{len(pairs)} images with masks ({sizes}) as {squares}", class_note)
    form = name, class_names, tuple(pools), *conversion.constants, (*notes, *converted)
    return check_source(Source(*form, key=f"{conversion.form} {digest}"))


def classes_of(
    present: np.ndarray, domains: Sequence[str], files: Sequence[Path], classes: Sequence[str] = ()
) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Returns the names of classes, the class u8[256] of each value of masks, and a note on them.

    Other values are `UNLABELLED`. A ValueError names a value that is no class or may be two.

    Args:
      present: bool[N, 256], which values each mask has.
      domains, files: of the N masks.
      classes: names of the classes, the background first, such as "disc", or "disc=1+2" with its
        values if these are not the usual ones above; empty to find their number.
    """
    names, values = _read_classes(classes)
    shown = np.flatnonzero(present.any(0)).tolist()
    if values is None:
        values = _usual_values(present, np.array(domains), len(names))
    unknown = [value for value in shown if value not in values]
    if len(shown) < 2 or unknown:
        # The rarest value is most likely the slip of one file.
        rarest = min(unknown or shown, key=lambda value: present[:, value].sum())
        file, numbers = files[int(present[:, rarest].argmax())], first_few(list(map(str, shown)))
        raise ValueError(
            f"{file} has the value {rarest}, and all masks together have {numbers}: {_VALUES}"
        )
    count = 1 + max(number for number in values.values() if number != UNLABELLED)
    regions = ["foreground"] if count == 2 else map(str, range(1, count))
    names = names or ("background", *regions)
    table = np.full(256, UNLABELLED, np.uint8)
    table[list(values)] = list(values.values())
    meanings = dict(enumerate(names)) | {UNLABELLED: "without a label"}
    about = ", ".join(f"{value} {meanings[int(table[value])]}" for value in shown)
    return names, table, f"values of masks and what they are: {about}"


def _read_classes(classes: Sequence[str]) -> tuple[tuple[str, ...], dict[int, int] | None]:
    """Returns the names of `data.classes`, and value -> class if every name states its values."""
    entries = [entry.partition("=") for entry in classes]
    names = tuple(name for name, _, _ in entries)
    has_values = any(sign for _, sign, _ in entries)
    stated = [(v, number) for number, entry in enumerate(entries) for v in entry[2].split("+")]
    values = {int(value): number for value, number in stated if value.isdecimal()}
    all_once = len(values) == len(stated) and max(values, default=0) < 256
    if len(names) == 1 or len(set(names)) < len(names) or (has_values and not all_once):
        raise ValueError(
            f"data.classes={','.join(classes)} must name the background and every region once, "
            "such as background,vessel, or with each value once, such as background=0,vessel=1+255"
        )
    return names, values if has_values else None


def _usual_values(present: np.ndarray, owners: np.ndarray, count: int) -> dict[int, int]:
    """Returns value -> class for masks of 0 and 255, or of 0 to C - 1."""
    # `count` is the number of names in `data.classes`; 0 if it is empty.
    largest = int(np.flatnonzero(present[:, :UNLABELLED].any(0)).max(initial=0))
    if count in (0, 2) and largest == 0:
        return {0: 0, UNLABELLED: 1}
    values = {number: number for number in range(count or largest + 1)}
    # Where 255 is never beside a region, it may be the region, which would be lost as unlabelled.
    beside = owners[present[:, UNLABELLED] & present[:, 1:UNLABELLED].any(1)]
    is_doubtful = (present[:, UNLABELLED] & ~np.isin(owners, beside)).any()
    return values if is_doubtful else values | {UNLABELLED: UNLABELLED}
