"""CIFAR-10-C: CIFAR-10's test photographs under 19 corruptions, each a domain.

Published as `CORRUPTION.npy` u8[50000, 32, 32, 3], 10,000 photographs at severity 1, then the same
at 2 to 5, and `labels.npy` u8[50000] (zenodo.org/records/2535967). Or made here from CIFAR-10.

TsmoBN (section 4.1, E.1) takes severity 1 of the 15 common corruptions, a client each, resizes to
256x256, and leaves one of four types out in turn ("noise", "blur", "weather", "digital"; 10 to 12
clients train): internal clients are divided at random 80 to 20 into training and validation, and
every photograph of the unseen ones is tested; all have 10,000, so that cutting them to the smallest
changes nothing. E.2.5 tests on the four extra corruptions besides.
UniFed (section 4.1) does the same for unseen clients, and for internal ones, all 15, divides 70,
10 and 20 into training, validation and test.

All corruptions have the same photographs, and so have training and unseen clients in the papers:
what is unseen is the corruption, not the photograph. A photograph has one name, such as
"test/00017", in all domains, so that no split has it both in training and in validation.

Reference: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.corruptions import CORRUPTIONS, SEVERITIES, groups_of
from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import array_of_blocks
from fedjax_bn.data.pixels.resize import resized
from fedjax_bn.data.sets import cifar10
from fedjax_bn.data.sets.cifar10 import CLASSES, MEAN, SHAPE, STD, sample_names
from fedjax_bn.data.sets.cifar10_corrupted import BLOCK, make_pools, read_photographs
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.lists import is_label
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import class_labels

_COUNT = 10_000
_WHERE = (
    "CIFAR-10-C is a folder with labels.npy and gaussian_noise.npy to saturate.npy (the unpacked "
    "CIFAR-10-C.tar of zenodo.org/records/2535967); in place of it, CIFAR-10 can be given, from "
    "which the corruptions are made: " + cifar10.WHERE
)


def load(
    path: str | Path,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int | str] = SEVERITIES,
    photographs: Sequence[str] = ("test",),
    image_size: int = SHAPE[0],
    cache: Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Source:
    """CIFAR-10-C as u8[N, 32, 32, 3], ten classes, a domain for each corruption.

    Args:
      path: the published folder, or one that holds it; or CIFAR-10, see `cifar10.read`.
      corruptions: the domains, of `corruptions.CORRUPTIONS`.
      severities: of 1 to 5, numbers or texts. A domain has them one after the other.
      photographs: of CIFAR-10's "train" and "test"; the published files have "test" alone. With
        both, they are the official parts, and training never sees a photograph of the test.
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
    _check_choice("corruptions", corruptions, tuple(CORRUPTIONS))
    _check_choice("severities", severities, SEVERITIES)
    _check_choice("photographs", photographs, tuple(cifar10.PART_NAMES.values()))
    path, severities = Path(path), sorted(severities)
    if folder := _published_folder(path):
        if tuple(photographs) != ("test",):
            raise ValueError(
                f"photographs is {list(photographs)}, but {folder} has the test photographs of "
                "CIFAR-10 alone; give CIFAR-10 itself for others"
            )
        labels, arrays, notes = _read_published(folder, corruptions)
        key = hash_of("published", labels, corruptions, severities)
        pools = _published_pools(labels, arrays, severities, image_size, cache, key, progress)
    elif cifar10.is_cifar10(path):
        origin, notes = read_photographs(path, photographs)
        key = hash_of("made", *origin[1:4], corruptions, severities, seed)
        pools = make_pools(origin, corruptions, severities, image_size, cache, seed, progress)
    else:
        raise FileNotFoundError(f"{path} has no CIFAR-10-C; {_WHERE}")
    groups = groups_of(corruptions)
    return check_source(Source("cifar10_c", CLASSES, pools, MEAN, STD, notes, groups, key))


def _check_choice(argument: str, chosen: Sequence, allowed: Sequence) -> None:
    """Raises ValueError unless one or more of `allowed` are chosen, each once."""
    unknown = [one for one in chosen if one not in allowed]
    if unknown or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"{argument} is {list(chosen)}; choose one or more, each once, from "
            f"{', '.join(map(str, allowed))}"
        )


def _published_folder(path: Path) -> Path | None:
    for folder in (path, path / "CIFAR-10-C"):
        if any((folder / f"{name}.npy").exists() for name in ("labels", *CORRUPTIONS)):
            return folder
    return None


def _read_published(
    folder: Path, corruptions: Sequence[str]
) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[str, ...]]:
    """Labels i32[5 n], images of each corruption u8[5 n, 32, 32, 3] (memory-mapped), and notes.

    Raises:
      FileNotFoundError: files are missing; all are named.
      ValueError: files are corrupt; all are named.
    """
    files = {name: folder / f"{name}.npy" for name in ("labels", *corruptions)}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {_WHERE}")
    arrays, faults = {}, []
    for name, file in files.items():
        try:
            with corruption_named(file):
                arrays[name] = np.load(file, mmap_mode="r")
        except ValueError as error:  # cut short, or no such file at all
            faults.append(f"{file.name} ({' '.join(str(error.__cause__).split())})")
    labels = arrays.pop("labels", None)
    if labels is not None:
        faults += _label_faults(labels)
        # without sound labels there is no telling how many images there should be
        if not faults:
            faults += _image_faults(arrays, (len(labels), *SHAPE))
    if faults:
        raise ValueError(f"{folder}: unusable are {', '.join(faults)}; fetch them again. {_WHERE}")
    count = len(labels) // len(SEVERITIES)
    note = f"{folder} has {count} photographs a severity, CIFAR-10-C has {_COUNT}: a reduced copy"
    labels = class_labels(labels, "labels.npy", len(CLASSES))
    return labels, arrays, () if count == _COUNT else (note,)


def _label_faults(labels: np.ndarray) -> list[str]:
    try:
        class_labels(labels, "it", len(CLASSES))
    except ValueError as error:
        return [f"labels.npy ({error})"]
    if not len(labels):
        return ["labels.npy (it is empty)"]
    if len(labels) % len(SEVERITIES):
        return [f"labels.npy ({len(labels)} labels, not five times as many as photographs)"]
    if (labels.reshape(len(SEVERITIES), -1) != labels[: len(labels) // len(SEVERITIES)]).any():
        return ["labels.npy (not the same photographs at each of five severities, in one order)"]
    return []


def _image_faults(arrays: dict[str, np.ndarray], shape: tuple[int, ...]) -> list[str]:
    return [
        f"{name}.npy ({array.dtype} {array.shape}, not uint8 {shape} as labels.npy tells)"
        for name, array in arrays.items()
        if array.dtype != np.uint8 or array.shape != shape
    ]


def _published_pools(
    labels: np.ndarray,
    arrays: dict[str, np.ndarray],
    severities: list[int],
    image_size: int,
    cache: Path | None,
    key: str,
    progress: bool,
) -> tuple[Pool, ...]:
    count = len(labels) // len(SEVERITIES)
    rows = slice((severities[0] - 1) * count, severities[-1] * count)
    if severities != list(range(severities[0], severities[-1] + 1)):
        rows = np.concatenate([np.arange(count) + (s - 1) * count for s in severities])
    names = np.tile(sample_names("test", count), len(severities))
    shape = (len(names), image_size, image_size, 3)
    pools = []
    with progress_bar(
        len(arrays) * len(names), "resizing", progress and image_size != SHAPE[0]
    ) as shown:
        for name, array in arrays.items():
            images = array[rows]
            if image_size != SHAPE[0]:
                file = f"cifar10_c-{name}-{image_size}-{hash_of(key, array)}"
                images = array_of_blocks(
                    cache, file, shape, lambda i=images: _resized(i, image_size, shown)
                )
            pools.append(Pool(name, images, labels[rows], names))
    return tuple(pools)


def _resized(images: np.ndarray, size: int, shown: object) -> Iterator[np.ndarray]:
    for first in range(0, len(images), BLOCK):
        block = images[first : first + BLOCK]
        yield resized(block, (size, size, 3))
        shown.update(len(block))
