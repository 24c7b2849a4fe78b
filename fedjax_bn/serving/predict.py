"""The command `predict`: writes a served model's class probabilities as CSV, or its masks.

It imports no training code, and without `--trust` runs none that the model's folder holds. Rows are
`image,class,PROBABILITIES...`, one column per class. What a model that segments writes,
`serving.predict_masks` describes.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, TextIO

import jax
import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import brief, cell, one_line
from fedjax_bn.data.masks.volumes import is_volume
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.decode import decode, relative_names, resized
from fedjax_bn.data.pixels.raster import UPRIGHT
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.data.sets.folders import files_below, is_image
from fedjax_bn.serving import load, predict_masks
from fedjax_bn.serving.folder import About, read_about

_STREAM, _IMAGES = "-", "images"


class Request(NamedTuple):
    """What to predict.

    Attributes:
      model: a folder that `serve` wrote.
      data: an image, a folder of images, a `.npz` with an array `images`, or "-" to read names of
        image files from the standard input, one a line; each is answered before the next is read.
        For a model of slices, a NIfTI volume or a folder of them.
      adapt: the adaptation; empty: the first one served.
      out: the file to write; empty: the standard output. For masks: a new folder.
      resize: whether u8 images of another size in an archive are stretched to the model's; masks
        have the size of the archive's images.
      trust: whether to run the compiled program of a model or adaptation of one's own.
    """

    model: str
    data: str
    adapt: str = ""
    out: str = ""
    resize: bool = False
    trust: bool = False


def run(request: Request) -> None:
    """Predicts and writes the CSV, or the masks.

    Raises:
      ConfigError: the model, the images or the adaptation cannot be used, or the output cannot be
        written.
    """
    try:
        folder = Path(request.model)
        about = read_about(folder)
        if about.masks:
            _write_masks(folder, about, request)
            return
        if request.data == _STREAM:
            rows = _stream(folder, request, about)
        else:
            data = Path(request.data)
            names, read = _open_samples(data, about.shape, request.resize, about.orientation)
            found = load(folder, request.adapt, trust=request.trust).predict(len(names), read)
            rows = zip(names, found, strict=True)
        out, head = request.out, ("image", "class", *about.classes)
        try:
            with _opened(out) as file:
                _write(file, head, rows)
        except OSError as error:  # of a full disk, also when the file is closed
            reason = error.strerror or error
            raise ConfigError(
                f"cannot write {out or 'the standard output'} ({reason}): give another --out"
            ) from error
    except (ValueError, OSError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(one_line(error) or "there is too little memory") from error


def _opened(out: str) -> AbstractContextManager[TextIO]:
    """Returns a file to write to; the standard output, which stays open, for ""."""
    return open(out, "w", newline="", encoding="utf-8") if out else nullcontext(sys.stdout)


def _open_samples(
    path: Path, shape: Sequence[int], resize: bool = False, orientation: str = UPRIGHT
) -> tuple[Sequence[str], Callable[[np.ndarray], np.ndarray]]:
    """Returns the names of the samples in `path`, and `read(index i64[n]) -> images`.

    The path is an image, a folder of images, or a `.npz`. Image files are stretched to the model's
    square, as in training. Hidden files and folders are left out, as in `evaluate`. An archive has
    one array `images`, or `NAME__images`, and its samples are named by their numbers. `shape` and
    `orientation` describe the model's samples.
    """
    if path.suffix == ".npz":
        images = _read_archive(path)
        images = resized(images, shape) if resize else images
        return [str(i) for i in range(len(images))], images.__getitem__
    files, root = _files_below(path)
    read = _file_reader(shape, root, orientation)
    return relative_names(files, root), lambda index: read([files[i] for i in index])


def _write_masks(folder: Path, about: About, request: Request) -> None:
    """Writes the masks of the images in `request.data`."""
    path, predict = Path(request.data), load(folder, request.adapt, trust=request.trust)
    if request.data == _STREAM:
        raise ValueError(
            "--data - answers each name in a row, and the masks of a model that segments are "
            "written to a folder at once: give an image, a folder of images, or a .npz"
        )
    if path.suffix == ".npz":
        images = _read_archive(path)
        if images.ndim != 4:
            raise ValueError(f"{path} has images {list(images.shape)}: give images [N, H, W, C]")
        pictures = predict_masks.of_archive(images, about, resize=request.resize)
    elif about.channels:
        pictures = predict_masks.of_scans(*_files_below(path, is_volume, "NIfTI volume"), about)
    else:
        _check_square(about.shape)
        pictures = predict_masks.of_files(*_files_below(path), about)
    predict_masks.write(pictures, predict, about, request.out)


def _read_archive(path: Path) -> np.ndarray:
    """Returns the images [N, ...] of a `.npz`, its one array `images` or `NAME__images`."""
    if not path.is_file():
        raise FileNotFoundError(f"--data {path} is not a file: give images, a folder, or a .npz")
    names = names_in_npz(path)
    found = [name for name in names if name == _IMAGES or name.endswith(f"__{_IMAGES}")]
    if len(found) != 1:
        raise ValueError(
            f"{path} has the arrays {first_few(names) or 'none'}: give a .npz with one array "
            f"{_IMAGES} [N, ...], or NAME__{_IMAGES}"
        )
    return read_npz(path, found)[found[0]]


def _files_below(
    path: Path, fits: Callable[[str], bool] = is_image, kind: str = "image file"
) -> tuple[list[Path], Path]:
    """Returns the files of a path, a file or a folder, and the folder to which names are relative.

    Files in a folder have names that fit; `kind` is what they are.
    """
    if not path.exists():
        raise FileNotFoundError(f"--data {path} is not there: give images, a folder, or a .npz")
    files, root = [path], path.parent
    if path.is_dir():
        root = path
        files = [file for file in files_below(path) if fits(file.name)]
    if not files:
        raise ValueError(f"--data {path} holds no {kind}: give another folder, or a .npz")
    return files, root


def _file_reader(
    shape: Sequence[int], root: Path, orientation: str
) -> Callable[[Sequence[Path]], np.ndarray]:
    """Returns `read(files) -> u8[n, H, H, 3]`; file names in errors are relative to `root`."""
    _check_square(shape)
    how = {"root": root, "progress": False, "orientation": orientation}
    return lambda files: decode(files, shape[0], **how)[0]


def _check_square(shape: Sequence[int]) -> None:
    """Raises ValueError unless a model reads square images in RGB."""
    if len(shape) != 3 or shape[0] != shape[1] or shape[2] != 3:
        raise ValueError(
            f"the model reads samples of shape {list(shape)}, which image files do not give: give "
            "a .npz with an array images"
        )


def _stream(folder: Path, request: Request, about: About) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, probabilities f[classes]) of each image named on the standard input.

    Raises:
      ValueError: the model cannot be used, or an image or the standard input cannot be read.
    """
    predict, names = load(folder, request.adapt, 1, request.trust), []
    if isinstance(sys.stdin, TextIOWrapper):  # file names may not be valid text
        sys.stdin.reconfigure(errors="surrogateescape")
    read = _file_reader(about.shape, Path(), about.orientation)

    def images() -> Iterator[np.ndarray]:
        try:
            for line in filter(None, map(str.strip, sys.stdin)):
                names.append(line)
                yield read([Path(line)])
        except OSError as error:  # `run` takes an OSError for one of the output
            raise ValueError(one_line(error)) from error

    return ((names.pop(), found[0]) for found in predict.stream(images()))


def _write(file: TextIO, head: tuple[str, ...], rows: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the table, each row before the next is computed."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    table = csv.writer(file, lineterminator="\n")

    def encodable(text: str) -> str:
        # A byte of a file name that is not text becomes \udcff, and a character that the encoding
        # lacks becomes, for example, \u4eac.
        return cell(text).encode(encoding, "backslashreplace").decode(encoding)

    head = tuple(map(encodable, head))
    table.writerow(head)
    for name, found in rows:
        if not np.isfinite(found).all():
            raise ValueError(
                f"the model's probabilities of image {brief(name)} are not finite: give another "
                "model, or images like those that it was trained on"
            )
        best = head[2 + int(found.argmax())]
        table.writerow((encodable(name), best, *(f"{p:.6g}" for p in found)))
        file.flush()  # a program that gives one name at a time waits for this row
