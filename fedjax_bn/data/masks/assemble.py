"""Makes a source from pairs of files, an image and its mask: pixels, and a class for each of them.

A mask refers to its image as viewers show it, turned upright by its EXIF, or, with the orientation
"stored", to the rows of its file; a mask with an EXIF orientation of its own is turned likewise.
Masks are stretched as their images are, to the nearest value.

A mask is a number for each pixel: grey of 1, 8 or 16 bits, equal red, green and blue, or a palette.
With a palette of greys a value is its grey, else the index of its colour. JPEG changes values, so
masks in it are black and white: 255 from 128 upwards.

The values of all masks together are 0 and 255 for the background and one region, or 0 to C - 1 with
255 for a pixel without a label. Other values need names that state them, such as
`data.classes=background=255,disc=128,cup=0`, or `prostate=1+2` for two values of one class.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.data.label_trees import MASK, SPACING, VOLUME
from fedjax_bn.data.messages import first_few, in_threads
from fedjax_bn.data.pixels.cache import Write, cached_array, cached_numbers
from fedjax_bn.data.pixels.decode import cut, hash_of_files, number_of_tiles
from fedjax_bn.data.pixels.raster import (
    MEGAPIXELS,
    UPRIGHT,
    open_image,
    open_raster,
    orientation_notes,
    size_as_used,
    turn_of,
)
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import IMAGENET
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import UNLABELLED

RESIZE, TILES = "resize", "tiles"
_FORM = 4  # raise it when the same files would give other masks


class Pair(NamedTuple):
    """An image and its mask."""

    image: Path  # image, mask: the files
    mask: Path
    name: str  # of the sample, such as its image's file. Samples with one name are never separated
    # TRAIN, VALIDATION or TEST; None if the dataset does not divide its images
    part: int | None = None


class ImageSquares(NamedTuple):
    """The conversion of images and masks into squares of one size."""

    image_size: int  # pixels a side
    # "resize" stretches an image to the square; "tiles" cuts it at its own resolution, see
    # `decode.cut`
    large: str = RESIZE
    # cache, progress, max_megapixels, orientation: see `pixels.decode`
    cache: str | Path | None = None
    progress: bool = True
    max_megapixels: float = MEGAPIXELS
    orientation: str = UPRIGHT


class Conversion(NamedTuple):
    """The conversion of pairs of one kind of file."""

    squares: Any  # has `image_size`, `cache` and `progress`, see `ImageSquares`
    form: str  # differs from other conversions', for the name in the cache
    # `look(pair) -> (count, values)`: of its squares, and bool[256] of its mask
    look: Callable[[Pair], tuple[int, np.ndarray]]
    # `convert(pair, table) -> (squares, result)`: squares u8[count, S, S, 4], three channels and
    # the classes; `table` u8[256] has the class of a value
    convert: Callable[[Pair, np.ndarray], tuple[np.ndarray, Any]]
    # `describe(results) -> notes` on the results of all pairs, in their order
    describe: Callable[[Sequence[Any]], tuple[str, ...]]
    # whether squares have the number of their pair as `volume`, to be scored together
    numbered: bool = True
    # `spacing(pair)`, in millimetres as in `label_trees`; None if it is unknown
    spacing: Callable[[Pair], tuple[float, float, float]] | None = None
    # mean, std: as in `Source`; by default images reach a model as u8/255
    mean: tuple[float, ...] = (0.0,) * 3
    std: tuple[float, ...] = (1.0,) * 3
    threads: int | None = None  # at most; None for the machine's


def convert_images(squares: ImageSquares) -> Conversion:
    """Returns the conversion of image files.

    Tiles of an image follow each other, and share their name and their `volume`. A pixel that an
    earlier tile shows, and the padding of a small image, are without a label.
    """
    size, is_cut = squares.image_size, squares.large == TILES
    limits = squares.max_megapixels, squares.orientation

    def look(pair: Pair) -> tuple[int, np.ndarray]:
        with corruption_named(pair.image):
            width, height = size_as_used(pair.image.read_bytes(), *limits)
        with corruption_named(pair.mask):
            mask = open_mask(pair.mask.read_bytes(), *limits)
        if mask.size != (width, height):
            raise ValueError(
                f"{pair.mask} has {mask.width} x {mask.height} pixels, but its image {pair.image} "
                f"has {width} x {height}: give a mask of the image's size, or set data.orientation "
                "if EXIF turns one of them"
            )
        return number_of_tiles(height, width, size) if is_cut else 1, np.array(mask.histogram()) > 0

    def convert(pair: Pair, table: np.ndarray) -> tuple[np.ndarray, int]:
        from PIL.Image import Resampling

        with corruption_named(pair.image):
            image, tag = open_image(pair.image.read_bytes(), *limits)
        with corruption_named(pair.mask):
            mask = open_mask(pair.mask.read_bytes(), *limits)
        if is_cut:
            images = cut(np.asarray(image), size)[0]
            masks = cut(table[np.asarray(mask)], size, UNLABELLED)[0]
        else:
            images = np.asarray(image.resize((size, size), Resampling.BILINEAR))[None]
            # Between classes 1 and 3 there is no class 2, so values are never averaged.
            masks = table[np.asarray(mask.resize((size, size), Resampling.NEAREST))][None]
        return np.concatenate([images, masks[..., None]], -1), tag

    form = f"{squares.large}-{squares.orientation}-{size}"
    describe = partial(orientation_notes, orientation=squares.orientation)
    mean, std = IMAGENET
    return Conversion(squares, form, look, convert, describe, is_cut, mean=mean, std=std)


def paired_source(
    name: str,
    root: Path,
    domains: Mapping[str, Sequence[Pair]],
    conversion: Conversion,
    classes: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Source:
    """Returns the images u8[N, size, size, 3] and masks u8[N, size, size] of all domains.

    Args:
      name: of the dataset.
      root: folder of the files, to which their names are relative.
      domains: name -> its pairs, at least one each.
      conversion: how pairs become squares.
      classes: see `classes_of`.
      notes: further notes for the user.

    Raises:
      ValueError: a file cannot be read, or an image and its mask do not suit each other, or a mask
        has unknown values.
      ImportError: the package that reads a file is not installed.
      OSError: a file is missing, or the cache cannot be written.
    """
    pairs = [pair for members in domains.values() for pair in members]
    owners = [domain for domain, members in domains.items() for _ in members]
    squares = conversion.squares
    size, cache, progress = squares.image_size, squares.cache, squares.progress

    def look(pair: Pair) -> list[int]:
        count, values = conversion.look(pair)
        # 256 bits in eight numbers, because the cache keeps rows of numbers.
        return [count, *np.packbits(values).view("<i4").tolist()]

    digest = hash_of_files([file for pair in pairs for file in pair[:2]], root, _FORM)
    place = f"{root.resolve().name}-{conversion.form}-{digest}"
    # Counts and values of all files come first, because faults show here, before hours of decoding.
    rows = cached_numbers(cache, f"looking at masks-{place}", pairs, look, 9, progress)
    present = np.unpackbits(np.ascontiguousarray(rows[:, 1:]).view(np.uint8), axis=1).astype(bool)
    class_names, table, class_note = classes_of(
        present, owners, [pair.mask for pair in pairs], classes
    )
    counts = rows[:, 0]
    ends = np.cumsum([0, *counts])

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> Any:
            stored, result = conversion.convert(pairs[k], table)
            write(stored, int(ends[k]))
            return result

        numbers = range(len(pairs))
        results = in_threads(
            convert, numbers, "images with masks", progress, threads=conversion.threads
        )
        return conversion.describe(list(results))

    shape = (int(ends[-1]), size, size, 4)
    # Pixels and classes are one array, so that a cache never has images without their masks.
    stored, converted = cached_array(cache, f"masks-{table.tobytes().hex()}-{place}", shape, make)
    names = np.repeat([pair.name for pair in pairs], counts)
    labels = {MASK: stored[..., 3]}
    if conversion.numbered:
        labels[VOLUME] = np.repeat(np.arange(len(pairs), dtype=np.int32), counts)
    if conversion.spacing:
        spacing = np.array([conversion.spacing(pair) for pair in pairs], np.float32)
        labels[SPACING] = np.repeat(spacing, counts, 0)
    pools = []
    for domain, members in domains.items():
        # Pairs of a domain follow each other, so that a slice needs no copy of the pixels.
        start = owners.index(domain)
        rows = slice(int(ends[start]), int(ends[start + len(members)]))
        parts, tiles = [pair.part for pair in members], counts[start : start + len(members)]
        official = None if None in parts else np.repeat(np.array(parts, np.int8), tiles)
        domain_labels = {leaf: array[rows] for leaf, array in labels.items()}
        pools.append(Pool(domain, stored[rows, ..., :3], domain_labels, names[rows], official))
    sizes = ", ".join(f"{domain} {len(members)}" for domain, members in domains.items())
    about = f"{len(pairs)} images with masks ({sizes}) as {len(stored)} squares of {size} pixels"
    notes = (*notes, about, class_note, *converted)
    constants, key = (conversion.mean, conversion.std), f"{conversion.form} {digest}"
    return check_source(Source(name, class_names, tuple(pools), *constants, notes, key=key))


def open_mask(
    content: bytes, max_megapixels: float = MEGAPIXELS, orientation: str = UPRIGHT
) -> Any:
    """Returns a mask as a Pillow image of mode L; the orientation is that of `raster.open_image`.

    Raises:
      ValueError: the file is not one image, or has colours, floats or numbers above 255.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    image = open_raster(content, max_megapixels)
    turn, _ = turn_of(image, orientation)
    frames, levels = getattr(image, "n_frames", 1), _levels_of(image)
    if levels is None or frames > 1 or levels.min() < 0 or levels.max() > 255:
        raise ValueError(
            f"its pixels, {image.mode} of Pillow in {frames} frames, are not greys or numbers from "
            "0 to 255: save it as a PNG with a number for each class"
        )
    mask = Image.fromarray(levels.astype(np.uint8))
    return mask if turn is None else mask.transpose(turn)


def _levels_of(image: Any) -> np.ndarray | None:
    """Returns the numbers [H, W] of a Pillow image; None if it has colours or floats."""
    if image.format == "JPEG":
        return np.where(np.asarray(image.convert("L")) >= 128, 255, 0)
    if image.mode in ("1", "L", "LA"):
        return np.asarray(image.convert("L"))
    if image.mode == "P":
        # Programs save greys with a palette too; then a pixel is what viewers show.
        palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
        is_grey = (palette == palette[:, :1]).all()
        greys = np.pad(palette[:, 0], (0, 256 - len(palette)))
        return greys[np.asarray(image)] if is_grey else np.asarray(image)
    if image.mode in ("RGB", "RGBA"):
        colours = np.asarray(image)[..., :3]
        if (colours == colours[..., :1]).all():
            return colours[..., 0]
    if image.mode.startswith("I"):
        numbers = np.asarray(image).astype(np.int64)
        # Multiples of 257 are bytes stretched to 16 bits.
        return numbers if (numbers % 257).any() else numbers // 257
    return None


def classes_of(
    present: np.ndarray, domains: Sequence[str], files: Sequence[Path], classes: Sequence[str] = ()
) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Returns the classes of masks, and the class of each value.

    Args:
      present: bool[N, 256], which values each mask has.
      domains: N names, the domain of each mask.
      files: of the masks.
      classes: names of the classes, the background first, such as "disc", or "disc=1+2" with its
        values if these are not the usual ones above; empty to find their number.

    Returns:
      The names of the classes; u8[256], the class of each value, `UNLABELLED` for others; and
      a note on them.

    Raises:
      ValueError: a mask has a value that is not a class or may be two, or all masks have the same
        value alone.
    """
    names, values = _read_classes(classes)
    shown = np.flatnonzero(present.any(0)).tolist()
    if values is None:
        values = _usual_values(present, np.array(domains), len(names))
    unknown = [value for value in shown if value not in values]
    if len(shown) < 2 or unknown:
        # The rarest value is most likely the slip of one file.
        rarest = min(unknown or shown, key=lambda value: present[:, value].sum())
        raise ValueError(
            f"{files[int(present[:, rarest].argmax())]} has the value {rarest}, and all masks "
            f"together have {first_few(list(map(str, shown)))}: save at least two of 0 to "
            f"{len(names) - 1 if names else 'C - 1'}, or 0 and 255, or state values, "
            "data.classes=background=0,disc=128,cup=255"
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
    names = tuple(entry.partition("=")[0] for entry in classes)
    stated = [
        (value, number)
        for number, entry in enumerate(classes)
        for value in entry.partition("=")[2].split("+")
    ]
    has_values = any("=" in entry for entry in classes)
    values = {int(value): number for value, number in stated if value.isdecimal()}
    all_once = len(values) == len(stated) and max(values, default=0) < 256
    if len(names) == 1 or len(set(names)) < len(names) or (has_values and not all_once):
        raise ValueError(
            f"data.classes={','.join(classes)} must name the background and every region once, "
            "such as background,vessel, or with each value, 0 to 255, once, such as "
            "background=0,vessel=1+255"
        )
    return names, values if has_values else None


def _usual_values(present: np.ndarray, owners: np.ndarray, count: int) -> dict[int, int]:
    """Returns value -> class for masks of 0 and 255, or of 0 to C - 1.

    `count` is the number of names in `data.classes`; 0 if it is empty.
    """
    largest = int(np.flatnonzero(present[:, :UNLABELLED].any(0)).max(initial=0))
    if count in (0, 2) and largest == 0:
        return {0: 0, UNLABELLED: 1}
    values = {number: number for number in range(count or largest + 1)}
    # Where 255 is never beside a region, it may be the region, which would be lost as unlabelled.
    beside = owners[present[:, UNLABELLED] & present[:, 1:UNLABELLED].any(1)]
    is_doubtful = (present[:, UNLABELLED] & ~np.isin(owners, beside)).any()
    return values if is_doubtful else values | {UNLABELLED: UNLABELLED}
