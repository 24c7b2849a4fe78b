"""The command `predict`: writes a served model's class probabilities as CSV, or its masks.

It imports no training code, and without `--trust` runs none that the model's folder holds. Rows are
`image,class,PROBABILITIES...`, one column per class. A model that segments writes a folder:

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
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import NamedTuple, TextIO
from zipfile import BadZipFile

import jax
import numpy as np
from PIL import Image

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import cell
from fedjax_bn.data.masks import volumes
from fedjax_bn.data.masks.assemble import TILES
from fedjax_bn.data.pixels import decode as pixels
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import files_below, is_image
from fedjax_bn.serving.folder import About, load, new_folder
from fedjax_bn.serving.predictor import Predictor

_STREAM, _IMAGES = "-", "images"
_AREAS, _MASKS = "areas.csv", "masks.npz"


def run(
    model: str, data: str, adapt: str = "", out: str = "", resize: bool = False, trust: bool = False
) -> None:
    """Predicts and writes the CSV, or the masks; arguments are the flags of the command.

    `data` is an image, a folder of images, a `.npz` with an array `images`, or "-" to read names of
    image files from the standard input, one a line; each is answered before the next is read. For a
    model of slices, it is a NIfTI volume or a folder of them. With `resize`, u8 images of another
    size in an archive are stretched to the model's, and masks have the size of the images. What
    cannot be used is a ConfigError.
    """
    try:
        about, load_model = About.read(Path(model)), partial(load, model, adapt, trust=trust)
        if about.masks:
            predict = load_model()
            _write_masks(_pictures_in(Path(data), about, resize), predict, about, Path(out))
            return
        head = ("image", "class", *about.classes)
        if data == _STREAM:
            rows = _stream(load_model(batch_size=1), about)
        else:
            rows = _samples(load_model(), Path(data), about, resize)
        stdout = nullcontext(sys.stdout)
        with open(out, "w", newline="", encoding="utf-8") if out else stdout as file:
            _write_rows(file, head, rows)
    except (ValueError, OSError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(str(error) or "there is too little memory") from error


def _samples(
    predict: Predictor, path: Path, about: About, resize: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Returns (name, probabilities f[classes]) of each sample."""
    # Files are stretched, and hidden ones left out, as in `evaluate`. Arrays have numbers as names.
    if path.suffix == ".npz":
        images = _read_archive(path)
        images = pixels.resized(images, about.shape) if resize else images
        return zip(map(str, range(len(images))), predict(images), strict=True)
    files, root = _files_below(path, is_image)
    probabilities = predict.predict(
        len(files), lambda index: _decoded([files[i] for i in index], root, about)
    )
    return zip(pixels.relative_names(files, root), probabilities, strict=True)


def _stream(predict: Predictor, about: About) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, probabilities f[classes]) of each image named on the standard input."""
    names: list[str] = []
    if isinstance(sys.stdin, TextIOWrapper):  # file names may not be valid text
        sys.stdin.reconfigure(errors="surrogateescape")

    def images() -> Iterator[np.ndarray]:
        for line in filter(None, map(str.strip, sys.stdin)):
            names.append(line)
            yield _decoded([Path(line)], Path(), about)

    return ((names.pop(), batch[0]) for batch in predict.stream(images()))


def _read_archive(path: Path) -> np.ndarray:
    """Returns the images [N, ...] of a `.npz`, its one array `images` or `NAME__images`."""
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            (name,) = (n for n in archive if n == _IMAGES or n.endswith(f"__{_IMAGES}"))
            return archive[name]
    except (OSError, ValueError, TypeError, BadZipFile) as error:
        names = f"{_IMAGES} [N, ...] or NAME__{_IMAGES}"
        raise ValueError(f"cannot read --data {path} ({error}): give one array {names}") from error


def _files_below(path: Path, fits: Callable[[str], bool]) -> tuple[list[Path], Path]:
    """Returns the file, or those in a folder whose names fit, and what names are relative to."""
    if path.is_file():
        return [path], path.parent
    files = [file for file in files_below(path) if fits(file.name)] if path.is_dir() else []
    if not files:
        raise ValueError(f"--data {path} holds nothing to predict: give images, a folder or a .npz")
    return files, path


def _decoded(files: Sequence[Path], root: Path, about: About) -> np.ndarray:
    """Returns image files as u8[n, H, H, 3]; their names in errors are relative to `root`."""
    options = {"root": root, "progress": False, "orientation": about.orientation}
    return pixels.decode(files, about.shape[0], **options)[0]


def _write_rows(
    file: TextIO, head: tuple[str, ...], rows: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes the table, each row before the next is computed."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    table = csv.writer(file, lineterminator="\n")

    def encodable(value: str) -> str:
        # A byte of a file name that is not text becomes \udcff, and a character that the encoding
        # lacks becomes, for example, \u4eac.
        return cell(value).encode(encoding, "backslashreplace").decode(encoding)

    head = tuple(map(encodable, head))
    table.writerow(head)
    for name, probabilities in rows:
        _require_finite(name, probabilities)
        best = head[2 + int(probabilities.argmax())]
        table.writerow((encodable(name), best, *(f"{p:.6g}" for p in probabilities)))
        file.flush()  # a program that gives one name at a time waits for this row


def _require_finite(name: str, probabilities: np.ndarray) -> None:
    if not np.isfinite(probabilities).all():
        raise ValueError(f"the model's probabilities of image {name!r} are not finite")


class _Picture(NamedTuple):
    """An image or a scan."""

    name: str
    shape: tuple[int, ...]  # of its mask, (height, width), or (slices, rows, columns)
    count: int  # how many samples it becomes: 1, its tiles, or its slices
    file: PurePosixPath | None = None  # of its mask, in the folder; None for masks in one array
    save: Callable[[Path, np.ndarray], None] | None = None  # `save(path, mask)` writes the mask
    millilitres: float | None = None  # of a voxel; None for images


# All images, and their samples [N, H, W, C], those of the first image first.
_Pictures = tuple[list[_Picture], np.ndarray]


def _pictures_in(path: Path, about: About, resize: bool) -> _Pictures:
    """Returns an archive's images, named by their numbers, or images or scans of files."""
    if path.suffix == ".npz":
        images = _read_archive(path)
        shape, counts = images.shape[1:3], [1] * len(images)
        if resize or about.masks == TILES:
            samples = [_samples_of(image, about) for image in images]
            counts, images = [*map(len, samples)], np.concatenate(samples or [images])
        return [_Picture(str(k), shape, count) for k, count in enumerate(counts)], images
    if about.channels:
        return _scans(*_files_below(path, volumes.is_volume), about)
    return _image_files(*_files_below(path, is_image), about)


def _image_files(files: Sequence[Path], root: Path, about: About) -> _Pictures:
    pictures, save = [], partial(_save_png, classes=len(about.classes))

    def samples() -> Iterator[np.ndarray]:
        for file, name in zip(files, pixels.relative_names(files, root), strict=True):
            with corruption_named(file):
                content = file.read_bytes()
                image = np.asarray(pixels.open_image(content, orientation=about.orientation)[0])
            target = PurePosixPath(name).with_suffix(".png")
            parts = _samples_of(image, about)
            pictures.append(_Picture(name, image.shape[:2], len(parts), target, save))
            yield parts

    return pictures, _on_disk(samples())


def _scans(files: Sequence[Path], root: Path, about: About) -> _Pictures:
    """Returns volumes in NIfTI, whose slices become samples as in training."""
    window = tuple(about.window)
    slices = volumes.Slices(about.shape[0], about.channels, about.crop, about.plane, window)
    pictures = []
    for file, name in zip(files, pixels.relative_names(files, root), strict=True):
        shape, millilitres = volumes.shape_of(file, slices)
        save = partial(volumes.save_mask, image=file, plane=slices.plane)
        pictures.append(_Picture(name, shape, shape[0], PurePosixPath(name), save, millilitres))
    return pictures, _on_disk(volumes.slices_of(file, slices) for file in files)


def _samples_of(image: np.ndarray, about: About) -> np.ndarray:
    """Returns the tiles [n, H, W, C] of an image [h, w, C], or the stretched image [1, H, W, C]."""
    if about.masks == TILES:
        return pixels.cut(image, about.shape[0])[0]
    return np.asarray(pixels.resized(image[None], about.shape))


def _on_disk(samples: Iterable[np.ndarray]) -> np.ndarray:
    """Returns bytes u8[n, H, W, C] one after the other as an array on the disk, u8[N, H, W, C]."""
    # Samples are predicted in a random order, and each image is decoded once, in little memory.
    with TemporaryFile() as file:
        for batch in samples:
            file.write(np.ascontiguousarray(batch))
        return np.memmap(file, np.uint8, "r").reshape(-1, *batch.shape[1:])


def _write_masks(pictures: _Pictures, predict: Predictor, about: About, out: Path) -> None:
    """Writes the masks of images and `areas.csv` into a new folder, all of them or nothing."""
    images, classes = pictures[0], about.classes
    areas, masks = np.zeros((len(images), len(classes)), np.int64), {}
    with new_folder(out, "--out") as folder:
        for file in filter(None, (image.file for image in images)):
            try:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).touch(exist_ok=False)
            # Also a folder a.png beside an image a.jpg, and, on some systems, A.jpg beside a.jpg.
            except (FileExistsError, NotADirectoryError) as error:
                raise ValueError(f"two images have the mask {str(file)!r}: rename one") from error
        for k, mask in _predicted(pictures, predict, about):
            areas[k] = np.bincount(mask.ravel(), minlength=len(classes))
            if images[k].save:
                images[k].save(folder / images[k].file, mask)
            else:
                masks[k] = mask
        if masks:
            stacked = np.stack([masks[k] for k in range(len(images))])
            np.savez_compressed(folder / _MASKS, masks=stacked, classes=np.array(classes))
        _write_areas(folder / _AREAS, images, classes, areas)


def _predicted(
    pictures: _Pictures, predict: Predictor, about: About
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number and the mask of each image, in the order in which they are ready."""
    # Probabilities of a stretched image are stretched back bilinearly, and a pixel's class is the
    # one of the largest; masks of tiles or slices are put together.
    images, samples = pictures
    owner = np.repeat(np.arange(len(images)), [image.count for image in images])
    waiting: dict[int, dict[int, np.ndarray]] = {}
    for index, batch in predict.blocks(len(samples), samples.__getitem__):
        for i, k, probabilities in zip(index, owner[index].tolist(), batch, strict=True):
            _require_finite(images[k].name, probabilities)
            parts, shape = waiting.setdefault(k, {}), images[k].shape
            parts[i] = _part(probabilities, shape, about)
            if len(parts) < images[k].count:
                continue
            mask = np.stack([part for _, part in sorted(waiting.pop(k).items())])
            if about.masks == TILES:
                places = pixels.cut(np.empty(shape, bool), about.shape[0])[1]  # of the size alone
                yield k, pixels.put_together(mask, places, shape)
            else:
                yield k, mask.reshape(shape)


def _part(probabilities: np.ndarray, shape: Sequence[int], about: About) -> np.ndarray:
    """Returns the mask u8[h, w] of a tile, or of an image or slice of a shape, in its pixels."""
    size = shape[-2:]
    if about.masks == TILES:
        return probabilities.argmax(-1).astype(np.uint8)
    inner = (about.crop, about.crop) if about.crop and len(shape) == 3 else size
    mask = _stretched(probabilities, *inner).argmax(-1).astype(np.uint8)
    return volumes.uncropped(mask, size)


def _stretched(probabilities: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns probabilities f32[H, W, C] as f32[height, width, C], by Pillow's bilinear filter."""
    if probabilities.shape[:2] == (height, width):
        return probabilities
    planes = [
        Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR)
        for plane in np.moveaxis(probabilities.astype(np.float32), -1, 0).copy()
    ]
    return np.stack([np.asarray(plane) for plane in planes], -1)


def _save_png(path: Path, mask: np.ndarray, classes: int) -> None:
    """Writes classes u8[H, W] as a PNG, see above."""
    image = Image.fromarray(mask * np.uint8(255) if classes == 2 else mask)
    if classes > 2:
        # Multiples of the golden ratio give neighbours very different hues, for any number.
        hues = [(0.618034 * k) % 1 for k in range(classes - 1)]
        colours = [(0.0, 0.0, 0.0), *(colorsys.hsv_to_rgb(hue, 0.8, 1.0) for hue in hues)]
        image.putpalette(np.rint(255 * np.array(colours)).astype(np.uint8).tobytes())
    image.save(path, "PNG")


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
            for name, area in zip(classes, row, strict=True):
                ml = [f"{area * image.millilitres:.6g}"] if sized else []
                share = f"{area / sum(row):.6g}"
                table.writerow((cell(image.name), cell(name), area, share, *ml))
