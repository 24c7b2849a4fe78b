"""Any folder of images with masks; domains are subfolders, DOMAIN/images and DOMAIN/masks.

    left/images/1.jpg  left/masks/1.png  right/train/images/a.tif  right/train/masks/a.gif

Files are images, or volumes of NIfTI (.nii, .nii.gz), whose slices `volumes` makes. `pairing` has
the names by which an image finds its mask, `values` how values of masks become classes. A folder
that itself holds images and masks is one domain, which `data.num_clients` divides. If folders name
the part (train, val, test) of every image of a domain, the parts are its official split.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.data.boxes.labelled import Slips, part_of
from fedjax_bn.data.masks import volumes
from fedjax_bn.data.masks.assemble import Pair, Squares, to_source
from fedjax_bn.data.masks.pairing import find_pairs, groups_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import relative_names
from fedjax_bn.data.sets.folders import files_below, is_image, subfolders
from fedjax_bn.data.source import TRAIN, Source

_WHERE = (
    "it must hold images with masks, or a folder of such for each domain: DOMAIN/images/NAME.jpg "
    "with DOMAIN/masks/NAME.png, one for each image and of its size"
)
_NO_SPLIT = (
    "domains whose folders name a part (train, val, test) for some images only, or for no training "
    "image; they are divided as if no part were named"
)
_ALONE = (
    "samples of one group are in one split; images that differ only in a side (L and R, left and "
    "right, OD and OS) are a group, each other image is alone: if several are of one patient, "
    "set data.groups to a regular expression for the patient in the path of an image"
)


def load_mask_folders(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    pairs: Sequence[str] = (),
    groups: str = "",
    plane: str = volumes.AXIAL,
    window: Sequence[float | str] = (),
    **options: Any,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their masks, one pool a domain.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: names of the classes, the background first, with their values if these are not 0 to
        C - 1, see `values`; empty to find their number.
      pairs: patterns, see `pairing`; empty for equal names.
      groups: a regular expression, see `pairing.groups_of`.
      plane, window: of scans, see `volumes.Slices`.
      **options: `large`, `cache`, `progress`, `max_megapixels` and `orientation` of
        `assemble.Squares`.

    Returns:
      Source "masks".

    Raises:
      FileNotFoundError: there is no such folder, or a requested domain is missing.
      ValueError: a file is damaged, or an image and its mask do not suit each other; the file is
        named.
      OSError: the cache cannot be written.
    """
    # Without a path no folder is meant, not the current one, which `Path("")` is.
    root, slips, squares = Path(path or "PATH"), Slips(), Squares(image_size, **options)
    pairs_by_domain, notes, has_scans = {}, [], {}
    for name, folder in _domain_folders(root, domains).items():
        files = files_below(folder)
        scans = [file for file in files if volumes.is_volume(file.name)]
        images = [file for file in files if is_image(file.name)]
        has_scans[bool(scans)] = name
        paired = find_pairs(scans or images, folder, pairs)
        names, note = groups_of(name, folder, paired.images, groups)
        notes.append(note)
        parts = [part_of(image.relative_to(folder).parts[:-1]) for image in paired.images]
        # A split is official only if it says of every image what it is for.
        if None in parts or TRAIN not in parts:
            slips.add(_NO_SPLIT, name, count=int(set(parts) != {None}))
            parts = [None] * len(parts)
        for file in relative_names([*paired.strays, *(images if scans else ())], root):
            slips.add("files that are neither images nor masks left out", file)
        pairs_by_domain[name] = list(map(Pair, paired.images, paired.masks, names, parts))
    notes += [*slips.notes(), *([] if groups else [_ALONE])]
    if len(has_scans) == 2:
        raise ValueError(
            f"{root}: {has_scans[True]!r} has NIfTI volumes and {has_scans[False]!r} images: "
            "choose domains of one kind by data.domains"
        )
    if False in has_scans:
        return to_source("masks", root, pairs_by_domain, squares, classes=classes, notes=notes)
    slices = volumes.Slices(
        image_size,
        plane=plane,
        window=tuple(map(float, window)),
        cache=squares.cache,
        progress=squares.progress,
    )
    return volumes.to_source("masks", root, pairs_by_domain, slices, classes=classes, notes=notes)


def _domain_folders(root: Path, domains: Sequence[str]) -> dict[str, Path]:
    """Returns the folder of each domain: the folders in `root`, or `root` itself if it is one.

    Raises:
      FileNotFoundError: there is no such folder, or a requested domain is missing.
      ValueError: domains are in folders of parts.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"data.path={root} is not a folder: {_WHERE}")
    folders = {folder.name: folder for folder in subfolders(root)}
    has_only_parts = all(part_of([name]) is not None for name in folders)
    if has_only_parts or any(name.lower() in ("images", "masks") for name in folders):
        for domain in [inner for part in folders.values() for inner in subfolders(part)]:
            # Else the domains inside of parts would silently become one.
            if has_only_parts and (domain / "images").is_dir():
                raise ValueError(
                    f"{domain} is a domain in a folder of a part: move it to "
                    f"{root / domain.name / domain.parent.name}, for DOMAIN is around its parts"
                )
        folders = {root.resolve().name: root}
    if missing := [name for name in domains if name not in folders]:
        raise FileNotFoundError(
            f"data.domains names {first_few(missing)}, but data.path {root} has "
            f"{first_few(list(folders))}: {_WHERE}"
        )
    return {name: folders[name] for name in domains or folders}
