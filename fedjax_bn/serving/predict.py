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
from zipfile import BadZipFile

import jax
import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import cell
from fedjax_bn.data.masks.volumes import is_volume
from fedjax_bn.data.pixels.decode import decode, relative_names, resized
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
        about = read_about(Path(request.model))
        if about.masks:
            _write_masks(about, request)
        else:
            _write_table(about, request)
    except (ValueError, OSError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(str(error) or "there is too little memory") from error


def _write_table(about: About, request: Request) -> None:
    """Writes a row for each image in `request.data`."""
    if request.data == _STREAM:
        rows = _stream(about, request)
    else:
        predict = load(request.model, request.adapt, trust=request.trust)
        names, read = _open_samples(about, request)
        rows = zip(names, predict.predict(len(names), read), strict=True)
    try:
        with _opened(request.out) as file:
            _write_rows(file, ("image", "class", *about.classes), rows)
    except OSError as error:  # of a full disk, also when the file is closed
        place, reason = request.out or "the standard output", error.strerror or error
        raise ConfigError(f"cannot write {place} ({reason}): give another --out") from error


def _opened(out: str) -> AbstractContextManager[TextIO]:
    """Returns a file to write to; the standard output, which stays open, for ""."""
    return open(out, "w", newline="", encoding="utf-8") if out else nullcontext(sys.stdout)


def _open_samples(
    about: About, request: Request
) -> tuple[Sequence[str], Callable[[np.ndarray], np.ndarray]]:
    """Returns the names of the samples in `request.data`, and `read(index i64[n]) -> images`.

    Image files are stretched to the model's square, as in training. Hidden files and folders are
    left out, as in `evaluate`. The samples of an archive are named by their numbers.
    """
    path = Path(request.data)
    if path.suffix == ".npz":
        images = _read_archive(path)
        images = resized(images, about.shape) if request.resize else images
        return [str(i) for i in range(len(images))], images.__getitem__
    files, root = _files_below(path)
    read = _file_reader(about, root)
    return relative_names(files, root), lambda index: read([files[i] for i in index])


def _write_masks(about: About, request: Request) -> None:
    """Writes the masks of the images in `request.data`."""
    path = Path(request.data)
    predict = load(request.model, request.adapt, trust=request.trust)
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
    predict_masks.write_masks(pictures, predict, about, request.out)


def _read_archive(path: Path) -> np.ndarray:
    """Returns the images [N, ...] of a `.npz`, its one array `images` or `NAME__images`."""
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            names = [name for name in archive if name == _IMAGES or name.endswith(f"__{_IMAGES}")]
            if len(names) == 1:
                return archive[names[0]]
            arrays = ", ".join(archive) or "none"
    except (OSError, ValueError, TypeError, BadZipFile) as error:
        raise ValueError(f"cannot read --data {path} ({error}): give another .npz") from error
    raise ValueError(
        f"{path} has the arrays {arrays}: give a .npz with one array {_IMAGES} [N, ...], or "
        f"NAME__{_IMAGES}"
    )


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


def _file_reader(about: About, root: Path) -> Callable[[Sequence[Path]], np.ndarray]:
    """Returns `read(files) -> u8[n, H, H, 3]`; file names in errors are relative to `root`."""
    _check_square(about.shape)
    options = {"root": root, "progress": False, "orientation": about.orientation}
    return lambda files: decode(files, about.shape[0], **options)[0]


def _check_square(shape: Sequence[int]) -> None:
    """Raises ValueError unless a model reads square images in RGB."""
    if len(shape) != 3 or shape[0] != shape[1] or shape[2] != 3:
        raise ValueError(
            f"the model reads samples of shape {list(shape)}, which image files do not give: give "
            "a .npz with an array images"
        )


def _stream(about: About, request: Request) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, probabilities f[classes]) of each image named on the standard input.

    Raises:
      ValueError: the model cannot be used, or an image or the standard input cannot be read.
    """
    predict, names = load(request.model, request.adapt, 1, request.trust), []
    if isinstance(sys.stdin, TextIOWrapper):  # file names may not be valid text
        sys.stdin.reconfigure(errors="surrogateescape")
    read = _file_reader(about, Path())

    def images() -> Iterator[np.ndarray]:
        try:
            for line in filter(None, map(str.strip, sys.stdin)):
                names.append(line)
                yield read([Path(line)])
        except OSError as error:  # `_write_table` takes an OSError for one of the output
            raise ValueError(str(error)) from error

    return ((names.pop(), batch[0]) for batch in predict.stream(images()))


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
        if not np.isfinite(probabilities).all():
            raise ValueError(
                f"the model's probabilities of image {name!r} are not finite: give another "
                "model, or images like those that it was trained on"
            )
        best = head[2 + int(probabilities.argmax())]
        table.writerow((encodable(name), best, *(f"{p:.6g}" for p in probabilities)))
        file.flush()  # a program that gives one name at a time waits for this row
