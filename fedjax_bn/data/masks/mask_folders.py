"""Any folder of images with masks; domains are subfolders, DOMAIN/images and DOMAIN/masks.

    left/images/1.jpg  left/masks/1.png  right/train/images/a.tif  right/train/masks/a.gif

Files are images, or volumes of NIfTI (.nii, .nii.gz), whose slices `volumes` makes; `assemble` has
how values of masks become classes. A folder that itself holds images and masks is one domain, which
`data.num_clients` divides. If folders name the part (train, val, test) of every image of a domain,
the parts are its official split.

The mask of an image has the same name, but for the suffix. Around or in `images` and `masks` there
may be folders, such as train; others, such as `fov` for the field of view, are left out. For other
names there are patterns, an image's and its mask's, relative to the domain's folder:
`images/{}_training.tif` and `masks/{}_manual1.gif`. {} matches the text that both have in common,
* any text; neither matches a /. Where domains differ, several pairs of patterns are given, of which
a domain takes the first that fits an image and a mask.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.division.partition import groups_of
from fedjax_bn.data.masks.assemble import ImageSquares, Pair, convert_images, paired_source
from fedjax_bn.data.masks.volumes import AXIAL, Slices, convert_volumes, is_volume
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.folders import files_below, is_image, subfolders
from fedjax_bn.data.source import TRAIN, Source, part_in

_WHERE = (
    "it must hold a folder of each domain with one mask for each image, DOMAIN/images/NAME.jpg and "
    "DOMAIN/masks/NAME.png, or files that the patterns of data.pairs fit, such as "
    "images/{}.png,masks/{}_mask.png; data.domains chooses among folders"
)
_ALONE = "images are divided one by one but for sides: if several are of a patient, set data.groups"


def load_mask_folders(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    pairs: Sequence[str] = (),
    groups: str = "",
    plane: str = AXIAL,
    window: Sequence[float | str] = (),
    **options: Any,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their masks, one pool a domain.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: names of the classes, see `assemble.classes_of`.
      pairs: patterns of an image, a mask, an image, ..., see above; empty for equal names.
      groups: a regular expression, see `partition.groups_of`.
      plane, window: of scans, see `volumes.Slices`.
      **options: `large`, `cache`, `progress`, `max_megapixels` and `orientation` of
        `assemble.ImageSquares`.

    Returns:
      Source "masks".

    Raises:
      FileNotFoundError: a domain's folder is missing; further errors are those of `paired_source`.
    """
    # Without a path no folder is meant, not the current one, which `Path("")` is.
    root, squares = Path(path or "PATH"), ImageSquares(image_size, **options)
    pairs_by_domain, notes, scans = {}, [], []
    for name, folder in _domain_folders(root, domains).items():
        files = files_below(folder)
        images = [file for file in files if is_image(file.name)]
        scans = [file for file in files if is_volume(file.name)]
        matched = _find_pairs(scans or images, folder, pairs)
        names, note = groups_of(name, folder, [image for image, _ in matched], groups)
        notes.append(note)
        parts = [part_in(image.relative_to(folder).parts[:-1]) for image, _ in matched]
        # A split is official only if it says of every image what it is for.
        if None in parts or TRAIN not in parts:
            parts = [None] * len(parts)
        pairs_by_domain[name] = [
            Pair(*pair, name, part) for pair, name, part in zip(matched, names, parts, strict=True)
        ]
    notes += [] if groups else [_ALONE]
    conversion = convert_images(squares)
    if scans:
        storage = {"cache": squares.cache, "progress": squares.progress}
        greys = tuple(map(float, window))
        conversion = convert_volumes(Slices(image_size, plane=plane, window=greys, **storage))
    return paired_source("masks", root, pairs_by_domain, conversion, classes, notes)


def _domain_folders(root: Path, domains: Sequence[str]) -> dict[str, Path]:
    """Returns the folder of each domain: the folders in `root`, or `root` itself if it is one."""
    folders = {folder.name: folder for folder in subfolders(root)} if root.is_dir() else {}
    has_only_parts = all(part_in([name]) is not None for name in folders)
    if folders and (has_only_parts or {"images", "masks"} & {name.lower() for name in folders}):
        for domain in [inner for part in folders.values() for inner in subfolders(part)]:
            # Else the domains inside of parts would silently become one.
            if has_only_parts and (domain / "images").is_dir():
                raise ValueError(
                    f"{domain} is a domain in a folder of a part: move it to "
                    f"{root / domain.name / domain.parent.name}, for DOMAIN is around its parts"
                )
        folders = {root.resolve().name: root}
    missing = [name for name in domains if name not in folders]
    if missing or not folders:
        raise FileNotFoundError(
            f"data.path={root} has the folders {first_few(list(folders)) or '(none)'}, but not "
            f"{first_few(missing) or 'those of domains'}: {_WHERE}"
        )
    return {name: folders[name] for name in domains or folders}


def _find_pairs(
    files: Sequence[Path], folder: Path, patterns: Sequence[str]
) -> list[tuple[Path, Path]]:
    """Returns the images and masks among the files of a domain, by their names or by patterns."""
    key, kinds = (_key_by, patterns) if patterns else (_key_in, ("images", "masks"))
    for image_kind, mask_kind in zip(kinds[::2], kinds[1::2], strict=True):
        images, masks = (
            {file: key(file.relative_to(folder), kind) for file in files}
            for kind in (image_kind, mask_kind)
        )
        if any(images.values()) and any(masks.values()):
            break
    return pair_files(images, masks, folder, _WHERE)


def pair_files(
    images: Mapping[Path, str], masks: Mapping[Path, str], folder: Path, remedy: str
) -> list[tuple[Path, Path]]:
    """Returns the pairs of files in a folder that have one key; those with the key "" are left out.

    Raises:
      ValueError: there are no pairs, or a key does not have one image and one mask.
    """
    by_key: dict[str, tuple[list[Path], list[Path]]] = {}
    for position, keys in enumerate((images, masks)):
        for file, key in keys.items():
            if key:
                by_key.setdefault(key, ([], []))[position].append(file)
    unpaired = [[*i, *m] for i, m in by_key.values() if (len(i), len(m)) != (1, 1)]
    if unpaired or not by_key:
        culprits = first_few([str(file) for files in unpaired for file in files], 4)
        raise ValueError(
            f"{folder} needs one mask for each image, but has {culprits or 'no images'}: {remedy}"
        )
    return [(image, mask) for (image,), (mask,) in by_key.values()]


def stem_of(file: Path) -> str:
    """Returns a file's name without its suffix, .nii.gz being one."""
    return file.name[: -len(".nii.gz")] if file.name.lower().endswith(".nii.gz") else file.stem


def _key_in(name: Path, kind: str) -> str:
    """Returns the other folders and the stem of a file in or below a folder; "" of others."""
    above = [part.lower() for part in name.parts[:-1]]
    if kind not in above:
        return ""
    # Without it, images/train/1.png and train/masks/1.png have one key.
    above.remove(kind)
    return "/".join([*above, stem_of(name)])


def _key_by(name: Path, pattern: str) -> str:
    """Returns what the {} of a pattern matches in a name; "" if the pattern does not fit."""
    # Escaped first, so that dots and brackets in names mean themselves.
    expression = re.escape(pattern).replace(r"\{\}", "([^/]+)").replace(r"\*", "[^/]*")
    match = re.fullmatch(expression, name.as_posix())
    return match[1] if match else ""
