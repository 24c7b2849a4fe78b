"""Makes the `.npz` of FedBN's digits from the original datasets.

    python launch/convert/digits.py FOLDER digits.npz [--morpho]

FOLDER holds the originals:

    MNIST/        train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... (each optionally .gz),
                  from yann.lecun.com/exdb/mnist or any of its mirrors
    SVHN/         train_32x32.mat, test_32x32.mat (format 2), from ufldl.stanford.edu/housenumbers
    USPS/         usps.bz2, usps.t.bz2, of LIBSVM, csie.ntu.edu.tw/~cjlin/libsvmtools/datasets
    SynthDigits/  synth_train_32x32.mat, synth_test_32x32.mat, from yaroslav.ganin.net
    MNIST-M/      mnist_m_train/*.png, mnist_m_train_labels.txt, and the same for test, of the
                  unpacked mnist_m.tar.gz, from yaroslav.ganin.net
    Morpho-MNIST/ with --morpho: global/ and local/, each as MNIST/, from
                  github.com/dccastro/Morpho-MNIST

As in FedBN's code, all samples of a dataset are divided 80 to 20 by class, and images become 28x28
pixels by Pillow's bilinear filter. With --morpho, MNIST and MNIST-M do not train on their published
test parts, whose digits Morpho-MNIST shows.
"""

import argparse
import bz2
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import loadmat

from fedjax_bn.data.division.partition import stratified_split
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets.files import corruption_named, read_list
from fedjax_bn.engine.inputs import class_labels

Samples = tuple[np.ndarray, np.ndarray]  # images u8[N, ...], labels [N]
PARTS = ("train", "test")


def read_idx(path: Path) -> np.ndarray:
    """Returns the bytes of an idx file, u8[...], unzipped if only `path.gz` is there."""
    packed = path.with_name(f"{path.name}.gz")
    opened, path = (open, path) if path.exists() else (gzip.open, packed)
    with corruption_named(path), opened(path, "rb") as file:
        # Big-endian: two zero bytes, a type, the number of axes, u32 lengths, then values.
        axes = file.read(4)[3]
        shape = np.frombuffer(file.read(4 * axes), ">u4")
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


def read_mnist(folder: Path, part: str) -> Samples:
    """Reads a part of MNIST, or of what has its form."""
    prefix = {"train": "train", "test": "t10k"}[part]
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    images, labels = (read_idx(folder / name) for name in names)
    return images, labels


def read_mat(path: Path) -> Samples:
    """Reads a MATLAB file of X u8[32, 32, 3, N] and y [N, 1]."""
    with corruption_named(path):
        content = loadmat(path, variable_names=["X", "y"])
        # SVHN writes 10 for the digit 0; SynthDigits writes 0.
        return np.moveaxis(content["X"], -1, 0), content["y"].ravel() % 10


def read_usps(folder: Path, part: str) -> Samples:
    """Reads lines `label index:value ...`: labels 1..10 for digits 0..9, values in [-1, 1]."""
    from sklearn.datasets import load_svmlight_file

    path = folder / {"train": "usps.bz2", "test": "usps.t.bz2"}[part]
    with corruption_named(path), bz2.open(path) as file:
        features, labels = load_svmlight_file(file, n_features=256, zero_based=False)
        pixels = ((features.toarray() + 1) / 2).astype(np.float32)
        # Truncated, not rounded, as in FedBN's code.
        return (pixels * np.float32(255)).astype(np.uint8).reshape(-1, 16, 16), labels - 1


def read_mnist_m(folder: Path, part: str) -> Samples:
    """Reads a folder of images and the list of their labels."""
    names, labels = read_list(folder / f"mnist_m_{part}_labels.txt")
    images = []
    for name in names:
        path = folder / f"mnist_m_{part}" / name
        with corruption_named(path), Image.open(path) as image:
            images.append(np.asarray(image.convert("RGB")))
    return np.stack(images), labels


# In the order of the authors' code: domain -> folder and `read(folder, part)`.
ORIGINALS: dict[str, tuple[str, Callable[[Path, str], Samples]]] = {
    "mnist": ("MNIST", read_mnist),
    "svhn": ("SVHN", lambda folder, part: read_mat(folder / f"{part}_32x32.mat")),
    "usps": ("USPS", read_usps),
    "synth_digits": (
        "SynthDigits",
        lambda folder, part: read_mat(folder / f"synth_{part}_32x32.mat"),
    ),
    "mnist_m": ("MNIST-M", read_mnist_m),
}
SHOWN_BY_MORPHO = ("mnist", "mnist_m")


def as_digits(images: np.ndarray) -> np.ndarray:
    """Returns images u8[N, h, w] or u8[N, h, w, 3] as u8[N, 28, 28, 3], grey as three channels."""
    if images.shape[1:3] != (28, 28):
        resized = [Image.fromarray(image).resize((28, 28), Image.BILINEAR) for image in images]
        images = np.stack([np.asarray(image) for image in resized])
    return np.repeat(images[..., None], 3, axis=-1) if images.ndim == 3 else images


def convert(folder: Path, morpho: bool = False) -> dict[str, np.ndarray]:
    """Returns the arrays of the `.npz`."""
    arrays = {}
    for domain, (name, read) in ORIGINALS.items():
        (images, labels), (test_images, test_labels) = (read(folder / name, p) for p in PARTS)
        published = len(labels)
        labels = np.concatenate([labels, test_labels])
        labels = class_labels(labels, f"{folder / name}", 10)
        images = np.concatenate([images, test_images])
        size = 4 * len(labels) // 5
        # A fixed seed: the test samples are the same in every experiment, as in the paper.
        divided = stratified_split(labels, [size, len(labels) - size], generator(0))
        for part, rows in zip(PARTS, divided, strict=True):
            rows = np.sort(rows)
            if morpho and part == "train" and domain in SHOWN_BY_MORPHO:
                rows = rows[rows < published]
            arrays[f"{domain}__{part}_images"] = as_digits(images[rows])
            arrays[f"{domain}__{part}_labels"] = labels[rows]
    for kind in ("global", "local") if morpho else ():
        images, labels = read_mnist(folder / "Morpho-MNIST" / kind, "test")
        arrays[f"morpho_{kind}__test_images"] = as_digits(images)
        arrays[f"morpho_{kind}__test_labels"] = labels
    return arrays


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--morpho", action="store_true", help="with Morpho-MNIST, which only tests")
    options = parser.parse_args()
    np.savez(options.file, **convert(options.folder, options.morpho))
