"""CIFAR-10 (Krizhevsky, 2009): 60,000 photographs of 32x32 in ten classes."""

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.regular_files import read_regular
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import Pool
from fedjax_bn.engine.inputs import class_labels

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images
SHAPE = (32, 32, 3)
_FOLDER, _BATCH = "cifar-10-batches-py", "test_batch"
_COUNT = 10_000
WHERE = (
    f"CIFAR-10 is {_FOLDER} with {_BATCH} (the unpacked cifar-10-python.tar.gz, from "
    "cs.toronto.edu/~kriz/cifar.html), or a .npz with test_images and test_labels"
)


def is_cifar10(path: Path) -> bool:
    """Returns whether `read` is the reader for this path, be its content sound or not."""
    return path.suffix == ".npz" or (path / _FOLDER).is_dir() or (path / _BATCH).exists()


def read(path: Path) -> tuple[Pool, tuple[str, ...]]:
    """Reads the test photographs.

    Args:
      path: the folder of the python batches, or one that holds it; or a `.npz`.

    Returns:
      Pool "test" with u8[N, 32, 32, 3] images and names such as "test/00017"; and notes for the
      user, such as a number of images other than the published one.

    Raises:
      FileNotFoundError: the batch is missing.
      ValueError: a file is corrupt.
    """
    notes = ()
    if path.suffix == ".npz":
        keys = ["test_images", "test_labels"]
        if missing := set(keys) - set(names_in_npz(path)):
            raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}; {WHERE}")
        images, labels = read_npz(path, keys).values()
    else:
        folder = path / _FOLDER if (path / _FOLDER).is_dir() else path
        path = folder / _BATCH
        if not path.is_file():
            raise FileNotFoundError(f"{folder} lacks {_BATCH}; {WHERE}")
        with corruption_named(path):
            content = read_pickled_arrays(read_regular(path))
            # u8[N, 3072]: 1024 values of red, then green, then blue
            images = content[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = np.asarray(content[b"labels"])
    if images.dtype != np.uint8 or images.shape[1:] != SHAPE or not len(images):
        raise ValueError(
            f"{path}: images are {images.dtype} {images.shape}; they must be uint8 [N, 32, 32, 3] "
            "with N at least 1"
        )
    if labels.shape != (len(images),):
        raise ValueError(
            f"{path}: labels have shape {labels.shape} for {len(images)} images; every image needs "
            "one label"
        )
    labels = class_labels(labels, f"{path}: the array of labels", len(CLASSES))
    if len(labels) != _COUNT:
        notes = (f"{path} has {len(labels)} test images of CIFAR-10's {_COUNT}: a reduced copy",)
    return Pool("test", images, labels, sample_names("test", len(labels))), notes


def sample_names(part: str, count: int) -> np.ndarray:
    """Returns str[count]: PART/NUMBER, five digits."""
    return np.array([f"{part}/{k:05}" for k in range(count)])


# A pickle may call any function that its reader lets it find. Here it finds stand-ins that only
# remember what they are given, so that neither its code nor NumPy's own `__setstate__`, which
# trusts whoever wrote a file, ever runs.


class _Remembered:
    """Stands in for a dtype or an array: what it was called with, and its state."""

    def __init__(self, *given: Any):
        self.given, self.state = given, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: str, encoding: Any) -> bytes:
    """Returns bytes as Python 3 pickles them in protocol 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_ins = dict.fromkeys(("_reconstruct", "ndarray", "dtype"), _Remembered)
        stand_ins["encode"] = _encode
        modules = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy", "_codecs")
        if module not in modules or name not in stand_ins:
            raise ValueError(f"it names {module}.{name}, which arrays do not have")
        return stand_ins[name]


def read_pickled_arrays(content: bytes) -> dict[bytes, Any]:
    """Returns the entries of a pickled dictionary of lists and arrays of integers.

    Raises:
      ValueError, and whatever else a damaged pickle raises: it is not such a dictionary, or names
        anything but arrays.
    """
    # `genops` refuses lengths beyond the end. `Unpickler` makes room for as many remembered objects
    # as the number of one claims; picklers count them.
    for count, (operation, number, _) in enumerate(pickletools.genops(content)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and number > count:
            raise ValueError(f"it remembers object {number} after {count} operations")
    entries = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if type(entries) is not dict:
        raise ValueError(f"it holds a {type(entries).__name__}, not a dictionary")
    return {
        name: _array(value.state) if isinstance(value, _Remembered) else value
        for name, value in entries.items()
    }


def _array(state: Any) -> np.ndarray:
    """Returns the array of integers that the state of an ndarray describes."""
    _, shape, dtype, by_columns, raw = state
    kind, order = dtype.given[0], dtype.state[1]
    kind, order = (x.decode() if isinstance(x, bytes) else x for x in (kind, order))
    if kind[0] not in "iu" or math.prod(shape) * int(kind[1:]) != len(raw):
        raise ValueError(f"it claims {kind} {shape}, and has {len(raw)} bytes")
    flat = np.frombuffer(raw, np.dtype(kind).newbyteorder(order))
    return flat.reshape(shape, order="F" if by_columns else "C")
