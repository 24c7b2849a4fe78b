"""Writes the masks that a served model predicts, and the areas of their classes, into a folder.

    NAME.png     the mask of the image NAME.jpg, in the image's size
    masks.npz    instead, for an archive of images: masks u8[N, H, W], the number of each class
    areas.csv    image,class,pixels,share; one row for each image and class

A PNG is lossless. With two classes it is grey, 0 for the background and 255 for the other class;
with more it has a palette of colours, and its values are the numbers of the classes. So
`data.name=masks` reads such files as labels.
"""

import colorsys
import csv
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fedjax_bn.arguments.text import brief, cell
from fedjax_bn.data.masks.assemble import TILES
from fedjax_bn.data.pixels.decode import relative_names, resized
from fedjax_bn.data.pixels.raster import (
    MEGAPIXELS,
    UPRIGHT,
    open_image,
    open_raster,
    orientation_of,
    read_image,
    turned_by_pillow,
)
from fedjax_bn.data.pixels.tiles import cut, number_of_tiles, put_together
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.serving import Predictor
from fedjax_bn.serving.folder import About, new_folder

_AREAS, _MASKS = "areas.csv", "masks.npz"
_KEPT = 4  # decoded images, whose tiles are read one by one


class Pictures(NamedTuple):
    """Images of any size.

    Attributes:
      names: of the images.
      sizes: height and width of each.
      read: `read(k) -> [h, w, C]`, image k in its own size.
      files: whether the images are files, which get a mask file each.
    """

    names: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    read: Callable[[int], np.ndarray]
    files: bool


def of_files(files: Sequence[Path], root: Path, orientation: str) -> Pictures:
    """Returns image files as RGB bytes; their names are relative to `root`.

    Raises:
      ValueError: a file cannot be read.
    """

    def size(file: Path) -> tuple[int, int]:
        with corruption_named(file):
            image = open_raster(read_image(file, MEGAPIXELS))
            turns = orientation == UPRIGHT and not turned_by_pillow(image)
            width, height = image.size
            return (width, height) if turns and orientation_of(image) > 4 else (height, width)

    @lru_cache(_KEPT)
    def read(k: int) -> np.ndarray:
        with corruption_named(files[k]):
            content = read_image(files[k], MEGAPIXELS)
            return np.asarray(open_image(content, orientation=orientation)[0])

    return Pictures(relative_names(files, root), [*map(size, files)], read, files=True)


def of_archive(images: np.ndarray) -> Pictures:
    """Returns images [N, h, w, C]; their names are their numbers."""
    names = [str(k) for k in range(len(images))]
    return Pictures(names, [images.shape[1:3]] * len(images), images.__getitem__, files=False)


def write(
    pictures: Pictures, predict: Predictor, about: About, out: str, *, resize: bool = True
) -> None:
    """Writes the masks of images and `areas.csv` into a new folder, all of them or nothing.

    Args:
      pictures: the images.
      predict: the served model.
      about: of the served model.
      out: a folder that does not exist yet, or is empty.
      resize: whether images are stretched to the model's size; if not, they must have it. Images
        of a model of tiles are cut instead.

    Raises:
      ValueError: there is no `out`, or it is not empty; two images have one mask file; an image has
        another form than the model's; probabilities are not finite.
      OSError: the folder cannot be written.
    """
    if not out:
        raise ValueError(
            "the model gives masks, which are written to a folder: give --out FOLDER, a new one"
        )
    count, targets = len(about.classes), mask_files(pictures.names) if pictures.files else ()
    areas, masks = np.zeros((len(pictures.names), count), np.int64), []
    with new_folder(Path(out), "--out") as folder:
        for k, mask in predicted(pictures, predict, about, resize=resize):
            areas[k] = np.bincount(mask.ravel(), minlength=count)
            if pictures.files:
                save_png(folder / targets[k], mask, count)
            else:
                masks.append((k, mask))
        if masks:
            stacked = np.stack([mask for _, mask in sorted(masks, key=lambda pair: pair[0])])
            np.savez_compressed(folder / _MASKS, masks=stacked, classes=np.array(about.classes))
        _write_areas(folder / _AREAS, pictures.names, about.classes, areas)


def predicted(
    pictures: Pictures, predict: Predictor, about: About, *, resize: bool = True
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number and the mask u8[h, w] of each image, in the order in which they are ready.

    Probabilities of a stretched image are stretched back bilinearly, and a pixel's class is the one
    of the largest; masks of tiles are put together. Arguments and errors are those of `write`.
    """
    tiled, size = about.masks == TILES, about.shape[0]
    counts = [number_of_tiles(*sides, size) if tiled else 1 for sides in pictures.sizes]
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts

    def sample(i: int) -> np.ndarray:
        image = pictures.read(int(owner[i]))
        if tiled:
            return cut(image, size)[0][i - first[owner[i]]]
        return resized(image[None], about.shape)[0] if resize else image

    waiting: dict[int, dict[int, np.ndarray]] = {}
    for index, found in predict.blocks(len(owner), lambda index: np.stack([*map(sample, index)])):
        for i, probabilities in zip(index.tolist(), found, strict=True):
            k = int(owner[i])
            if not np.isfinite(probabilities).all():
                raise ValueError(
                    f"the model's probabilities of image {brief(pictures.names[k])} are not "
                    "finite: give another model, or images like those that it was trained on"
                )
            if not tiled:
                yield k, stretched(probabilities, *pictures.sizes[k]).argmax(-1).astype(np.uint8)
                continue
            parts = waiting.setdefault(k, {})
            parts[i - int(first[k])] = probabilities.argmax(-1).astype(np.uint8)
            if len(parts) == counts[k]:
                tiles = np.stack([part for _, part in sorted(waiting.pop(k).items())])
                places = cut(np.empty(pictures.sizes[k], bool), size)[1]
                yield k, put_together(tiles, places, pictures.sizes[k])


def stretched(probabilities: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns probabilities f32[H, W, C] as f32[height, width, C], by Pillow's bilinear filter."""
    from PIL import Image

    if probabilities.shape[:2] == (height, width):
        return probabilities
    planes = [
        Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR)
        for plane in np.moveaxis(probabilities.astype(np.float32), -1, 0).copy()
    ]
    return np.stack([np.asarray(plane) for plane in planes], -1)


def mask_files(names: Sequence[str]) -> list[PurePosixPath]:
    """Returns the mask file of each image, NAME.png for NAME.jpg, relative to their folder.

    Raises:
      ValueError: two images have one mask file, or a name leaves the folder.
    """
    owners: dict[PurePosixPath, str] = {}
    for name in names:
        target = PurePosixPath(name).with_suffix(".png")
        if target.is_absolute() or ".." in target.parts:
            raise ValueError(f"image {brief(name)} would leave the folder of --out: rename it")
        if target in owners:
            raise ValueError(
                f"images {brief(owners[target])} and {brief(name)} would both have the mask "
                f"{brief(str(target))}: rename one, or predict one folder at a time"
            )
        owners[target] = name
    return list(owners)


def save_png(path: Path, mask: np.ndarray, classes: int) -> None:
    """Writes classes u8[H, W] as a PNG, see above.

    Raises:
      OSError: the file exists, or cannot be written.
    """
    from PIL import Image

    image = Image.fromarray(mask * np.uint8(255) if classes == 2 else mask)
    if classes > 2:
        image.putpalette(palette(classes).tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names that differ in capitals are one file on some systems, so none is overwritten.
    with open(path, "xb") as file:
        image.save(file, "PNG")


def palette(classes: int) -> np.ndarray:
    """Returns the colours u8[classes, 3] of masks: black for the background, then bright hues."""
    # Multiples of the golden ratio give neighbours very different hues, for any number of classes.
    hues = [(0.618034 * k) % 1 for k in range(classes - 1)]
    colours = [(0.0, 0.0, 0.0), *(colorsys.hsv_to_rgb(hue, 0.8, 1.0) for hue in hues)]
    return np.rint(255 * np.array(colours)).astype(np.uint8)


def _write_areas(
    path: Path, names: Sequence[str], classes: Sequence[str], areas: np.ndarray
) -> None:
    """Writes pixels i64[N, C] of each image's classes, and their share of the image."""
    # Bytes of a file name that are not text become \udcff.
    how = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
    with open(path, "x", **how) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("image", "class", "pixels", "share"))
        for name, row in zip(names, areas.tolist(), strict=True):
            for one, pixels in zip(classes, row, strict=True):
                table.writerow((cell(name), cell(one), pixels, f"{pixels / sum(row):.6g}"))
