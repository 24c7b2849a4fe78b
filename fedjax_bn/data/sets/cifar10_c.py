"""CIFAR-10-C: CIFAR-10's test photographs under 19 corruptions, each a domain.

Published as `CORRUPTION.npy` u8[50000, 32, 32, 3], 10,000 photographs at severity 1, then the same
at 2 to 5, and `labels.npy` u8[50000] (zenodo.org/records/2535967).

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

Reference: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019.
"""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import resized
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.files import corruption_named, is_label
from fedjax_bn.data.source import Pool, Source, check_source, numbered_names
from fedjax_bn.engine.inputs import class_labels

# The four types that are left out in turn, as TsmoBN's and UniFed's tables head them: brightness is
# "digital", so that 10 to 12 clients train.
TYPES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog"),
    "digital": ("brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
INTERNAL = tuple(name for names in TYPES.values() for name in names)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
CORRUPTIONS = INTERNAL + EXTRA
SEVERITIES = (1, 2, 3, 4, 5)

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images
_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_SHAPE = (32, 32, 3)
_COUNT = 10_000
_CHUNK = 1000  # images that are resized at a time
_WHERE = (
    "CIFAR-10-C is a folder with labels.npy and gaussian_noise.npy to saturate.npy (the unpacked "
    "CIFAR-10-C.tar of zenodo.org/records/2535967)"
)


def groups_of(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the four types and "extra", each with its corruptions that are in `names`."""
    groups = {
        kind: tuple(name for name in corruptions if name in names)
        for kind, corruptions in {**TYPES, "extra": EXTRA}.items()
    }
    return {kind: corruptions for kind, corruptions in groups.items() if corruptions}


def load_cifar10_c(
    path: str | Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int | str] = SEVERITIES,
    image_size: int = _SHAPE[0],
    cache: Path | None = None,
    progress: bool = True,
) -> Source:
    """Returns CIFAR-10-C as u8[N, 32, 32, 3], ten classes, a domain for each corruption.

    Args:
      path: the published folder, or one that holds it as `CIFAR-10-C`.
      corruptions: the domains, of `CORRUPTIONS`.
      severities: some of 1 to 5, numbers or texts. A domain has them one after the other.
      image_size: pixels a side; images are resized if it is not 32 (256 in the papers: 29 GB for
        the 15 common corruptions at one severity).
      cache: folder for resized images; without one they are held in memory.
      progress: show how many images are resized.

    Returns:
      Source "cifar10_c", normalized by CIFAR-10's channels; `groups` are the four types and
      "extra". Severities are memory-mapped if they are consecutive and not resized.
    """
    # A configuration gives texts.
    severities = [int(level) if is_label(str(level)) else level for level in severities]
    _check_choice("corruptions", corruptions, CORRUPTIONS)
    _check_choice("severities", severities, SEVERITIES)
    folders, severities = (Path(path, "CIFAR-10-C"), Path(path)), sorted(severities)
    folder = next((folder for folder in folders if (folder / "labels.npy").is_file()), folders[1])
    labels, arrays = _read_published(folder, corruptions)
    count = len(labels)
    total = len(severities) * count
    pieces = [slice((level - 1) * count, level * count) for level in severities]
    consecutive = severities[-1] - severities[0] == len(severities) - 1
    names = np.tile(numbered_names("test", {"": count}), len(severities))
    key = hash_of("published", np.tile(labels, len(SEVERITIES)), corruptions, severities)

    def resize(name: str, bar: Any, write: Write) -> tuple[str, ...]:
        for piece in pieces:
            for start in range(piece.start, piece.stop, _CHUNK):
                block = arrays[name][start : min(start + _CHUNK, piece.stop)]
                write(resized(block, (image_size, image_size, 3)))
                bar.update(len(block))
        return ()

    pools = []
    with progress_bar(
        len(corruptions) * total, "resizing", progress and image_size != _SHAPE[0]
    ) as bar:
        for name in corruptions:
            if image_size != _SHAPE[0]:
                file = f"cifar10_c-{name}-{image_size}-{hash_of(key, arrays[name])}"
                shape = (total, image_size, image_size, 3)
                images, _ = cached_array(cache, file, shape, partial(resize, name, bar))
            elif consecutive:  # one block, which stays a view of the file
                images = arrays[name][pieces[0].start : pieces[-1].stop]
            else:
                images = np.concatenate([arrays[name][piece] for piece in pieces])
            pools.append(Pool(name, images, np.tile(labels, len(severities)), names))
    notes = ()
    if count != _COUNT:
        notes = (
            f"{folder} has {count} photographs a severity, CIFAR-10-C {_COUNT}: a reduced copy",
        )
    about = ("cifar10_c", _CLASSES, tuple(pools), _MEAN, _STD)
    return check_source(Source(*about, notes, groups_of(corruptions), key))


def _check_choice(argument: str, chosen: Sequence, allowed: Sequence) -> None:
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(allowed):
        raise ValueError(
            f"{argument} is {list(chosen)}; choose one or more, each once, from "
            f"{', '.join(map(str, allowed))}"
        )


def _read_published(
    folder: Path, corruptions: Sequence[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the labels i32[n] of one severity, and corruption -> its images, memory-mapped."""
    files = {name: folder / f"{name}.npy" for name in ("labels", *corruptions)}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {_WHERE}")
    arrays = {}
    for name, file in files.items():
        with corruption_named(file):
            arrays[name] = np.load(file, mmap_mode="r")
    labels = class_labels(arrays.pop("labels"), str(files["labels"]), len(_CLASSES))
    # The same photographs must follow each other five times, because severities share the labels.
    repeated = labels[: len(labels) // len(SEVERITIES)]
    if not len(labels) or not np.array_equal(np.tile(repeated, len(SEVERITIES)), labels):
        raise ValueError(
            f"{files['labels']} does not repeat its labels for five severities; fetch it again"
        )
    for name, images in arrays.items():
        if images.dtype != np.uint8 or images.shape != (len(labels), *_SHAPE):
            raise ValueError(
                f"{files[name]} is {images.dtype} {images.shape}, not uint8 "
                f"{(len(labels), *_SHAPE)}; fetch it again"
            )
    return repeated, arrays
