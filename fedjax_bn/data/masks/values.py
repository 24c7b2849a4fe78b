"""Reads the values of masks in any form, and decides which class each value is.

A mask is a number for each pixel in whatever form a program saves it: grey of 1, 8 or 16 bits,
equal red, green and blue, or a palette. Transparency is dropped. With a palette of greys a value is
its grey, else the index of its colour. JPEG changes values, so masks in it are black and white:
255 from 128 upwards.

The values of all masks together become classes by the first rule that applies:

    1  two classes, and no values but 0, 1 and 255, with 1 or 255 in each domain, or 0 and one other
       value: 0 is the background, the others are the region
    2  the values are 0 to C - 1, or these and 255: they are the numbers of C classes, and 255 is a
       pixel without a label
    3  `data.classes` has as many names as there are values: the darkest is class 0, and so on

C is the number of names in `data.classes`, or, without names, the one that fits. With rule 2, a
domain in which 255 is never beside a region is refused: 255 may be its region.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy  # loads ndimage at its first use

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.raster import MEGAPIXELS, UPRIGHT, open_raster, turn_of
from fedjax_bn.engine.inputs import UNLABELLED

PLAIN, INDEX, LOSSY = range(3)  # forms of masks: values as stored, indices of colours, and JPEG
_SPREAD = 32  # by which JPEG may change the channels of a grey, and neighbours of one value
_FLAT = 0.001  # share of a mask in JPEG above which greys are more than smooth borders
_REMEDY = "save it as a PNG with a number for each class"


def open_mask(
    content: bytes,
    max_megapixels: float = MEGAPIXELS,
    orientation: str = UPRIGHT,
    greys: bool = False,
) -> tuple[Any, int]:
    """Returns a mask as a Pillow image of mode L, and its form, see above.

    The orientation is that of `raster.open_image`. With `greys`, JPEG keeps its greys.

    Raises:
      ValueError: the file is not an image or has several, or it has colours, floats, numbers above
        255, or areas of grey in JPEG.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    image = open_raster(content, max_megapixels)
    turn, _ = turn_of(image, orientation)
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it has {frames} frames: {_REMEDY}")
    form = {"JPEG": LOSSY}.get(image.format, PLAIN)
    if form == LOSSY:
        levels = _of_colours(np.asarray(image.convert("RGB")), _SPREAD)
        if not greys:
            levels = _black_and_white(levels)
    elif image.mode in ("1", "L", "LA"):
        levels = np.asarray(image.convert("L"))
    elif image.mode == "P":
        palette, levels = np.array(image.getpalette("RGB"), np.uint8), np.asarray(image)
        palette = palette.reshape(-1, 3)
        if (palette == palette[:, :1]).all():
            levels = np.pad(palette[:, 0], (0, 256 - len(palette)))[levels]
        else:
            form = INDEX
    elif image.mode in ("RGB", "RGBA"):
        levels = _of_colours(np.asarray(image)[..., :3], 0)
    elif image.mode.startswith("I"):
        numbers = np.asarray(image).astype(np.int64)
        if not (numbers % 257).any():  # bytes stretched to 16 bits
            numbers //= 257
        if numbers.min() < 0 or numbers.max() > 255:
            raise ValueError(f"it has numbers up to {numbers.max()}, above 255: {_REMEDY}")
        levels = numbers.astype(np.uint8)
    else:
        raise ValueError(f"its pixels are of Pillow's mode {image.mode!r}, not numbers: {_REMEDY}")
    mask = Image.fromarray(levels)
    return mask if turn is None else mask.transpose(turn), form


def _of_colours(colours: np.ndarray, spread: int) -> np.ndarray:
    """Returns the green u8[H, W] of colours, which must be greys up to `spread`."""
    wrong = np.argwhere(np.ptp(colours.astype(np.int16), axis=2) > spread)
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"it has the colour {tuple(colours[row, column].tolist())} at row {row}, column "
            f"{column}, of which no class is known: {_REMEDY}"
        )
    return np.ascontiguousarray(colours[..., 1])


def _black_and_white(levels: np.ndarray) -> np.ndarray:
    """Returns 0 and 255 for greys u8[H, W]; raises ValueError if they have areas between both."""
    low, high = (f(levels, 3) for f in (scipy.ndimage.minimum_filter, scipy.ndimage.maximum_filter))
    flat = (levels >= 64) & (levels < 192) & (high - low < _SPREAD)
    if flat.mean() > _FLAT:
        row, column = np.argwhere(flat)[0].tolist()
        raise ValueError(
            f"it is a JPEG with areas of grey, such as {levels[row, column]} at row {row}, column "
            f"{column}, neither black nor white: {_REMEDY}"
        )
    return np.where(levels >= 128, 255, 0).astype(np.uint8)


def classes_of(
    present: np.ndarray,
    domains: Sequence[str],
    files: Sequence[str],
    classes: Sequence[str] = (),
    values: Mapping[int, int] | None = None,
) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Returns the classes of masks, and the class of each value.

    Args:
      present: bool[N, 256], which values each mask has.
      domains: N names, the domain of each mask.
      files: N names, for error messages.
      classes: names of the classes, the background first; empty to find their number.
      values: value -> class, or `UNLABELLED`, if a published dataset states it; None to find it by
        the rules above.

    Returns:
      The names of the classes; u8[256], the class of each value, `UNLABELLED` for the others; and
      a note for the user.

    Raises:
      ValueError: a mask has a value that is not a class or may be two, all masks have the same
        value alone, or `classes` has one name or the same name twice.
    """
    if len(classes) == 1 or len(set(classes)) < len(classes):
        raise ValueError(
            f"data.classes={tuple(classes)} must name the background and every region once, such "
            "as background,vessel"
        )
    found = np.flatnonzero(present.any(0)).tolist()
    if len(found) < 2:
        raise ValueError(
            f"all {len(files)} masks have the value {found[0]} alone, such as {files[0]}: give "
            "masks that show a region"
        )
    if values is None:
        values = _find(present, domains, files, len(classes))
    if unknown := [value for value in found if value not in values]:
        usual = (0, 1, UNLABELLED)
        rarest = min(unknown, key=lambda value: (present[:, value].sum(), value in usual, -value))
        file = files[int(np.flatnonzero(present[:, rarest])[0])]
        raise ValueError(
            f"{file} has the value {rarest}, and all masks together have {_listed(found)}: save "
            "masks with 0 and 255, or with 0, 1, 2 and so on, or name a class for each value, the "
            "darkest first, in data.classes" + f", which has {len(classes)}" * bool(classes)
        )
    shown = {number: [v for v in found if values[v] == number] for number in values.values()}
    count = 1 + max(number for number in shown if number != UNLABELLED)
    regions = ["foreground"] if count == 2 else map(str, range(1, count))
    names = tuple(classes) or ("background", *regions)
    about = [f"{_listed(shown[k])} {names[k]}" for k in range(count) if shown.get(k)]
    if shown.get(UNLABELLED):
        about.append(f"{_listed(shown[UNLABELLED])} without a label")
    table = np.full(256, UNLABELLED, np.uint8)
    table[list(values)] = list(values.values())
    return names, table, f"values of masks and what they are: {', '.join(about)}"


def absent_classes(
    present: np.ndarray, domains: Sequence[str], classes: Sequence[str], table: np.ndarray
) -> list[str]:
    """Returns a note that names the classes that no mask of a domain shows; else [].

    Args:
      present, domains: as in `classes_of`.
      classes, table: as it returns them.
    """
    owners, absent = np.array(domains), []
    for domain in dict.fromkeys(domains):
        shown = table[present[owners == domain].any(0)]
        if names := [name for number, name in enumerate(classes) if number not in shown]:
            absent.append(f"{domain} ({first_few(names)})")
    if not absent:
        return []
    return [f"domains whose masks never show some classes: {first_few(absent)}"]


def _find(
    present: np.ndarray, domains: Sequence[str], files: Sequence[str], count: int
) -> dict[int, int]:
    """Returns the class of each value by the rules above; {} if no rule applies.

    `count` is that of `data.classes`; 0 if it is empty.
    """
    owners = np.array(domains)
    owned = [present[owners == name].any(0) for name in set(domains)]
    found = np.flatnonzero(present.any(0)).tolist()
    others, numbers = {v for v in found if v}, [v for v in found if v != UNLABELLED]
    one = others <= {1, UNLABELLED} and not any(own[[1, UNLABELLED]].all() for own in owned)
    if count in (0, 2) and 0 in found and (len(others) == 1 or one):
        return {0: 0} | dict.fromkeys(others, 1)
    # The background alone would leave all regions, stored as 255, without a label.
    if 0 < numbers[-1] < (count or len(numbers)):
        beside = owners[present[:, UNLABELLED] & present[:, 1:UNLABELLED].any(1)]
        doubtful = present[:, UNLABELLED] & ~np.isin(owners, beside)
        if doubtful.any():
            raise ValueError(
                f"{files[int(doubtful.argmax())]} has 255, which no mask of its domain has beside "
                "a class, and other masks have numbers of classes: 255 may be a region or pixels "
                "without a label, so save regions as their numbers in all masks"
            )
        return {number: number for number in range(numbers[-1] + 1)} | {UNLABELLED: UNLABELLED}
    if len(found) == count:
        return {value: number for number, value in enumerate(found)}
    return {}


def _listed(values: Sequence[int]) -> str:
    *others, last = map(str, values)
    return f"{first_few(others)} and {last}" if others else last
