"""Makes a source from pairs of files, an image and its mask: pixels, and a class for each of them.

A mask refers to its image as viewers show it, turned upright by its EXIF, or, with the orientation
"stored", to the rows of its file; a mask with an EXIF orientation of its own is turned likewise.
Masks are stretched as their images are, to the nearest value. `values` has the forms of masks, and
the rules by which values become classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.label_trees import MASK, VOLUME
from fedjax_bn.data.masks.values import absent_classes, classes_of, open_mask
from fedjax_bn.data.messages import in_threads
from fedjax_bn.data.pixels.cache import Write, cached_array, cached_numbers
from fedjax_bn.data.pixels.decode import decode, hash_of_files
from fedjax_bn.data.pixels.raster import (
    MEGAPIXELS,
    STORED,
    UPRIGHT,
    open_raster,
    orientation_of,
    turned_by_pillow,
)
from fedjax_bn.data.pixels.tiles import cut, number_of_tiles
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import IMAGENET
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import UNLABELLED

RESIZE, TILES = "resize", "tiles"
_FORM = 3  # raise it when the same files would give other masks


class Pair(NamedTuple):
    """An image and its mask.

    Attributes:
      image, mask: the files.
      name: of the sample, such as its image's file. Samples with one name are never separated.
      part: TRAIN, VALIDATION or TEST; None if the dataset does not divide its images.
    """

    image: Path
    mask: Path
    name: str
    part: int | None = None


class Squares(NamedTuple):
    """The conversion of images and masks into squares of one size.

    Attributes:
      image_size: pixels a side.
      large: "resize" stretches an image to the square; "tiles" cuts it at its own resolution, see
        `pixels.tiles`.
      cache, progress, max_megapixels, orientation: see `pixels.decode`.
    """

    image_size: int
    large: str = RESIZE
    cache: str | Path | None = None
    progress: bool = True
    max_megapixels: float = MEGAPIXELS
    orientation: str = UPRIGHT


def to_source(
    name: str,
    root: Path,
    domains: Mapping[str, Sequence[Pair]],
    squares: Squares,
    *,
    classes: Sequence[str] = (),
    values: Mapping[int, int] | None = None,
    notes: Sequence[str] = (),
) -> Source:
    """Returns the images u8[N, size, size, 3] and masks u8[N, size, size] of all domains.

    With tiles, N counts tiles; those of an image follow each other, and share their name and their
    `volume`. A pixel that an earlier tile shows, and the padding of a small image, are without a
    label.

    Args:
      name: of the dataset.
      root: folder of the files, to which their names are relative.
      domains: name -> its pairs, at least one each.
      squares: how images become squares.
      classes: names of the classes, the background first; empty to find their number.
      values: value of a mask -> class, or `UNLABELLED`; None to find it, see `values`.
      notes: further notes for the user.

    Raises:
      ValueError: a file cannot be read, or a mask has another size than its image, colours or
        unknown values.
      OSError: the cache cannot be written.
    """
    pairs = [pair for members in domains.values() for pair in members]
    owners = [domain for domain, members in domains.items() for _ in members]
    images, masks = [pair.image for pair in pairs], [pair.mask for pair in pairs]
    size, is_cut = squares.image_size, squares.large == TILES
    sizes, present = _survey(pairs, root, squares)  # before hours of decoding
    paths = list(map(str, masks))
    classes, table, values_note = classes_of(present, owners, paths, classes, values)
    counts = [number_of_tiles(h, w, size) if is_cut else 1 for w, h in sizes.tolist()]
    pixels, decoding_notes = decode(
        images,
        size,
        root=root,
        cache=squares.cache,
        progress=squares.progress,
        max_megapixels=squares.max_megapixels,
        orientation=squares.orientation,
        tiles=np.array(counts) if is_cut else None,
    )
    # Tiles of an image are scored together, as the slices of a volume are.
    labels = {MASK: _decode_masks(masks, counts, table, root, squares)}
    if is_cut:
        labels[VOLUME] = np.repeat(np.arange(len(pairs), dtype=np.int32), counts)
    row_owners, pools = np.repeat(owners, counts), []
    for domain, members in domains.items():
        # Pairs of a domain follow each other, so that a slice needs no copy of the pixels.
        start, count = int((row_owners == domain).argmax()), int((row_owners == domain).sum())
        rows = slice(start, start + count)
        tiles = [count for count, owner in zip(counts, owners, strict=True) if owner == domain]
        parts = [pair.part for pair in members]
        pools.append(
            Pool(
                domain,
                pixels[rows],
                {leaf: array[rows] for leaf, array in labels.items()},
                np.repeat([pair.name for pair in members], tiles),
                None if None in parts else np.repeat(np.array(parts, np.int8), tiles),
            )
        )
    about = ", ".join(f"{domain} {len(members)}" for domain, members in domains.items())
    notes = [*notes, f"{len(pairs)} images with masks ({about})", values_note]
    notes += absent_classes(present, owners, classes, table)
    if is_cut:
        notes.append(f"images cut into {len(pixels)} tiles of {size} pixels a side")
    key = f"{squares.large} {hash_of_files([*images, *masks], root, size)}"
    notes = (*notes, *decoding_notes)
    return check_source(Source(name, classes, tuple(pools), *IMAGENET, notes=notes, key=key))


def _survey(pairs: Sequence[Pair], root: Path, squares: Squares) -> tuple[np.ndarray, np.ndarray]:
    """Reads sizes and values of masks, which are kept in the cache.

    Returns:
      i32[N, 2], width and height of each image as used, which are its mask's too; bool[N, 256], the
      values of each mask.

    Raises:
      ValueError: a file cannot be read, or a mask has another size than its image.
    """
    megapixels, orientation = squares.max_megapixels, squares.orientation

    def look(pair: Pair) -> list[int]:
        with corruption_named(pair.image):
            image = open_raster(pair.image.read_bytes(), megapixels)
            turned = orientation != STORED and not turned_by_pillow(image)
            # Tags above 4 exchange width and height.
            sides = image.size[::-1] if turned and orientation_of(image) > 4 else image.size
        with corruption_named(pair.mask):
            mask = open_mask(pair.mask.read_bytes(), megapixels, orientation)
        # 256 bits in eight numbers, because the cache keeps rows of numbers.
        seen = np.array(mask.histogram()) > 0
        return [*sides, *mask.size, *np.packbits(seen).view("<i4").tolist()]

    key = hash_of_files([file for pair in pairs for file in pair[:2]], root, _FORM)
    name = f"looking at masks-{root.resolve().name}-{orientation}-{key}"
    rows = cached_numbers(squares.cache, name, pairs, look, 12, squares.progress)
    for pair, (width, height, *mask_size) in zip(pairs, rows[:, :4].tolist(), strict=True):
        if mask_size != [width, height]:
            raise ValueError(
                f"{pair.mask} has {mask_size[0]} x {mask_size[1]} pixels, but its image "
                f"{pair.image} has {width} x {height}: give a mask of the image's size, or set "
                "data.orientation if EXIF turns one of them"
            )
    present = np.unpackbits(np.ascontiguousarray(rows[:, 4:]).view(np.uint8), axis=1).astype(bool)
    return rows[:, :2], present


def _decode_masks(
    files: Sequence[Path],
    counts: Sequence[int],
    table: np.ndarray,
    root: Path,
    squares: Squares,
) -> np.ndarray:
    """Returns the classes u8[sum of counts, size, size] of masks, cached.

    Args:
      files: of the masks.
      counts: N numbers, the tiles of each; 1 if they are stretched.
      table: u8[256], the class of each value.
      root, squares: as in `_survey`.
    """
    from PIL import Image

    size, megapixels = squares.image_size, squares.max_megapixels
    ends = np.cumsum(counts)

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> None:
            with corruption_named(files[k]):
                mask = open_mask(files[k].read_bytes(), megapixels, squares.orientation)
            if squares.large == TILES:
                tiles = cut(table[np.asarray(mask)], size, UNLABELLED)[0]
            else:
                # Between classes 1 and 3 there is no class 2, so values are never averaged.
                mask = mask.resize((size, size), Image.Resampling.NEAREST)
                tiles = table[np.asarray(mask)][None]
            write(tiles, int(ends[k] - counts[k]))

        list(in_threads(convert, range(len(files)), "masks", squares.progress))
        return ()

    form = f"{squares.large}-{squares.orientation}-{table.tobytes().hex()}"
    name = f"{root.resolve().name}-masks-{_FORM}-{form}-{hash_of_files(files, root, size)}"
    return cached_array(squares.cache, name, (int(ends[-1]), size, size), make)[0]
