"""Writes the masks that a served model predicts, and the areas of their classes, into a folder.

    NAME.png      the mask of the image NAME.jpg, in the image's size
    NAME.nii.gz   the mask of the volume NAME.nii.gz, with its header, from a model of slices
    masks.npz     the masks u8[N, H, W] of an archive of images, with the names of their classes
    areas.csv     image,class,pixels,share; one row for each image and class; also ml of volumes

A PNG is lossless. With two classes it is grey, 0 for the background and 255 for the other class;
with more it has a palette of colours, and its values are the numbers of the classes. So
`data.name=masks` reads such files as labels. The values of other masks are the numbers too.
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
from fedjax_bn.data.masks.scans import save_mask, shape_of, slices_of, uncropped
from fedjax_bn.data.masks.volumes import Slices
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
_KEPT, _SCANS = 4, 32  # decoded images and scans, whose tiles and slices are read one by one


class Pictures(NamedTuple):
    """Images, or scans, and how they become a model's samples and get their masks.

    Attributes:
      names: of the images.
      counts: how many samples each becomes: 1, its tiles, or its slices.
      sample: `sample(k, j) -> [H, W, C]`, sample j of image k.
      part: `part(k, probabilities f[H, W, classes]) -> u8[...]`, the mask of a sample.
      whole: `whole(k, parts) -> u8[h, w]`, or u8[D, h, w], the mask of image k.
      suffix: of mask files; "" if masks have the names of images, None if they are one array.
      save: `save(path, k, mask)` writes a mask file.
      millilitres: of a voxel of each scan; () for images.
    """

    names: Sequence[str]
    counts: Sequence[int]
    sample: Callable[[int, int], np.ndarray]
    part: Callable[[int, np.ndarray], np.ndarray]
    whole: Callable[[int, Sequence[np.ndarray]], np.ndarray]
    suffix: str | None
    save: Callable[[Path, int, np.ndarray], None]
    millilitres: Sequence[float] = ()


def of_files(files: Sequence[Path], root: Path, about: About) -> Pictures:
    """Returns image files, read in RGB; their names are relative to `root`.

    Raises:
      ValueError: a file cannot be read.
    """

    def size(file: Path) -> tuple[int, int]:
        with corruption_named(file):
            image = open_raster(read_image(file, MEGAPIXELS))
            turns = about.orientation == UPRIGHT and not turned_by_pillow(image)
            width, height = image.size
            return (width, height) if turns and orientation_of(image) > 4 else (height, width)

    @lru_cache(_KEPT)
    def read(k: int) -> np.ndarray:
        with corruption_named(files[k]):
            content = read_image(files[k], MEGAPIXELS)
            return np.asarray(open_image(content, orientation=about.orientation)[0])

    names, sizes = relative_names(files, root), [*map(size, files)]
    return _of_images(names, sizes, read, about)._replace(suffix=".png")


def of_archive(images: np.ndarray, about: About, *, resize: bool) -> Pictures:
    """Returns images [N, h, w, C], named by their numbers.

    With `resize` they are stretched to the model's size, else they must have it; images of a model
    of tiles are cut.
    """
    names, sizes = [str(k) for k in range(len(images))], [images.shape[1:3]] * len(images)
    return _of_images(names, sizes, images.__getitem__, about, resize=resize)


def _of_images(
    names: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    read: Callable[[int], np.ndarray],
    about: About,
    *,
    resize: bool = True,
) -> Pictures:
    """Returns images of heights and widths `sizes` that `read(k)` reads, [h, w, C]."""
    count, side = len(about.classes), about.shape[0]

    def save(path: Path, k: int, mask: np.ndarray) -> None:
        save_png(path, mask, count)

    if about.masks == TILES:
        return Pictures(
            names,
            [number_of_tiles(*size, side) for size in sizes],
            lambda k, j: cut(read(k), side)[0][j],
            lambda k, found: found.argmax(-1).astype(np.uint8),
            # Places depend on the size alone.
            lambda k, parts: put_together(
                np.stack(parts), cut(np.empty(sizes[k], bool), side)[1], sizes[k]
            ),
            None,
            save,
        )
    return Pictures(
        names,
        [1] * len(sizes),
        lambda k, j: resized(read(k)[None], about.shape)[0] if resize else read(k),
        lambda k, found: stretched(found, *sizes[k]).argmax(-1).astype(np.uint8),
        lambda k, parts: parts[0],
        None,
        save,
    )


def of_scans(files: Sequence[Path], root: Path, about: About) -> Pictures:
    """Returns volumes in NIfTI, whose slices become samples as in training.

    Raises:
      ImportError: nibabel is not installed.
      ValueError: a file is not such a volume.
    """
    how = Slices(about.shape[0], about.channels, crop=about.crop)
    shapes, millilitres = zip(*(shape_of(file, how.crop) for file in files), strict=True)
    read = lru_cache(_SCANS)(lambda k: slices_of(files[k], how))

    def part(k: int, found: np.ndarray) -> np.ndarray:
        inner = (how.crop, how.crop) if how.crop else shapes[k][1:]
        return uncropped(stretched(found, *inner).argmax(-1).astype(np.uint8), shapes[k][1:])

    return Pictures(
        relative_names(files, root),
        [shape[0] for shape in shapes],
        lambda k, j: read(k)[j],
        part,
        lambda k, parts: np.stack(parts),
        "",
        lambda path, k, mask: save_mask(path, mask, files[k]),
        millilitres,
    )


def write(pictures: Pictures, predict: Predictor, classes: Sequence[str], out: str) -> None:
    """Writes the masks of images and `areas.csv` into a new folder, all of them or nothing.

    Args:
      pictures: the images.
      predict: the served model.
      classes: their names.
      out: a folder that does not exist yet, or is empty.

    Raises:
      ValueError: there is no `out`, or it is not empty; two images have one mask file; an image has
        another form than the model's; probabilities are not finite.
      OSError: the folder cannot be written.
    """
    if not out:
        raise ValueError(
            "the model gives masks, which are written to a folder: give --out FOLDER, a new one"
        )
    names, suffix = pictures.names, pictures.suffix
    targets = [] if suffix is None else mask_files(names, suffix)
    areas, masks = np.zeros((len(names), len(classes)), np.int64), {}
    with new_folder(Path(out), "--out") as folder:
        for k, mask in predicted(pictures, predict):
            areas[k] = np.bincount(mask.ravel(), minlength=len(classes))
            if targets:
                pictures.save(folder / targets[k], k, mask)
            else:
                masks[k] = mask
        if masks:
            stacked = np.stack([masks[k] for k in range(len(names))])
            np.savez_compressed(folder / _MASKS, masks=stacked, classes=np.array(classes))
        _write_areas(folder / _AREAS, pictures, classes, areas)


def predicted(pictures: Pictures, predict: Predictor) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number and the mask of each image, in the order in which they are ready.

    Probabilities of a stretched image are stretched back bilinearly, and a pixel's class is the one
    of the largest; masks of tiles or slices are put together. Raises ValueError as `write`.
    """
    owner = np.repeat(np.arange(len(pictures.counts)), pictures.counts)
    first = np.cumsum(pictures.counts) - pictures.counts
    places = [(int(k), int(i - first[k])) for i, k in enumerate(owner)]

    def read(index: np.ndarray) -> np.ndarray:
        return np.stack([pictures.sample(*places[i]) for i in index])

    waiting: dict[int, dict[int, np.ndarray]] = {}
    for index, found in predict.blocks(len(places), read):
        for i, probabilities in zip(index, found, strict=True):
            k, j = places[i]
            if not np.isfinite(probabilities).all():
                raise ValueError(
                    f"the model's probabilities of image {brief(pictures.names[k])} are not "
                    "finite: give another model, or images like those that it was trained on"
                )
            parts = waiting.setdefault(k, {})
            parts[j] = pictures.part(k, probabilities)
            if len(parts) == pictures.counts[k]:
                yield k, pictures.whole(k, [part for _, part in sorted(waiting.pop(k).items())])


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


def mask_files(names: Sequence[str], suffix: str) -> list[PurePosixPath]:
    """Returns the mask file of each image, NAME.png for NAME.jpg, relative to their folder.

    With the suffix "" a mask file has the name of its image.

    Raises:
      ValueError: two images have one mask file, or a name leaves the folder.
    """
    owners: dict[PurePosixPath, str] = {}
    for name in names:
        target = PurePosixPath(name)
        target = target.with_suffix(suffix) if suffix else target
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


def _write_areas(path: Path, pictures: Pictures, classes: Sequence[str], areas: np.ndarray) -> None:
    """Writes pixels i64[N, C] of each image's classes, and their share of the image."""
    # Bytes of a file name that are not text become \udcff.
    how = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
    sizes = pictures.millilitres
    with open(path, "x", **how) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("image", "class", "pixels", "share", *(["ml"] if sizes else [])))
        for k, (name, row) in enumerate(zip(pictures.names, areas.tolist(), strict=True)):
            for one, pixels in zip(classes, row, strict=True):
                volume = [f"{pixels * sizes[k]:.6g}"] if sizes else []
                table.writerow((cell(name), cell(one), pixels, f"{pixels / sum(row):.6g}", *volume))
