"""Writes the masks that a served model predicts, and the areas of their classes, into a folder.

    NAME.png      the mask of the image NAME.jpg, in the image's size
    NAME.nii.gz   the mask of the volume NAME.nii.gz, with its header, for a model of slices
    masks.npz     the masks u8[N, H, W] of an archive of images, with the names of their classes
    areas.csv     image,class,pixels,share; one row for each image and class; also ml of volumes

A PNG is lossless. With two classes it is grey, 0 for the background and 255 for the other class;
with more it has a palette of colours, and its values are the numbers of the classes. So
`data.name=masks` reads such files as labels. The values of other masks are the numbers too.
"""

import colorsys
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedjax_bn.arguments.text import cell
from fedjax_bn.data.masks.assemble import TILES
from fedjax_bn.data.masks.volumes import Slices, save_mask, shape_of, slices_of, uncropped
from fedjax_bn.data.pixels.decode import cut, open_image, put_together, relative_names, resized
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.serving import Predictor
from fedjax_bn.serving.folder import About, new_folder

_AREAS, _MASKS = "areas.csv", "masks.npz"


class _Picture(NamedTuple):
    """An image or a scan."""

    name: str
    shape: tuple[int, ...]  # of its mask, (height, width), or (slices, rows, columns)
    count: int  # how many samples it becomes: 1, its tiles, or its slices
    file: PurePosixPath | None = None  # of its mask, in the folder; None for masks in one array
    save: Callable[[Path, np.ndarray], None] | None = None  # `save(path, mask)` writes the mask
    millilitres: float | None = None  # of a voxel; None for images


# All images, and their samples [N, H, W, C], those of the first image first.
Pictures = tuple[list[_Picture], np.ndarray]


def of_files(files: Sequence[Path], root: Path, about: About) -> Pictures:
    """Returns image files, read in RGB; their names are relative to `root`."""
    pictures, save = [], partial(save_png, classes=len(about.classes))

    def samples() -> Iterator[np.ndarray]:
        for file, name in zip(files, relative_names(files, root), strict=True):
            with corruption_named(file):
                content = file.read_bytes()
                image = np.asarray(open_image(content, orientation=about.orientation)[0])
            target = PurePosixPath(name).with_suffix(".png")
            tiles = _samples_of(image, about)
            pictures.append(_Picture(name, image.shape[:2], len(tiles), target, save))
            yield tiles

    stored = _on_disk(samples())
    return pictures, stored


def of_archive(images: np.ndarray, about: About, *, resize: bool) -> Pictures:
    """Returns images [N, h, w, C], named by their numbers.

    With `resize` they are stretched to the model's size, else they must have it; images of a model
    of tiles are cut.
    """
    pictures = [_Picture(str(k), images.shape[1:3], 1) for k in range(len(images))]
    if not resize and about.masks != TILES:
        return pictures, images
    samples = [_samples_of(image, about) for image in images]
    pictures = [p._replace(count=len(s)) for p, s in zip(pictures, samples, strict=True)]
    return pictures, np.concatenate(samples or [images])


def of_scans(files: Sequence[Path], root: Path, about: About) -> Pictures:
    """Returns volumes in NIfTI, whose slices become samples as in training."""
    how = {"crop": about.crop, "plane": about.plane, "window": tuple(about.window)}
    slices = Slices(about.shape[0], about.channels, **how)
    pictures = []
    for file, name in zip(files, relative_names(files, root), strict=True):
        shape, millilitres = shape_of(file, slices)
        save = partial(save_mask, image=file, plane=slices.plane)
        pictures.append(_Picture(name, shape, shape[0], PurePosixPath(name), save, millilitres))
    return pictures, _on_disk(slices_of(file, slices) for file in files)


def _samples_of(image: np.ndarray, about: About) -> np.ndarray:
    """Returns the tiles [n, H, W, C] of an image [h, w, C], or the stretched image [1, H, W, C]."""
    if about.masks == TILES:
        return cut(image, about.shape[0])[0]
    return np.asarray(resized(image[None], about.shape))


def _on_disk(samples: Iterable[np.ndarray]) -> np.ndarray:
    """Returns bytes u8[n, H, W, C] one after the other as an array on the disk, u8[N, H, W, C].

    Samples are predicted in a random order, so each image is decoded once, and memory stays small.
    """
    with TemporaryFile() as file:
        for batch in samples:
            file.write(np.ascontiguousarray(batch))
        return np.memmap(file, np.uint8, "r").reshape(-1, *batch.shape[1:])


def write_masks(pictures: Pictures, predict: Predictor, about: About, out: str) -> None:
    """Writes the masks of images and `areas.csv` into a new folder `out`, all of them or nothing.

    Raises:
      ValueError: `out` is not empty; two images have one mask file; an image has another form than
        the model's; probabilities are not finite.
    """
    images, classes = pictures[0], about.classes
    areas, masks = np.zeros((len(images), len(classes)), np.int64), {}
    with new_folder(Path(out), "--out") as folder:
        _reserve(folder, images)
        for k, mask in predicted(pictures, predict, about):
            areas[k] = np.bincount(mask.ravel(), minlength=len(classes))
            if images[k].save:
                images[k].save(folder / images[k].file, mask)
            else:
                masks[k] = mask
        if masks:
            stacked = np.stack([masks[k] for k in range(len(images))])
            np.savez_compressed(folder / _MASKS, masks=stacked, classes=np.array(classes))
        _write_areas(folder / _AREAS, images, classes, areas)


def _reserve(folder: Path, images: Sequence[_Picture]) -> None:
    """Makes an empty file for each mask; raises ValueError if two need one place."""
    for name, file in ((image.name, folder / image.file) for image in images if image.file):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(exist_ok=False)
        # Also a folder a.png beside an image a.jpg, and, on some systems, A.jpg beside a.jpg.
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"the mask of image {name!r} needs the place of another image's mask, "
                f"{str(file.relative_to(folder))!r}: rename one, or predict one folder at a time"
            ) from error


def require_finite(name: str, probabilities: np.ndarray) -> None:
    """Raises ValueError if a model's probabilities of an image are not finite."""
    if not np.isfinite(probabilities).all():
        raise ValueError(
            f"the model's probabilities of image {name!r} are not finite: give another model, or "
            "images like those that it was trained on"
        )


def predicted(
    pictures: Pictures, predict: Predictor, about: About
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number and the mask of each image, in the order in which they are ready.

    Probabilities of a stretched image are stretched back bilinearly, and a pixel's class is the one
    of the largest; masks of tiles or slices are put together.
    """
    images, samples = pictures
    owner = np.repeat(np.arange(len(images)), [image.count for image in images])
    waiting: dict[int, dict[int, np.ndarray]] = {}
    for index, batch in predict.blocks(len(samples), samples.__getitem__):
        for i, k, probabilities in zip(index, owner[index].tolist(), batch, strict=True):
            require_finite(images[k].name, probabilities)
            parts = waiting.setdefault(k, {})
            parts[i] = _part(probabilities, images[k].shape, about)
            if len(parts) == images[k].count:
                ordered = np.stack([part for _, part in sorted(waiting.pop(k).items())])
                yield k, _assembled(ordered, images[k].shape, about)


def _part(probabilities: np.ndarray, shape: Sequence[int], about: About) -> np.ndarray:
    """Returns the mask u8[h, w] of a tile, or of an image or slice of a shape, in its pixels."""
    size = shape[-2:]
    if about.masks == TILES:
        return probabilities.argmax(-1).astype(np.uint8)
    inner = (about.crop, about.crop) if about.crop and len(shape) == 3 else size
    return uncropped(_stretched(probabilities, *inner).argmax(-1).astype(np.uint8), size)


def _assembled(parts: np.ndarray, shape: Sequence[int], about: About) -> np.ndarray:
    """Returns the mask u8 of an image or scan of a shape from those of its samples, u8[n, h, w]."""
    if about.masks == TILES:
        places = cut(np.empty(shape, bool), about.shape[0])[1]  # they depend on the size alone
        return put_together(parts, places, shape)
    return parts.reshape(shape)


def _stretched(probabilities: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns probabilities f32[H, W, C] as f32[height, width, C], by Pillow's bilinear filter."""
    if probabilities.shape[:2] == (height, width):
        return probabilities
    planes = [
        Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR)
        for plane in np.moveaxis(probabilities.astype(np.float32), -1, 0).copy()
    ]
    return np.stack([np.asarray(plane) for plane in planes], -1)


def save_png(path: Path, mask: np.ndarray, classes: int) -> None:
    """Writes classes u8[H, W] as a PNG, see above."""
    image = Image.fromarray(mask * np.uint8(255) if classes == 2 else mask)
    if classes > 2:
        image.putpalette(palette(classes).tobytes())
    image.save(path, "PNG")


def palette(classes: int) -> np.ndarray:
    """Returns the colours u8[classes, 3] of masks: black for the background, then bright hues."""
    # Multiples of the golden ratio give neighbours very different hues, for any number of classes.
    hues = [(0.618034 * k) % 1 for k in range(classes - 1)]
    colours = [(0.0, 0.0, 0.0), *(colorsys.hsv_to_rgb(hue, 0.8, 1.0) for hue in hues)]
    return np.rint(255 * np.array(colours)).astype(np.uint8)


def _write_areas(
    path: Path, images: Sequence[_Picture], classes: Sequence[str], areas: np.ndarray
) -> None:
    """Writes pixels i64[N, C] of each image's classes, and their share of the image."""
    # Bytes of a file name that are not text become \udcff.
    encoding = {"encoding": "utf-8", "errors": "backslashreplace"}
    sized = images[0].millilitres is not None
    with open(path, "x", newline="", **encoding) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("image", "class", "pixels", "share", *["ml"] * sized))
        for image, row in zip(images, areas.tolist(), strict=True):
            for name, pixels in zip(classes, row, strict=True):
                ml = [f"{pixels * image.millilitres:.6g}"] if sized else []
                table.writerow(
                    (cell(image.name), cell(name), pixels, f"{pixels / sum(row):.6g}", *ml)
                )
