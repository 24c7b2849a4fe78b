"""Finds the mask of every image in a domain's folder, and the images that belong together.

Images are the files in a folder named `images`, and the mask of an image has the same name, but for
the suffix, in a folder named `masks`. Around or in these there may be folders, such as train, val
and test. Other folders, such as `fov` for the field of view, are left out.

For other names there are patterns, an image's and its mask's, relative to the domain's folder:
`images/{}_training.tif` and `masks/{}_manual1.gif`. {} matches the text that both have in common,
* any text; neither matches a /. Where domains differ, several pairs of patterns are given, of which
a domain takes the first that fits an image and a mask.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_bn.data.boxes.labelled import part_of
from fedjax_bn.data.messages import first_few

# The eyes, breasts or lungs of one person: the letters of a side between digits and signs.
_SIDE = re.compile(r"(?<![a-z])(?:l|r|left|right|od|os)(?![a-z])", re.IGNORECASE)
_REMEDY = (
    "each image images/NAME.* needs one mask masks/NAME.*; correct the files, or set data.pairs to "
    "patterns such as images/{}.png,masks/{}_mask.png; data.domains chooses among folders"
)

# What an image and its mask have in common: their folders and stem, or what {} matches.
_Key = tuple[str, ...]


class _Paired(NamedTuple):
    """The images of a domain and their masks, N files each, and the files that are neither."""

    images: list[Path]
    masks: list[Path]
    strays: list[Path]


def find_pairs(files: Sequence[Path], folder: Path, patterns: Sequence[str] = ()) -> _Paired:
    """Pairs the images and masks of a domain by their names, or by patterns.

    Args:
      files: images, or volumes of NIfTI, in the folder.
      folder: of the domain.
      patterns: an image's, a mask's, an image's, ...; empty for equal names.

    Raises:
      ValueError: as in `pair_by_key`, or two files have one key.
    """
    if not patterns:
        images, masks = (_in_folder(files, folder, name) for name in ("images", "masks"))
        return pair_by_key(images, masks, files, folder)
    for image_pattern, mask_pattern in zip(patterns[::2], patterns[1::2], strict=True):
        images, masks = (_matched(files, folder, p) for p in (image_pattern, mask_pattern))
        if images and masks:
            break
    return pair_by_key(images, masks, files, folder)


def pair_by_key(
    images: Mapping[_Key, Path],
    masks: Mapping[_Key, Path],
    files: Sequence[Path],
    folder: Path,
    remedy: str = _REMEDY,
) -> _Paired:
    """Pairs images and masks with equal keys; all of `files` that are neither are strays.

    Raises:
      ValueError: there are no images, an image has no mask, or a mask no image.
    """
    if not images:
        raise ValueError(f"{folder} has no images with masks: {remedy}")
    for files_by_key, partners, kind, lacking in (
        (images, masks, "images", "mask"),
        (masks, images, "masks", "image"),
    ):
        if alone := [str(file) for key, file in files_by_key.items() if key not in partners]:
            raise ValueError(
                f"{len(alone)} {kind} in {folder} have no {lacking}, such as "
                f"{first_few(alone, 3)}: {remedy}"
            )
    used = {*images.values(), *masks.values()}
    strays = [file for file in files if file not in used]
    return _Paired(list(images.values()), [masks[key] for key in images], strays)


def stem_of(file: Path) -> str:
    """Returns a file's name without its suffix, .nii.gz being one."""
    return file.name[: -len(".nii.gz")] if file.name.lower().endswith(".nii.gz") else file.stem


def _in_folder(files: Sequence[Path], folder: Path, name: str) -> dict[_Key, Path]:
    """Returns the files in or below a folder of a name, by the other folders and their stem."""
    by_key: dict[_Key, Path] = {}
    for file in files:
        above = [part.lower() for part in file.relative_to(folder).parts[:-1]]
        if name in above:
            # Without it, images/train/1.png and train/masks/1.png have one key.
            above.remove(name)
            _add(by_key, (*above, stem_of(file)), file)
    return by_key


def _matched(files: Sequence[Path], folder: Path, pattern: str) -> dict[_Key, Path]:
    """Returns the files that a pattern fits, by what its {} matches."""
    # Escaped first, so that dots and brackets in names mean themselves.
    expression = re.escape(pattern).replace(r"\{\}", "([^/]+)").replace(r"\*", "[^/]*")
    by_key: dict[_Key, Path] = {}
    for file in files:
        if match := re.fullmatch(expression, file.relative_to(folder).as_posix()):
            _add(by_key, (match[1],), file)
    return by_key


def _add(by_key: dict[_Key, Path], key: _Key, file: Path) -> None:
    twin = by_key.setdefault(key, file)
    if twin is not file:
        raise ValueError(
            f"{twin} and {file} have one name, but an image needs one mask: remove one of them, or "
            "choose by data.pairs"
        )


def groups_of(
    domain: str, folder: Path, images: Sequence[Path], pattern: str = ""
) -> tuple[list[str], str]:
    """Returns the names of a domain's images, equal for images of one group, and a note on them.

    Args:
      domain: its name.
      folder: of the domain.
      images: N files in it.
      pattern: a regular expression that is searched in the path of an image in the folder; the
        group is what its parentheses match, or the whole match. With "", images that differ only
        in a side (L and R, left and right, OD and OS) are one group, in any part (train, val,
        test), and each other image is alone.

    Raises:
      ValueError: the pattern does not fit an image.
    """
    names = [image.relative_to(folder).as_posix() for image in images]
    if pattern:
        matches = [re.search(pattern, name) for name in names]
        if None in matches:
            raise ValueError(
                f"{images[matches.index(None)]} does not fit the regular expression "
                f"data.groups={pattern}, searched in {names[matches.index(None)]}: correct it"
            )
        groups = ["/".join(map(str, m.groups())) or m[0] for m in matches if m]
        note = f"{len(set(groups))} groups of {len(names)} images by data.groups"
    else:
        sideless = list(map(_sideless, names))
        sizes = Counter(sideless)
        groups = [
            common if sizes[common] > 1 else name
            for common, name in zip(sideless, names, strict=True)
        ]
        note = f"{sum(size > 1 for size in sizes.values())} groups that differ only in a side"
    return [f"{domain}/{group}" for group in groups], f"{domain}: {note}"


def _sideless(name: str) -> str:
    """Returns the name of an image with * for sides, without parts and suffix; or as it is."""
    if not _SIDE.search(name):
        return name
    folders = [part for part in Path(name).with_suffix("").parts if part_of([part]) is None]
    return _SIDE.sub("*", "/".join(folders))
