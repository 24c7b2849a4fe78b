"""The command `predict`: writes a served model's class probabilities as CSV, or its masks.

It imports no training code, and without `--trust` runs none that the model's folder holds. Rows are
`image,class,PROBABILITIES...`, one column per class. What a model that segments writes,
`serving.predict_masks` describes.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """What to predict."""

    model: str  # a folder that `serve` wrote
    # an image, a folder of images, a `.npz` with an array `images`, or "-" to read names of image
    # files from the standard input, one a line; each is answered before the next is read. For a
    # model of slices, a NIfTI volume or a folder of them
    data: str
    adapt: str = ""  # the adaptation; empty: the first one served
    out: str = ""  # the file to write; empty: the standard output. For masks: a new folder
    # whether u8 images of another size in an archive are stretched to the model's; masks have the
    # size of the archive's images
    resize: bool = False
    trust: bool = False  # whether to run the compiled program of a model or adaptation of one's own


def run(request: Request) -> None:
    """Predicts and writes the CSV, or the masks.

    Raises:
      ConfigError: the model, the images or the adaptation cannot be used, or the output cannot be
        written.
    """
    try:
        about = read_about(Path(request.model))
        if about.masks:
            predict = load(request.model, request.adapt, trust=request.trust)
            predict_masks.write_masks(_pictures(about, request), predict, about, request.out)
            return
        head = ("image", "class", *about.classes)
        rows = _stream(about, request) if request.data == _STREAM else _samples(about, request)
        if request.out:
            with open(request.out, "w", newline="", encoding="utf-8") as file:
                _write_rows(file, head, rows)
        else:
            _write_rows(sys.stdout, head, rows)
    except (ValueError, OSError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(str(error) or "there is too little memory") from error


def _samples(about: About, request: Request) -> Iterator[tuple[str, np.ndarray]]:
    """Returns (name, probabilities f[classes]) of each sample in `request.data`.

    Image files are stretched to the model's square, as in training. Hidden files and folders are
    left out, as in `evaluate`. The samples of an archive are named by their numbers.
    """
    predict, path = load(request.model, request.adapt, trust=request.trust), Path(request.data)
    if path.suffix == ".npz":
        images = _read_archive(path)
        images = resized(images, about.shape) if request.resize else images
        return zip(map(str, range(len(images))), predict(images), strict=True)
    files, root = _files_below(path, is_image)
    read = _file_reader(about, root)
    probabilities = predict.predict(len(files), lambda index: read([files[i] for i in index]))
    return zip(relative_names(files, root), probabilities, strict=True)


def _pictures(about: About, request: Request) -> predict_masks.Pictures:
    path = Path(request.data)
    if path.suffix == ".npz":
        return predict_masks.of_archive(_read_archive(path), about, resize=request.resize)
    if about.channels:
        return predict_masks.of_scans(*_files_below(path, is_volume), about)
    return predict_masks.of_files(*_files_below(path, is_image), about)


def _read_archive(path: Path) -> np.ndarray:
    """Returns the images [N, ...] of a `.npz`, its one array `images` or `NAME__images`."""
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            (name,) = (n for n in archive if n == _IMAGES or n.endswith(f"__{_IMAGES}"))
            return archive[name]
    except (OSError, ValueError, TypeError, BadZipFile) as error:
        raise ValueError(
            f"cannot read --data {path} ({error}): give a .npz with one array {_IMAGES} [N, ...], "
            f"or NAME__{_IMAGES}"
        ) from error


def _files_below(path: Path, fits: Callable[[str], bool]) -> tuple[list[Path], Path]:
    """Returns the files of a path, a file or a folder, and the folder to which names are relative.

    Files in a folder have names that fit.
    """
    if path.is_file():
        return [path], path.parent
    files = [file for file in files_below(path) if fits(file.name)] if path.is_dir() else []
    if not files:
        raise ValueError(f"--data {path} holds nothing to predict: give images, a folder or a .npz")
    return files, path


def _file_reader(about: About, root: Path) -> Callable[[Sequence[Path]], np.ndarray]:
    """Returns `read(files) -> u8[n, H, H, 3]`; file names in errors are relative to `root`."""
    options = {"root": root, "progress": False, "orientation": about.orientation}
    return lambda files: decode(files, about.shape[0], **options)[0]


def _stream(about: About, request: Request) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, probabilities f[classes]) of each image named on the standard input."""
    predict, names = load(request.model, request.adapt, 1, request.trust), []
    if isinstance(sys.stdin, TextIOWrapper):  # file names may not be valid text
        sys.stdin.reconfigure(errors="surrogateescape")
    read = _file_reader(about, Path())

    def images() -> Iterator[np.ndarray]:
        for line in filter(None, map(str.strip, sys.stdin)):
            names.append(line)
            yield read([Path(line)])

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
        predict_masks.require_finite(name, probabilities)
        best = head[2 + int(probabilities.argmax())]
        table.writerow((encodable(name), best, *(f"{p:.6g}" for p in probabilities)))
        file.flush()  # a program that gives one name at a time waits for this row
