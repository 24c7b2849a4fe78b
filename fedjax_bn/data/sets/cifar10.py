"""CIFAR-10 (Krizhevsky, 2009): 60,000 photographs of 32x32 in ten classes."""

from pathlib import Path

import numpy as np

from fedjax_bn.data.regular_files import read_regular
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.pickled import read_pickled_arrays
from fedjax_bn.data.source import TEST, TRAIN, Pool
from fedjax_bn.engine.inputs import class_labels

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images
_FOLDER = "cifar-10-batches-py"
_BATCHES = {TRAIN: tuple(f"data_batch_{k}" for k in range(1, 6)), TEST: ("test_batch",)}
_COUNTS = {TRAIN: 50_000, TEST: 10_000}
PART_NAMES = {TRAIN: "train", TEST: "test"}
SHAPE = (32, 32, 3)
WHERE = (
    f"CIFAR-10 is {_FOLDER} with data_batch_1 to 5 and test_batch (the unpacked "
    "cifar-10-python.tar.gz, from cs.toronto.edu/~kriz/cifar.html), or a .npz with train_images, "
    "train_labels, test_images, test_labels"
)


def is_cifar10(path: Path) -> bool:
    """Whether `read` is the reader for this path, be its content sound or not."""
    batches = [name for names in _BATCHES.values() for name in names]
    in_folder = any((_folder_of(path) / name).exists() for name in batches)
    return path.suffix == ".npz" or in_folder or (path / _FOLDER).is_dir()


def _folder_of(path: Path) -> Path:
    """The folder of the batches in `path`, where there is one; else `path`."""
    return path / _FOLDER if (path / _FOLDER).is_dir() else path


def read(path: Path, part: int) -> tuple[Pool, tuple[str, ...]]:
    """The training or the test photographs.

    Args:
      path: the folder of the python batches, or one that holds it; or a `.npz`.
      part: TRAIN or TEST.

    Returns:
      Pool "train" or "test" with u8[N, 32, 32, 3] images and names such as "test/00017"; and notes
      for the user, such as a number of images other than the published one.

    Raises:
      FileNotFoundError: files are missing; the sentence names them all.
      ValueError: a file is corrupt.
    """
    images, labels = _from_npz(path, part) if path.suffix == ".npz" else _from_batches(path, part)
    name = PART_NAMES[part]
    notes = ()
    if len(labels) != _COUNTS[part]:
        notes = (
            f"{path} has {len(labels)} {name} images of CIFAR-10's {_COUNTS[part]}: a reduced copy",
        )
    return Pool(name, images, labels, sample_names(name, len(labels))), notes


def sample_names(part: str, count: int) -> np.ndarray:
    """str[count]: PART/NUMBER, five digits."""
    return np.array([f"{part}/{k:05}" for k in range(count)])


def _from_batches(path: Path, part: int) -> tuple[np.ndarray, np.ndarray]:
    folder = _folder_of(path)
    missing = [name for name in _BATCHES[part] if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {WHERE}")
    batches = [_read_batch(folder / name) for name in _BATCHES[part]]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return images, labels


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with corruption_named(path):
        content = read_pickled_arrays(read_regular(path))
        # u8[N, 3072]: 1024 values of red, then green, then blue
        images, labels = content[b"data"], np.asarray(content[b"labels"])
        if images.dtype != np.uint8:
            raise ValueError(f"data is {images.dtype}, not uint8")
        images = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    _check(images, labels, path, "data", "labels")
    return images, class_labels(labels, f"{path}, labels,", len(CLASSES))


def _from_npz(path: Path, part: int) -> tuple[np.ndarray, np.ndarray]:
    keys = [f"{PART_NAMES[part]}_{kind}" for kind in ("images", "labels")]
    there = names_in_npz(path)
    missing = [key for key in keys if key not in there]
    if missing:
        raise ValueError(f"{path} lacks the arrays {', '.join(missing)}; {WHERE}")
    images, labels = read_npz(path, keys).values()
    _check(images, labels, path, *keys)
    return images, class_labels(labels, f"{path}, {keys[1]},", len(CLASSES))


def _check(
    images: np.ndarray, labels: np.ndarray, path: Path, images_name: str, labels_name: str
) -> None:
    """Raises ValueError if the arrays are not u8[N, 32, 32, 3] and [N], N at least 1."""
    if images.dtype != np.uint8 or images.shape[1:] != SHAPE or not len(images):
        raise ValueError(
            f"{path}: {images_name} is {images.dtype} {images.shape}; it must be uint8 "
            "[N, 32, 32, 3] with N at least 1"
        )
    if labels.shape != (len(images),):
        raise ValueError(
            f"{path}: {labels_name} has shape {labels.shape} for {len(images)} images; every "
            "image needs one label"
        )
