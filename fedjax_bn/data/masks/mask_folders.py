"""Any folder of images with masks; domains are subfolders, DOMAIN/images and DOMAIN/masks.

    left/images/1.jpg  left/masks/1.png  right/train/images/a.tif  right/train/masks/a.gif

Files are images, or volumes of NIfTI (.nii, .nii.gz), see `volumes`. A folder that itself holds
images and masks is one domain. If folders name the part (train, val, test) of every image of a
domain, the parts are its official split.

The mask of an image has the same name, but for the suffix, in the same further folders. Patterns
give other names, relative to the domain's folder: `images/{}_training.tif`, `masks/{}_manual1.gif`.
{} matches the text that both have in common, * any text; neither matches a /. Of several pairs of
patterns a domain takes the first that fits an image and a mask.

A mask is turned by its own EXIF orientation as its image is, and stretched to the nearest value. It
is a number for each pixel: grey of 1, 8 or 16 bits, equal red, green and blue, or a palette. With a
palette of greys a value is its grey, else the index of its colour. JPEG changes values, so masks in
it are black and white: 255 from 128 upwards.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.division.partition import groups_of
from fedjax_bn.data.masks.assemble import RESIZE, TILES, Pair, paired_source
from fedjax_bn.data.masks.volumes import AXIAL, Slices, is_volume
from fedjax_bn.data.pixels import decode
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import IMAGENET, chosen_folders, files_below, is_image, subfolders
from fedjax_bn.data.source import Source, part_in
from fedjax_bn.engine.inputs import UNLABELLED

_WHERE = (
    "it must hold one mask for each image, DOMAIN/images/NAME.jpg and DOMAIN/masks/NAME.png, or "
    "files that the patterns of data.pairs fit, such as images/{}.png,masks/{}_mask.png"
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
    large: str = RESIZE,
    orientation: str = decode.UPRIGHT,
    plane: str = AXIAL,
    window: Sequence[float | str] = (),
    **options: Any,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their masks, one pool a domain.

    Args:
      classes: names of the classes, see `assemble.classes_of`.
      pairs: patterns of an image, a mask, an image, ..., see above; empty for equal names.
      groups: a regular expression, see `partition.groups_of`.
      large: "resize" stretches images to the square; "tiles" cuts them, see `decode.cut`.
      plane, window: of scans, see `volumes.Slices`; for all others see `data.sets`.
    """
    # Without a path no folder is meant, not the current one, which `Path("")` is.
    root = Path(path or "PATH")
    pairs_by_domain, notes, scans = {}, [], []
    for name, folder in _domain_folders(root, domains).items():
        files = files_below(folder)
        scans = [file for file in files if is_volume(file.name)]
        images = scans or [file for file in files if is_image(file.name)]
        images, masks = zip(*_find_pairs(images, folder, pairs), strict=True)
        names, note = groups_of(name, folder, images, groups)
        notes.append(note)
        parts = [part_in(image.relative_to(folder).parts[:-1]) for image in images]
        pairs_by_domain[name] = list(map(Pair, images, masks, names, parts))
    notes += [] if groups else [_ALONE]
    slices = Slices(image_size, plane=plane, window=tuple(map(float, window)))
    conversion = slices if scans else _Images(image_size, large, orientation)
    return paired_source("masks", root, pairs_by_domain, conversion, classes, notes, **options)


class _Images(NamedTuple):
    """The conversion of image files, see `Conversion`; their tiles share name and `volume`."""

    image_size: int
    large: str
    orientation: str

    constants = IMAGENET
    threads = spacing = None

    @property
    def form(self) -> str:
        return f"{self.large}-{self.orientation}-{self.image_size}"

    @property
    def numbered(self) -> bool:
        return self.large == TILES

    def look(self, pair: Pair) -> tuple[int, np.ndarray]:
        with corruption_named(pair.image):
            image = decode.open_raster(pair.image.read_bytes())
            turn, tag = decode.turn_of(image, self.orientation)
            # Tags above 4 exchange width and height.
            size = image.size[::-1] if turn is not None and tag > 4 else image.size
        mask = self._mask_of(pair)
        if mask.size != size:
            raise ValueError(
                f"{pair.mask} has {mask.size} pixels, its image {pair.image} {size}: give masks of "
                "the image's size, or set data.orientation if EXIF turns one of them"
            )
        tiles = decode.tile_places(mask.height, mask.width, self.image_size)
        return len(tiles) if self.numbered else 1, np.array(mask.histogram()) > 0

    def _mask_of(self, pair: Pair) -> Any:
        with corruption_named(pair.mask):
            return open_mask(pair.mask.read_bytes(), self.orientation)

    def convert(self, pair: Pair, table: np.ndarray) -> tuple[np.ndarray, int]:
        from PIL.Image import Resampling

        with corruption_named(pair.image):
            image, tag = decode.open_image(pair.image.read_bytes(), self.orientation)
        mask, size = self._mask_of(pair), self.image_size
        if self.large == TILES:
            images, _ = decode.cut(np.asarray(image), size)
            masks, _ = decode.cut(table[np.asarray(mask)], size, UNLABELLED)
        else:
            images = np.asarray(image.resize((size, size), Resampling.BILINEAR))[None]
            # Between classes 1 and 3 there is no class 2, so values are never averaged.
            masks = table[np.asarray(mask.resize((size, size), Resampling.NEAREST))][None]
        return np.concatenate([images, masks[..., None]], -1), tag

    def describe(self, tags: Sequence[int]) -> tuple[str, ...]:
        return decode.orientation_notes(tags, self.orientation)


def open_mask(content: bytes, orientation: str = decode.UPRIGHT) -> Any:
    """Returns a mask as a Pillow image of mode L; the orientation is that of `decode.open_image`.

    A ValueError says that it has several frames, colours, floats or numbers above 255.
    """
    from PIL import Image

    image = decode.open_raster(content)
    turn, _ = decode.turn_of(image, orientation)
    frames, levels = getattr(image, "n_frames", 1), _levels_of(image)
    if levels is None or frames > 1 or levels.min() < 0 or levels.max() > 255:
        form = f"{image.mode} of Pillow in {frames} frames"
        raise ValueError(f"its pixels, {form}, are no classes: save a PNG of numbers 0 to 255")
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
    colours = np.asarray(image)[..., :3]
    if image.mode in ("RGB", "RGBA") and (colours == colours[..., :1]).all():
        return colours[..., 0]
    if image.mode.startswith("I"):
        numbers = np.asarray(image).astype(np.int64)
        # Multiples of 257 are bytes stretched to 16 bits.
        return numbers if (numbers % 257).any() else numbers // 257
    return None


def _domain_folders(root: Path, domains: Sequence[str]) -> dict[str, Path]:
    """Returns the folder of each domain: the folders in `root`, or `root` itself if it is one."""
    folders = subfolders(root)
    are_parts = bool(folders) and all(part_in([folder.name]) is not None for folder in folders)
    for domain in [inner for part in folders for inner in subfolders(part)] if are_parts else ():
        # Else the domains inside of parts would silently become one.
        if (domain / "images").is_dir():
            raise ValueError(f"{domain} is a domain in a part: move the part into the domain")
    holds_pairs = {"images", "masks"} & {folder.name.lower() for folder in folders}
    return chosen_folders(root, domains, are_parts or bool(holds_pairs), _WHERE)


def _find_pairs(
    files: Sequence[Path], folder: Path, patterns: Sequence[str]
) -> list[tuple[Path, Path]]:
    """Returns the images and masks among the files of a domain, by their names or by patterns."""
    key, kinds = (_key_by, patterns) if patterns else (_key_in, ("images", "masks"))
    for kinds_of_pair in zip(kinds[::2], kinds[1::2], strict=True):
        images, masks = (
            {file: key(file.relative_to(folder), kind) for file in files} for kind in kinds_of_pair
        )
        if any(images.values()) and any(masks.values()):
            break
    return pair_files(images, masks, folder, _WHERE)


def pair_files(
    images: Mapping[Path, str], masks: Mapping[Path, str], folder: Path, remedy: str
) -> list[tuple[Path, Path]]:
    """Returns the pairs of files that have one key but ""; ValueError unless each file has one."""
    by_key: dict[str, tuple[list[Path], list[Path]]] = {}
    for position, keys in enumerate((images, masks)):
        for file in filter(keys.get, keys):
            by_key.setdefault(keys[file], ([], []))[position].append(file)
    unpaired = [[*i, *m] for i, m in by_key.values() if (len(i), len(m)) != (1, 1)]
    if unpaired or not by_key:
        files = [str(file) for culprits in unpaired for file in culprits] or ["no images"]
        raise ValueError(
            f"{folder} needs one mask for each image, but has {first_few(files, 4)}: {remedy}"
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
