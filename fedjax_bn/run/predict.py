"""The command `predict`: probabilities of classes by a served model, as CSV.

It imports no training code. Rows are `image,class,PROBABILITIES...`, one column a class.
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

from fedjax_bn.arguments.text import brief, cell, encodable, one_line
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.serving import load
from fedjax_bn.serving.folder import read_about
from fedjax_bn.serving.predictor import Predictor
from fedjax_bn.serving.samples import file_reader, open_samples

STREAM = "-"


class Request(NamedTuple):
    """What to predict.

    Attributes:
      model: a folder that `serve` wrote.
      data: an image, a folder of images, a `.npz` with an array `images`, or "-" for names of image
        files from the standard input, line by line, each answered before the next is read.
      adapt: the adaptation; empty: the first of those served.
      out: the file to write; empty: the standard output.
      resize: whether an archive's bytes of another size are stretched to the model's.
    """

    model: str
    data: str
    adapt: str = ""
    out: str = ""
    resize: bool = False


def run(request: Request) -> None:
    """Predicts and writes the CSV.

    Raises:
      ConfigError: the model, the images or the adaptation are not as they must be.
    """
    try:
        folder = Path(request.model)
        about = read_about(folder)
        head = ("image", "class", *about.classes)
        if request.data == STREAM:
            predict = load(folder, request.adapt, batch_size=1)
            if isinstance(sys.stdin, TextIOWrapper):  # names of files may be no text
                sys.stdin.reconfigure(errors="surrogateescape")
            read = file_reader(about.shape, Path(), about.orientation)
            rows = _stream(predict, read, map(str.strip, sys.stdin))
        else:
            samples = open_samples(
                Path(request.data), about.shape, request.resize, about.orientation
            )
            predict = load(folder, request.adapt)
            rows = zip(
                samples.names, predict.predict(len(samples.names), samples.read), strict=True
            )
        with _opened(request.out) as file:
            _write(file, head, rows)
    except (ValueError, OSError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(one_line(error) or "there is too little memory") from error


def _opened(out: str) -> AbstractContextManager[TextIO]:
    """The file to write, or the standard output.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        return open(out, "w", newline="", encoding="utf-8") if out else nullcontext(sys.stdout)
    except OSError as error:
        raise ConfigError(f"cannot write {out} ({error.strerror}): give another --out") from error


def _stream(
    predict: Predictor, read: Callable[[Sequence[Path]], np.ndarray], lines: Iterable[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """The probabilities f[classes] of each image file as soon as it is named."""
    names = []

    def images() -> Iterator[np.ndarray]:
        for line in filter(None, lines):
            names.append(line)
            yield read([Path(line)])

    for found in predict.stream(images()):
        yield names.pop(), found[0]


def _write(file: TextIO, head: tuple[str, ...], rows: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the table; each row is out before the next is asked for.

    Bytes of names that are no text are written as \\udcff, as Python reads them, and characters
    that the file's encoding lacks as \\u4eac.

    Raises:
      ValueError: probabilities are not finite.
    """
    encoding = getattr(file, "encoding", None) or "utf-8"
    table = csv.writer(file, lineterminator="\n")
    head = tuple(encodable(cell(one), encoding) for one in head)
    table.writerow(head)
    for name, found in rows:
        if not np.isfinite(found).all():
            raise ValueError(
                f"the model's probabilities of image {brief(name)} are not finite: give another "
                "model, or images like those that it was trained on"
            )
        best = head[2 + int(found.argmax())]
        table.writerow((encodable(cell(name), encoding), best, *(f"{p:.6g}" for p in found)))
        file.flush()
