"""CIFAR-10-C: CIFAR-10's test photographs under 19 corruptions, each a domain.

Published as `CORRUPTION.npy` u8[50000, 32, 32, 3], 10,000 photographs at severity 1, then the same
at 2 to 5, and `labels.npy` u8[50000] (zenodo.org/records/2535967). Or made here from CIFAR-10.

TsmoBN (section 4.1, E.1) takes severity 1 of the 15 common corruptions, a client each, resizes to
256x256, and leaves one of four types out in turn ("noise", "blur", "weather", "digital"; 10 to 12
clients train): internal clients are divided at random 80 to 20 into training and validation, and
every photograph of the unseen ones is tested; all have 10,000, so that cutting them to the smallest
changes nothing. E.2.5 also tests on the four extra corruptions.
UniFed (section 4.1) does the same for unseen clients, and divides internal ones, all 15, 70, 10 and
20 into training, validation and test.

All corruptions have the same photographs, and so have training and unseen clients in the papers:
what is unseen is the corruption, not the photograph. A photograph has one name, such as
"test/00017", in all domains, so that no split has it both in training and in validation.

Reference: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.corruptions import CHUNK, CORRUPTIONS, SEVERITIES, corrupt, groups_of
from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import array_of_blocks
from fedjax_bn.data.pixels.resize import resized
from fedjax_bn.data.sets import cifar10
from fedjax_bn.data.sets.cifar10 import CLASSES, MEAN, SHAPE, STD, sample_names
from fedjax_bn.data.sets.files import corruption_named, is_label
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import class_labels

_COUNT = 10_000
_FORM = 1  # of what is made; to be raised when the same photographs would give other pixels
_WHERE = (
    "CIFAR-10-C is a folder with labels.npy and gaussian_noise.npy to saturate.npy (the unpacked "
    "CIFAR-10-C.tar of zenodo.org/records/2535967); instead of it, CIFAR-10 can be given, from "
    "which the corruptions are made: " + cifar10.WHERE
)


def load(
    path: str | Path,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int | str] = SEVERITIES,
    image_size: int = SHAPE[0],
    cache: Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Source:
    """Returns CIFAR-10-C as u8[N, 32, 32, 3], ten classes, a domain for each corruption.

    Args:
      path: the published folder, or one that holds it; or CIFAR-10, see `cifar10.read`.
      corruptions: the domains, of `corruptions.CORRUPTIONS`.
      severities: of 1 to 5, numbers or texts. A domain has them one after the other.
      image_size: pixels a side; other than 32 is resized (256 in the papers: 29 GB for the 15
        common corruptions at one severity).
      cache: folder for what is made or resized; without one it is held in memory.
      seed: at least 0; draws the noise of what is made.
      progress: show how far that is.

    Returns:
      Source "cifar10_c", normalized by CIFAR-10's channels; `groups` are the four types and
      "extra". Published severities that follow one another, in their size, are memory-mapped.

    Raises:
      FileNotFoundError: files are missing; all are named.
      ValueError: files are cut short or of another form (all are named), labels are out of range,
        or an argument is unknown.
      ModuleNotFoundError: frost or spatter is to be made without the extra package.
    """
    # a configuration has texts
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
    folder = next((one for one in (path, path / "CIFAR-10-C") if _is_published(one)), None)
    if folder:
        origin, arrays, notes = _read_published(folder, corruptions)
        all_labels = np.tile(origin.labels, len(SEVERITIES))
        key = hash_of("published", all_labels, corruptions, severities)
    else:
        if not cifar10.is_cifar10(path):
            raise FileNotFoundError(f"{path} has no CIFAR-10-C; {_WHERE}")
        origin, notes = cifar10.read(path)
        key = hash_of("made", *origin[1:4], corruptions, severities, seed)
        made_of = hash_of(_FORM, origin.images, list(severities), seed)
    count = len(origin.labels)
    of_severity = {one: slice((one - 1) * count, one * count) for one in severities}

    def blocks(name: str, shown: Any) -> Iterator[np.ndarray]:
        for severity, rows in of_severity.items():
            base = arrays[name][rows] if folder else origin.images
            for first in range(0, count, CHUNK):
                images = base[first : first + CHUNK]
                if not folder:
                    images = corrupt(images, name, severity, seed, first // CHUNK)
                yield resized(images, (image_size, image_size, 3))
                shown.update(len(images))

    labels, names = (np.tile(one, len(severities)) for one in (origin.labels, origin.names))
    shape = (len(labels), image_size, image_size, 3)
    as_published = folder is not None and image_size == SHAPE[0]
    total, task = len(corruptions) * len(labels), "resizing" if folder else "corrupting"
    pools = []
    with progress_bar(total, task, progress and not as_published) as shown:
        for name in corruptions:
            if as_published:
                images = _rows(arrays[name], list(of_severity.values()))
            else:
                content = hash_of(key, arrays[name]) if folder else made_of
                file = f"cifar10_c-{name}-{image_size}-{content}"
                images = array_of_blocks(cache, file, shape, lambda name=name: blocks(name, shown))
            pools.append(Pool(name, images, labels, names))
    groups = groups_of(corruptions)
    return check_source(Source("cifar10_c", CLASSES, tuple(pools), MEAN, STD, notes, groups, key))


def _rows(array: np.ndarray, slices: list[slice]) -> np.ndarray:
    """Returns the rows of some slices, as a view of the file if one follows the other."""
    if all(one.stop == two.start for one, two in pairwise(slices)):
        return array[slices[0].start : slices[-1].stop]
    return np.concatenate([array[one] for one in slices])


def _is_published(folder: Path) -> bool:
    return any((folder / f"{name}.npy").exists() for name in ("labels", *CORRUPTIONS))


def _read_published(
    folder: Path, corruptions: Sequence[str]
) -> tuple[Pool, dict[str, np.ndarray], tuple[str, ...]]:
    """Returns the photographs of one severity (labels alone), all images, memory-mapped, and notes.

    Raises:
      FileNotFoundError: files are missing; all are named.
      ValueError: files are corrupt; all are named.
    """
    files = {name: folder / f"{name}.npy" for name in ("labels", *corruptions)}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {_WHERE}")
    arrays, faults = {}, []
    for name, file in files.items():
        try:
            with corruption_named(file):
                arrays[name] = np.load(file, mmap_mode="r")
                if name == "labels":
                    arrays[name] = _labels(arrays[name])
                elif "labels" in arrays:
                    shape = (len(arrays["labels"]), *SHAPE)
                    own = arrays[name]
                    if own.dtype != np.uint8 or own.shape != shape:
                        raise ValueError(f"{own.dtype} {own.shape}, not uint8 {shape}")
        except ValueError as error:  # cut short, or no such file at all
            faults.append(f"{file.name} ({' '.join(str(error.__cause__).split())})")
    if faults:
        raise ValueError(f"{folder}: unusable are {', '.join(faults)}; fetch them again. {_WHERE}")
    labels = arrays.pop("labels")
    count = len(labels) // len(SEVERITIES)
    notes = ()
    if count != _COUNT:
        notes = (
            f"{folder} has {count} photographs a severity, CIFAR-10-C has {_COUNT}: a reduced copy",
        )
    return Pool("test", labels, labels[:count], sample_names("test", count)), arrays, notes


def _labels(labels: np.ndarray) -> np.ndarray:
    """Returns labels i32[5 n]; raises ValueError unless they are those of five severities."""
    labels = class_labels(labels, "it", len(CLASSES))
    count = len(labels) // len(SEVERITIES)
    if not count or len(labels) % len(SEVERITIES):
        raise ValueError(f"{len(labels)} labels, not five times as many as photographs")
    if (labels.reshape(len(SEVERITIES), count) != labels[:count]).any():
        raise ValueError("not the same photographs at each of five severities, in one order")
    return labels
