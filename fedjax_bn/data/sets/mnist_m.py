"""MNIST-M (Ganin & Lempitsky, 2015): folders of PNG images and a text file of labels for each."""

from pathlib import Path

import numpy as np

from fedjax_bn.arguments.text import short
from fedjax_bn.data.pixels.raster import open_image, read_image
from fedjax_bn.data.regular_files import read_text
from fedjax_bn.data.sets.files import SIZE, Original, corruption_named, first_existing
from fedjax_bn.data.sets.lists import is_label
from fedjax_bn.engine.inputs import class_labels

_WHERE = (
    "MNIST-M needs mnist_m_train/*.png with mnist_m_train_labels.txt and mnist_m_test/*.png with "
    "mnist_m_test_labels.txt (the unpacked mnist_m.tar.gz), from yaroslav.ganin.net"
)


def mnist_m(folder: Path) -> tuple[Original, Original]:
    """Training and test split; the images may lie in `folder` or in its `mnist_m` folder.

    Raises:
      FileNotFoundError: a folder or file is missing.
      ValueError: a line of labels or an image is wrong.
    """
    folder = folder / "mnist_m" if (folder / "mnist_m").is_dir() else folder
    return _read_folder(folder, "train"), _read_folder(folder, "test")


def _read_folder(folder: Path, split: str) -> Original:
    """`mnist_m_SPLIT_labels.txt` with lines `FILE DIGIT`; FILE lies in `mnist_m_SPLIT`.

    Images are read only when asked for: opening all 68,000 takes a while.

    Raises:
      FileNotFoundError: the folder or the text file is missing.
      ValueError: a line is not of that form, or its label is no digit.
    """
    images = first_existing(folder, [f"mnist_m_{split}"], _WHERE)
    path = first_existing(folder, [f"mnist_m_{split}_labels.txt"], _WHERE)
    with corruption_named(path):
        rows = [line.split() for line in read_text(path).splitlines() if line.strip()]
    for row in rows:
        if len(row) != 2 or not is_label(row[1]):
            raise ValueError(
                f"{path} has the line {short(' '.join(row))!r}; it must be a FILE and a DIGIT"
            )
    labels = class_labels(np.array([int(label) for _, label in rows], np.int64), f"{path}", 10)
    files = [images / name for name, _ in rows]
    return Original(labels, lambda index: np.stack([_read_image(files[k]) for k in index]))


def _read_image(path: Path) -> np.ndarray:
    """One image as u8[28, 28, 3].

    Raises:
      FileNotFoundError: the labels name an image that is not there.
      ValueError: it is no image, or of another size.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing though its label is there; {_WHERE}")
    with corruption_named(path):
        pixels = np.asarray(open_image(read_image(path))[0])
    if pixels.shape != (SIZE, SIZE, 3):
        raise ValueError(f"{path} has shape {pixels.shape}; MNIST-M's images are (28, 28, 3)")
    return pixels
