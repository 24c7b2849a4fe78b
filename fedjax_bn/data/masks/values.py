"""Reads masks from image files, and decides which class each of their values is.

A mask is a number for each pixel: grey of 1, 8 or 16 bits, equal red, green and blue, or a palette.
With a palette of greys a value is its grey, else the index of its colour. JPEG changes values, so
masks in it are black and white: 255 from 128 upwards.

The values of all masks together are 0 to C - 1, with 255 for a pixel without a label, or 0 and 255
(or 1, by domain) for the background and one region. Other values need names that state them, such
as `data.classes=background=255,disc=128,cup=0`, or `prostate=1+2` for two values of one class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.raster import MEGAPIXELS, UPRIGHT, open_raster, turn_of
from fedjax_bn.engine.inputs import UNLABELLED

_REMEDY = "save it as a PNG with a number for each class"


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
    if frames > 1 or levels.min() < 0 or levels.max() > 255:
        raise ValueError(f"it has {frames} frames, with numbers up to {levels.max()}: {_REMEDY}")
    mask = Image.fromarray(levels.astype(np.uint8))
    return mask if turn is None else mask.transpose(turn)


def _levels_of(image: Any) -> np.ndarray:
    """Returns the numbers [H, W] of a Pillow image."""
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
    raise ValueError(f"its pixels, {image.mode} of Pillow, are not numbers or greys: {_REMEDY}")


def _read_classes(classes: Sequence[str]) -> tuple[tuple[str, ...], dict[int, int] | None]:
    """Returns the names of `data.classes`, and value -> class if every name states its values.

    Raises:
      ValueError: there is one name alone or one twice, or values are not numbers up to 255.
    """
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
      classes: as in `_read_classes`; empty to find their number.
      values: value -> class, or `UNLABELLED`; None for the values above.

    Returns:
      The names of the classes; u8[256], the class of each value, `UNLABELLED` for other values; and
      a note for the user.

    Raises:
      ValueError: a mask has a value that is not a class or may be two, or all masks have the same
        value alone.
    """
    names, stated_values = _read_classes(classes)
    values = stated_values or values
    shown = np.flatnonzero(present.any(0)).tolist()
    if len(shown) < 2:
        raise ValueError(
            f"all {len(files)} masks have the value {shown[0]} alone, such as {files[0]}: give "
            "masks that show a region"
        )
    if values is None:
        values = _usual_values(present, domains, files, len(names))
    if unknown := [value for value in shown if value not in values]:
        # The rarest of them is most likely the slip of one file.
        rarest = min(unknown, key=lambda value: present[:, value].sum())
        raise ValueError(
            f"{files[int(present[:, rarest].argmax())]} has the value {rarest}, and all masks "
            f"together have {first_few(list(map(str, shown)))}: save masks with 0 and 255, or with "
            "0, 1, 2 and so on, or state values, data.classes=background=0,disc=128,cup=255"
            + f"; it has {len(names)} names"
            * bool(names)
        )
    count = 1 + max(number for number in values.values() if number != UNLABELLED)
    regions = ["foreground"] if count == 2 else map(str, range(1, count))
    names = names or ("background", *regions)
    table = np.full(256, UNLABELLED, np.uint8)
    table[list(values)] = list(values.values())
    meanings = dict(enumerate(names)) | {UNLABELLED: "without a label"}
    about = ", ".join(f"{value} {meanings[int(table[value])]}" for value in shown)
    return names, table, f"values of masks and what they are: {about}"


def _usual_values(
    present: np.ndarray, domains: Sequence[str], files: Sequence[str], count: int
) -> dict[int, int]:
    """Returns value -> class for masks of 0 and 255, or of 0 to C - 1.

    `count` is the number of names in `data.classes`; 0 if it is empty.
    """
    owners = np.array(domains)
    # By domain, because hospitals differ in how they store one region: 1 here, 255 there.
    by_domain = np.array([present[owners == name].any(0) for name in set(domains)])
    largest = int(np.flatnonzero(present[:, :UNLABELLED].any(0)).max(initial=0))
    mixed = by_domain[:, 1] & by_domain[:, UNLABELLED]
    if count in (0, 2) and largest < 2 and not mixed.any():
        return {0: 0, 1: 1, UNLABELLED: 1}
    classes = range(count or largest + 1)
    usual = dict(zip(classes, classes, strict=True)) | {UNLABELLED: UNLABELLED}
    # Where 255 is never beside a region, it may be the region, which would be lost as unlabelled.
    beside = owners[present[:, UNLABELLED] & present[:, 1:UNLABELLED].any(1)]
    doubtful = present[:, UNLABELLED] & ~np.isin(owners, beside)
    if doubtful.any() and largest in classes:
        raise ValueError(
            f"{files[int(doubtful.argmax())]} has 255, which no mask of its domain has beside a "
            "class, and other masks have numbers of classes: 255 may be a region or pixels without "
            "a label, so save regions as their numbers in all masks"
        )
    return usual


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
    return [f"domains whose masks never show some classes: {first_few(absent)}"] if absent else []
