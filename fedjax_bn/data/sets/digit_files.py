"""The five original datasets of FedBN's digits, each in the format of its authors.

    mnist                MNIST (LeCun et al., 1998) in idx files
    svhn, synth_digits   SVHN (Netzer et al., 2011) and SynthDigits (Ganin & Lempitsky, 2015) in
                         MATLAB files with X u8[32, 32, 3, N] and y [N, 1]
    usps                 USPS (Hull, 1994): 16x16 grey scans, 7291 for training and 2007 for testing
    mnist_m              MNIST-M (Ganin & Lempitsky, 2015): folders of PNG images, lists of labels

Each reader in `ORIGINALS` takes a folder and returns the training and the test split. It raises
FileNotFoundError if a file is missing, and ValueError if a file is corrupt or a label is not a
digit.
"""

import bz2
import gzip
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedjax_bn.data.pixels.raster import UPRIGHT, open_image, read_image
from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.arrays import check_unpacked, read_bounded
from fedjax_bn.data.sets.files import corruption_named, read_list
from fedjax_bn.engine.inputs import class_labels

SIZE = 28
_MNIST = (
    "MNIST needs (train|t10k)-images-idx3-ubyte and (train|t10k)-labels-idx1-ubyte, "
    "optionally .gz, from yann.lecun.com/exdb/mnist or any of its mirrors"
)
_SVHN = (
    "SVHN needs train_32x32.mat and test_32x32.mat (format 2, cropped digits), "
    "from ufldl.stanford.edu/housenumbers"
)
_SYNTH_DIGITS = (
    "SynthDigits needs synth_train_32x32.mat and synth_test_32x32.mat, "
    "from Yaroslav Ganin's page, yaroslav.ganin.net"
)
_USPS = (
    "USPS needs usps.h5, or usps.bz2 and usps.t.bz2 (unpacked or not) from the multi-class page of "
    "LIBSVM Data, csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
)
_MNIST_M = (
    "MNIST-M needs mnist_m_train/*.png with mnist_m_train_labels.txt and mnist_m_test/*.png with "
    "mnist_m_test_labels.txt (the unpacked mnist_m.tar.gz), from yaroslav.ganin.net"
)
_BYTES = {"uint8": 1, "int8": 1, "logical": 1}  # of a number in a MATLAB file; 8 for others
_LARGEST_LIBSVM = 2**28  # bytes; USPS takes a tenth of that


class Original(NamedTuple):
    """One split of a dataset as its authors published it.

    labels: i32[N].
    read: indices i64[n] -> images u8[n, h, w] or u8[n, h, w, 3]; reads only these images.
    published: number of the first samples, those of the published training part; None for all.
    """

    labels: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]
    published: int | None = None


def to_digits(images: np.ndarray) -> np.ndarray:
    """Returns images u8[n, h, w] or u8[n, h, w, 3] as u8[n, 28, 28, 3], grey as three channels.

    Other sizes are resized by Pillow's bilinear filter, which averages when it shrinks, like
    torchvision's Resize in FedBN's code.
    """
    if images.shape[1:3] != (SIZE, SIZE):
        resized = [Image.fromarray(one).resize((SIZE, SIZE), Image.BILINEAR) for one in images]
        images = np.stack([np.asarray(one) for one in resized])
    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=-1)
    return np.ascontiguousarray(images)


def mnist(folder: Path, where: str = _MNIST) -> tuple[Original, Original]:
    """Reads MNIST in `folder`, or in its `raw` folder, torchvision's layout.

    The error message for a missing file ends with `where`: what is needed, and where to get it.
    """
    folder = folder / "raw" if (folder / "raw").is_dir() else folder

    def find(part: str, kind: str, axes: int) -> Path:
        names = [f"{part}-{kind}{sign}idx{axes}-ubyte" for sign in "-."]
        return _find(folder, [name + end for end in ("", ".gz") for name in names], where)

    splits = []
    for part in ("train", "t10k"):
        image_path, label_path = find(part, "images", 3), find(part, "labels", 1)
        images, labels = _read_idx(image_path, axes=3), _read_idx(label_path, axes=1)
        if len(images) != len(labels):
            raise ValueError(
                f"{image_path} has {len(images)} images but {label_path.name} {len(labels)} "
                "labels; fetch both again"
            )
        splits.append(Original(class_labels(labels, f"{label_path}", 10), images.__getitem__))
    return splits[0], splits[1]


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads the u8 array of an idx file with that number of axes, unzipped if it ends in .gz."""
    # big-endian: two zero bytes, a type (8 for u8), the number of axes, u32 lengths, then values
    unpacked = gzip.open if path.suffix == ".gz" else nullcontext
    with corruption_named(path), open_regular(path, math.inf) as raw, unpacked(raw) as file:
        head, expected = file.read(4 + 4 * axes), bytes([0, 0, 8, axes])
        shape = tuple(int(side) for side in np.frombuffer(head[4:], ">u4"))
        if head[:4] != expected or len(shape) != axes:
            raise ValueError(
                f"it is not an idx file of bytes with {axes} axes: it begins with "
                f"{head[:4].hex()}, not {expected.hex()}"
            )
        check_unpacked(math.prod(shape), path)
        values = read_bounded(file, math.prod(shape))
        if len(values) != math.prod(shape):
            raise ValueError(f"it has {len(values)} values where its header has {shape}")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _svhn(folder: Path) -> tuple[Original, Original]:
    """Reads SVHN's cropped digits, where label 10 means 0."""
    names = [f"{part}_32x32.mat" for part in ("train", "test")]
    both = [_read_mat(_find(folder, [name], _SVHN), first=1) for name in names]
    # counted from 1, the digit 1 is class 0 and the digit 0 class 9
    return tuple(one._replace(labels=(one.labels + np.int32(1)) % np.int32(10)) for one in both)


def _synth_digits(folder: Path) -> tuple[Original, Original]:
    """Reads SynthDigits, whose labels are the digits."""
    names = [f"synth_{part}_32x32.mat" for part in ("train", "test")]
    return tuple(_read_mat(_find(folder, [name], _SYNTH_DIGITS), first=0) for name in names)


def _read_mat(path: Path, first: int) -> Original:
    """Reads a MATLAB file, whose labels, counted from `first`, become 0..9."""
    from scipy.io import loadmat, whosmat

    with corruption_named(path), open_regular(path, math.inf) as file:
        there = [(math.prod(shape), kind) for _, shape, kind in whosmat(file)]
        check_unpacked(sum(_BYTES.get(kind, 8) * count for count, kind in there), path)
        file.seek(0)
        content = loadmat(file, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].ravel()
        if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
            raise ValueError(
                f"X is {images.dtype} {images.shape} for {len(labels)} labels, not uint8 "
                f"(32, 32, 3, {len(labels)})"
            )
    labels = class_labels(labels, f"{path}, y", 10, first)
    # picks before moving the axes: all of SynthDigits takes 1.5 GB
    return Original(labels, lambda index: np.moveaxis(images[..., index], -1, 0))


def _usps(folder: Path) -> tuple[Original, Original]:
    """Reads `usps.h5` if it exists, else LIBSVM's two files."""
    if (folder / "usps.h5").exists():
        return _read_h5(folder / "usps.h5", "train"), _read_h5(folder / "usps.h5", "test")
    train, test = (_find(folder, [f"{name}.bz2", name], _USPS) for name in ("usps", "usps.t"))
    return _read_libsvm(train), _read_libsvm(test)


def _read_h5(path: Path, split: str) -> Original:
    """Reads a group of usps.h5: data f32[N, 256] in [0, 1], target [N] in 0..9."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs h5py; install fedjax_bn with its data extra, or give usps.bz2"
        ) from error
    with corruption_named(path), open_regular(path, math.inf) as raw, h5py.File(raw) as file:
        data, target = file[split]["data"], file[split]["target"]
        check_unpacked(data.nbytes + target.nbytes, path)
        pixels, target = data[()].astype(np.float64), target[()]
    return _scans(pixels, class_labels(target, f"{path}, target,", 10), path)


def _read_libsvm(path: Path) -> Original:
    """Reads lines `label index:value ...`: labels 1..10 for digits 0..9, values in [-1, 1]."""
    from sklearn.datasets import load_svmlight_file

    unpacked = bz2.open if path.suffix == ".bz2" else nullcontext
    with corruption_named(path), open_regular(path, _LARGEST_LIBSVM) as raw, unpacked(raw) as file:
        content = BytesIO(read_bounded(file, _LARGEST_LIBSVM))
        features, target = load_svmlight_file(content, n_features=256, zero_based=False)
    labels = class_labels(target, f"{path}", 10, first=1)
    return _scans((features.toarray() + 1) / 2, labels, path)


def _scans(pixels: np.ndarray, labels: np.ndarray, path: Path) -> Original:
    """Returns scans f64[N, 256] in [0, 1] as bytes [N, 16, 16]."""
    if pixels.shape != (len(labels), 256) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError(
            f"{path} has pixels of shape {pixels.shape} for {len(labels)} labels; they must be "
            f"({len(labels)}, 256), for 16x16 images, in the range of the format: fetch it again"
        )
    # truncated, not rounded, as FedBN's code does
    images = (pixels.astype(np.float32) * np.float32(255)).astype(np.uint8).reshape(-1, 16, 16)
    return Original(labels, images.__getitem__)


def _mnist_m(folder: Path, orientation: str = UPRIGHT) -> tuple[Original, Original]:
    """Reads MNIST-M in `folder` or in its `mnist_m` folder; `orientation` is as in `decode`."""
    folder = folder / "mnist_m" if (folder / "mnist_m").is_dir() else folder

    def read_png(path: Path) -> np.ndarray:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing though its label is there; {_MNIST_M}")
        with corruption_named(path):
            pixels = np.asarray(open_image(read_image(path), orientation=orientation)[0])
            if pixels.shape != (SIZE, SIZE, 3):
                raise ValueError(f"it has shape {pixels.shape}; MNIST-M's images are (28, 28, 3)")
        return pixels

    splits = []
    for part in ("train", "test"):
        images = _find(folder, [f"mnist_m_{part}"], _MNIST_M)
        path = _find(folder, [f"mnist_m_{part}_labels.txt"], _MNIST_M)
        names, labels = read_list(path)

        # reads only the images asked for: opening all 68,000 takes a while
        def read(index: np.ndarray, names: list = names, images: Path = images) -> np.ndarray:
            pixels = [read_png(images / names[k]) for k in index]
            return np.array(pixels, np.uint8).reshape(-1, SIZE, SIZE, 3)

        splits.append(Original(class_labels(labels, f"{path}", 10), read))
    return splits[0], splits[1]


def _find(folder: Path, names: Sequence[str], where: str) -> Path:
    """Returns the first of `names` that exists in `folder`; the error message ends with `where`."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{folder / names[0]} is missing; {where}")


# In the order of the authors' code; each with its folder and its reader.
ORIGINALS: Mapping[str, tuple[str, Callable[..., tuple[Original, Original]]]] = MappingProxyType(
    {
        "mnist": ("MNIST", mnist),
        "svhn": ("SVHN", _svhn),
        "usps": ("USPS", _usps),
        "synth_digits": ("SynthDigits", _synth_digits),
        "mnist_m": ("MNIST-M", _mnist_m),
    }
)
