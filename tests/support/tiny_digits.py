"""Writes the five original datasets and a `.npz` in tiny: plain images that tell their number."""

import bz2
import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

TRAIN, TEST = 40, 20


def labels_of(count: int) -> np.ndarray:
    return np.arange(count) % 10


def shades(count: int, *shape: int, base: int = 0) -> np.ndarray:
    """Plain images whose grey level tells which sample they are."""
    levels = (base + np.arange(count)).astype(np.uint8)
    return np.broadcast_to(levels.reshape(-1, *(1 for _ in shape)), (count, *shape)).copy()


def write_idx(folder: Path, train: int, test: int, base: int) -> None:
    """Both parts in MNIST's form; the levels of the second one begin with `base`."""
    folder.mkdir(parents=True)
    for name, count, lowest in (("train", train, 0), ("t10k", test, base)):
        images, labels = shades(count, 28, 28, base=lowest), labels_of(count)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content = gzip.compress(header + array.astype(np.uint8).tobytes())
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(content)


def write_mat(folder: Path, prefix: str, ten_for_zero: bool) -> None:
    folder.mkdir()
    for name, count, base in (("train", TRAIN + 7, 0), ("test", TEST, 100)):
        labels = labels_of(count)
        if ten_for_zero:
            labels = np.where(labels == 0, 10, labels)
        images = np.moveaxis(shades(count, 32, 32, 3, base=base), 0, -1)
        content = {"X": images, "y": labels[:, None].astype(np.uint8)}
        savemat(folder / f"{prefix}{name}_32x32.mat", content)


def write_usps(folder: Path) -> None:
    folder.mkdir()
    for name, count, base in (("usps", TRAIN, 0), ("usps.t", TEST, 100)):
        values = shades(count, 256, base=base) / 255 * 2 - 1 + 1e-4
        lines = [
            " ".join([str(label + 1), *(f"{k + 1}:{v:.6f}" for k, v in enumerate(row))])
            for label, row in zip(labels_of(count), values, strict=True)
        ]
        raw = ("\n".join(lines) + "\n").encode()
        (folder / f"{name}.bz2").write_bytes(bz2.compress(raw))


def write_mnist_m(folder: Path) -> None:
    folder.mkdir()
    for name, count, base in (("train", TRAIN + 3, 0), ("test", TEST, 100)):
        images = folder / f"mnist_m_{name}"
        images.mkdir()
        lines = []
        for k, image in enumerate(shades(count, 28, 28, 3, base=base)):
            Image.fromarray(image).save(images / f"{k:08}.png")
            lines.append(f"{k:08}.png {k % 10}")
        (folder / f"mnist_m_{name}_labels.txt").write_text("\n".join(lines) + "\n")


def write_originals(folder: Path) -> Path:
    """All datasets, and both forms of Morpho-MNIST, whose test images have levels from 200 on."""
    write_idx(folder / "MNIST", TRAIN, TEST, 100)
    for name in ("global", "local"):
        write_idx(folder / "Morpho-MNIST" / name, 12, 6, 200)
    write_mat(folder / "SVHN", "", ten_for_zero=True)
    write_usps(folder / "USPS")
    write_mat(folder / "SynthDigits", "synth_", ten_for_zero=False)
    write_mnist_m(folder / "MNIST-M")
    return folder


def archive(path: Path, **changes) -> Path:
    arrays = {}
    for name, count in (("zeta", 30), ("alpha", 20)):
        for part in ("train", "test"):
            arrays[f"{name}__{part}_images"] = shades(count, 28, 28, 3)
            arrays[f"{name}__{part}_labels"] = labels_of(count).astype(np.int32)
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path
