"""CIFAR-10-C: CIFAR-10's test photographs under 19 corruptions, each a domain.

Published as `CORRUPTION.npy` u8[50000, 32, 32, 3], 10,000 photographs at severity 1, then the same
at 2 to 5, and `labels.npy` u8[50000] (zenodo.org/records/2535967). Without these files, it is made
here from CIFAR-10.

TsmoBN (section 4.1, E.1) takes severity 1 of the 15 common corruptions, a client each, resizes to
256x256, and leaves out one of four types in turn ("noise", "blur", "weather", "digital"; 10 to 12
clients train). Internal clients are divided at random 80 to 20 into training and validation; unseen
clients are tested on every photograph. All have 10,000, so cutting them to the smallest changes
nothing. E.2.5 also tests on the four extra corruptions. UniFed (section 4.1) does the same for
unseen clients, and divides internal ones, all 15, into 70 % training, 10 % validation and 20 % test
samples.

All corruptions show the same photographs, so in the papers unseen clients show the training
clients' photographs: the corruption is unseen, not the photograph. A photograph has one name, such
as "test/00017", in all domains, so that no split has one both in training and in validation.

References: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions
and Perturbations", ICLR 2019; Krizhevsky, "Learning multiple layers of features from tiny images",
2009.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.corruptions import CHUNK, CORRUPTIONS, SEVERITIES, corrupt, groups_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import resized
from fedjax_bn.data.regular_files import read_regular
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.arrays import names_in_npz, read_npz
from fedjax_bn.data.sets.files import corruption_named, is_label
from fedjax_bn.data.source import Pool, Source, check_source, numbered_names
from fedjax_bn.engine.inputs import class_labels

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images
_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_SHAPE = (32, 32, 3)
_COUNT = 10_000
_FOLDER, _BATCH = "cifar-10-batches-py", "test_batch"
_FORM = 1  # raise it when the same photographs would give other corrupted pixels
_WHERE_CIFAR10 = (
    f"CIFAR-10 is {_FOLDER} with {_BATCH} (the unpacked cifar-10-python.tar.gz, from "
    "cs.toronto.edu/~kriz/cifar.html), or a .npz with test_images and test_labels"
)
_WHERE = (
    "CIFAR-10-C is a folder with labels.npy and gaussian_noise.npy to saturate.npy (the unpacked "
    "CIFAR-10-C.tar of zenodo.org/records/2535967); instead of it, CIFAR-10 can be given, from "
    "which the corruptions are made: " + _WHERE_CIFAR10
)


def load(
    path: str | Path,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int | str] = SEVERITIES,
    image_size: int = _SHAPE[0],
    cache: Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Source:
    """Returns CIFAR-10-C as u8[N, 32, 32, 3], ten classes, a domain for each corruption.

    Args:
      path: the published folder, or one that holds it; or CIFAR-10: the folder of its Python
        batches, one that holds it, or a `.npz`.
      corruptions: the domains, of `corruptions.CORRUPTIONS`.
      severities: some of 1 to 5, numbers or texts. A domain has them one after the other.
      image_size: pixels a side; images are resized if it is not 32 (256 in the papers: 29 GB for
        the 15 common corruptions at one severity).
      cache: folder for made or resized images; without one they are held in memory.
      seed: at least 0; draws the noise of images made here.
      progress: show how many images are done.

    Returns:
      Source "cifar10_c", normalized by CIFAR-10's channels; `groups` are the four types and
      "extra". Published severities are memory-mapped if they are consecutive and not resized.
    """
    # a configuration gives texts
    severities = [int(one) if is_label(str(one)) else one for one in severities]
    for argument, chosen, allowed in (
        ("corruptions", corruptions, tuple(CORRUPTIONS)),
        ("severities", severities, SEVERITIES),
    ):
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(allowed):
            raise ValueError(
                f"{argument} is {list(chosen)}; choose one or more, each once, from "
                f"{', '.join(map(str, allowed))}"
            )
    path, severities = Path(path), sorted(severities)
    files = ("labels", *CORRUPTIONS)
    folders = (path, path / "CIFAR-10-C")
    folder = next((f for f in folders if any((f / f"{n}.npy").exists() for n in files)), None)
    if folder:
        origin, arrays, notes = _read_published(folder, corruptions)
        all_labels = np.tile(origin.labels, len(SEVERITIES))
        key = hash_of("published", all_labels, corruptions, severities)
    else:
        origin, notes = _read_cifar10(path)
        key = hash_of("made", *origin[1:4], corruptions, severities, seed)
        made_of = hash_of(_FORM, origin.images, list(severities), seed)
    count = len(origin.labels)
    of_severity = {one: slice((one - 1) * count, one * count) for one in severities}

    def make(name: str, shown: Any, write: Write) -> tuple[str, ...]:
        for severity, rows in of_severity.items():
            base = arrays[name][rows] if folder else origin.images
            for first in range(0, count, CHUNK):
                images = base[first : first + CHUNK]
                if not folder:
                    images = corrupt(images, name, severity, seed, first // CHUNK)
                write(resized(images, (image_size, image_size, 3)))
                shown.update(len(images))
        return ()

    labels, names = (np.tile(one, len(severities)) for one in (origin.labels, origin.names))
    shape = (len(labels), image_size, image_size, 3)
    as_published = folder is not None and image_size == _SHAPE[0]
    total, task = len(corruptions) * len(labels), "resizing" if folder else "corrupting"
    pools = []
    with progress_bar(total, task, progress and not as_published) as shown:
        for name in corruptions:
            if as_published:
                first, last = severities[0] - 1, severities[-1]
                if last - first == len(severities):  # one block, which stays a view of the file
                    images = arrays[name][first * count : last * count]
                else:
                    images = np.concatenate([arrays[name][rows] for rows in of_severity.values()])
            else:
                content = hash_of(key, arrays[name]) if folder else made_of
                file = f"cifar10_c-{name}-{image_size}-{content}"
                images, _ = cached_array(cache, file, shape, partial(make, name, shown))
            pools.append(Pool(name, images, labels, names))
    groups = groups_of(corruptions)
    return check_source(Source("cifar10_c", _CLASSES, tuple(pools), MEAN, STD, notes, groups, key))


def _read_published(
    folder: Path, corruptions: Sequence[str]
) -> tuple[Pool, dict[str, np.ndarray], tuple[str, ...]]:
    """Returns labels and names of one severity, all images, memory-mapped, and notes.

    Errors name all files that are missing or corrupt.
    """
    files = {name: folder / f"{name}.npy" for name in ("labels", *corruptions)}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {_WHERE}")
    arrays, faults = {}, []
    for name, file in files.items():
        try:
            with corruption_named(file):
                arrays[name] = own = np.load(file, mmap_mode="r")
                if name == "labels":
                    arrays[name] = _labels_of_severities(own)
                elif "labels" in arrays:
                    shape = (len(arrays["labels"]), *_SHAPE)
                    if own.dtype != np.uint8 or own.shape != shape:
                        raise ValueError(f"{own.dtype} {own.shape}, not uint8 {shape}")
        except ValueError as error:  # cut short, or not such a file
            faults.append(f"{file.name} ({' '.join(str(error.__cause__).split())})")
    if faults:
        raise ValueError(f"{folder}: unusable are {', '.join(faults)}; fetch them again. {_WHERE}")
    labels = arrays.pop("labels")
    count = len(labels) // len(SEVERITIES)
    note = f"{folder} has {count} photographs a severity, CIFAR-10-C has {_COUNT}: a reduced copy"
    notes = (note,) if count != _COUNT else ()
    names = numbered_names("test", {"": count})
    return Pool("test", labels, labels[:count], names), arrays, notes


def _labels_of_severities(labels: np.ndarray) -> np.ndarray:
    """Returns labels i32[5 n]; raises ValueError unless they repeat for five severities."""
    labels = class_labels(labels, "it", len(_CLASSES))
    count = len(labels) // len(SEVERITIES)
    if not count or len(labels) % len(SEVERITIES):
        raise ValueError(f"{len(labels)} labels, not five times as many as photographs")
    if (labels.reshape(len(SEVERITIES), count) != labels[:count]).any():
        raise ValueError("not the same photographs at each of five severities, in one order")
    return labels


def _read_cifar10(path: Path) -> tuple[Pool, tuple[str, ...]]:
    """Returns CIFAR-10's test photographs u8[N, 32, 32, 3] as pool "test", and notes."""
    if path.suffix == ".npz":
        keys = ["test_images", "test_labels"]
        if missing := set(keys) - set(names_in_npz(path)):
            raise ValueError(
                f"{path} lacks the arrays {', '.join(sorted(missing))}; {_WHERE_CIFAR10}"
            )
        images, labels = read_npz(path, keys).values()
    else:
        if not ((path / _FOLDER).is_dir() or (path / _BATCH).exists()):
            raise FileNotFoundError(f"{path} has no CIFAR-10-C; {_WHERE}")
        folder = path / _FOLDER if (path / _FOLDER).is_dir() else path
        path = folder / _BATCH
        if not path.exists():
            raise FileNotFoundError(f"{folder} lacks {_BATCH}; {_WHERE_CIFAR10}")
        with corruption_named(path):
            content = _read_pickled_arrays(read_regular(path))
            # u8[N, 3072]: 1024 values of red, then green, then blue
            images = content[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = np.asarray(content[b"labels"])
    if images.dtype != np.uint8 or images.shape[1:] != _SHAPE or not len(images):
        raise ValueError(
            f"{path}: images are {images.dtype} {images.shape}; they must be uint8 [N, 32, 32, 3] "
            "with N at least 1"
        )
    if labels.shape != (len(images),):
        raise ValueError(
            f"{path}: labels have shape {labels.shape} for {len(images)} images; every image needs "
            "one label"
        )
    labels = class_labels(labels, f"{path}: the array of labels", len(_CLASSES))
    notes = (f"{path} has {len(labels)} test images of CIFAR-10's {_COUNT}: a reduced copy",)
    notes = notes if len(labels) != _COUNT else ()
    return Pool("test", images, labels, numbered_names("test", {"": len(labels)})), notes


# A pickle may call any function that its reader lets it find. Here it finds stand-ins that only
# record their arguments, so that neither the pickle's code nor NumPy's own `__setstate__`, which
# trusts the file, ever runs.


class _StandIn:
    """Records the arguments and the state of a dtype or an array."""

    def __init__(self, *given: Any):
        self.given, self.state = given, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: str, encoding: Any) -> bytes:
    """Returns what Python 3 pickles as bytes in protocol 2, always with "latin1"."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_ins = dict.fromkeys(("_reconstruct", "ndarray", "dtype"), _StandIn)
        stand_ins["encode"] = _encode
        modules = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy", "_codecs")
        if module not in modules or name not in stand_ins:
            raise ValueError(f"it names {module}.{name}, which arrays do not have")
        return stand_ins[name]


def _read_pickled_arrays(content: bytes) -> dict[bytes, Any]:
    """Returns the entries of a pickled dictionary of lists and arrays of integers.

    Raises ValueError, or what a damaged pickle raises, if it holds or names anything else.
    """
    # `genops` refuses lengths beyond the end. `Unpickler` allocates its memo up to the largest
    # number of a remembered object; picklers number these without gaps.
    for count, (operation, number, _) in enumerate(pickletools.genops(content)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and number > count:
            raise ValueError(f"it remembers object {number} after {count} operations")
    entries = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if type(entries) is not dict:
        raise ValueError(f"it holds a {type(entries).__name__}, not a dictionary")
    for name, value in entries.items():
        if isinstance(value, _StandIn):
            _, shape, dtype, by_columns, raw = value.state
            kind, order = dtype.given[0], dtype.state[1]
            kind, order = (x.decode() if isinstance(x, bytes) else x for x in (kind, order))
            if kind[0] not in "iu" or math.prod(shape) * int(kind[1:]) != len(raw):
                raise ValueError(f"it claims {kind} {shape}, and has {len(raw)} bytes")
            flat = np.frombuffer(raw, np.dtype(kind).newbyteorder(order))
            entries[name] = flat.reshape(shape, order="F" if by_columns else "C")
    return entries
