"""CIFAR-10-C: CIFAR-10's test photographs under 19 corruptions, each a domain.

Published as `CORRUPTION.npy` u8[50000, 32, 32, 3], 10,000 photographs at severity 1, then the same
at 2 to 5, and `labels.npy` u8[50000] (zenodo.org/records/2535967).

All corruptions show the same photographs, so in the papers unseen clients show the training
clients' photographs: the corruption is unseen, not the photograph. A photograph has one name, such
as "test/00017", in all domains, so that no split separates its copies.

Reference: Hendrycks & Dietterich, ICLR 2019.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.domain import blocks
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import resized
from fedjax_bn.data.seeds import hash_of
from fedjax_bn.data.sets.files import corruption_named
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
_SEVERITIES = "12345"
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images
_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_SIDE = 32
_WHERE = "unpack CIFAR-10-C.tar of zenodo.org/records/2535967"


def load_cifar10_c(
    path: str | Path,
    *,
    domains: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int | str] = _SEVERITIES,
    image_size: int = _SIDE,
    cache: Path | None = None,
) -> Source:
    """Returns CIFAR-10-C as u8[N, 32, 32, 3], ten classes, a domain for each corruption.

    `groups` are the four types and "extra". Images are memory-mapped if severities are consecutive
    and not resized.

    Args:
      domains: some of `CORRUPTIONS`.
      severities: some of 1 to 5. A domain has them one after the other.
      image_size: pixels a side; 256 in the papers is 29 GB for 15 corruptions at one severity.
    """
    levels = sorted(map(str, severities))
    choices = {"domains": (domains, CORRUPTIONS), "severities": (levels, _SEVERITIES)}
    for argument, (chosen, allowed) in choices.items():
        if not chosen or not set(chosen) <= set(allowed):
            raise ValueError(f"{argument} is {list(chosen)}; choose from {', '.join(allowed)}")
    folder = Path(path, "CIFAR-10-C")
    folder = folder if folder.is_dir() else Path(path)
    files = {name: folder / f"{name}.npy" for name in ("labels", *domains)}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; {_WHERE}")
    labels = _read_labels(files["labels"])
    arrays = {}
    for name in domains:
        with corruption_named(files[name]):
            arrays[name] = array = np.load(files[name], mmap_mode="r")
            if (array.dtype, array.shape) != (np.uint8, (5 * len(labels), _SIDE, _SIDE, 3)):
                raise ValueError(f"{array.dtype} {array.shape} for {len(labels)} labels five times")
    count, total = len(labels), len(levels) * len(labels)
    pieces = [slice((level - 1) * count, level * count) for level in map(int, levels)]
    names = np.tile(numbered_names("test", {"": count}), len(levels))
    shape, pools = (total, image_size, image_size, 3), []

    def resize(write: Write) -> tuple[str, ...]:
        for block in blocks(images):
            write(resized(block, shape[1:]))
        return ()

    for name in domains:
        images = arrays[name][pieces[0].start : pieces[-1].stop]
        if len(images) > total:  # other severities between them
            images = np.concatenate([arrays[name][piece] for piece in pieces])
        if image_size != _SIDE:
            file = f"cifar10_c-{name}-{image_size}-{hash_of(images)}"
            images, _ = cached_array(cache, file, shape, resize)
        pools.append(Pool(name, images, np.tile(labels, len(levels)), names))
    kinds = {**TYPES, "extra": EXTRA}.items()
    groups = {kind: tuple(name for name in names if name in domains) for kind, names in kinds}
    groups = {kind: members for kind, members in groups.items() if members}
    about = ("cifar10_c", _CLASSES, tuple(pools), _MEAN, _STD)
    return check_source(Source(*about, groups=groups, key=hash_of(labels, domains, levels)))


def _read_labels(path: Path) -> np.ndarray:
    """Returns the labels i32[n] of one severity."""
    with corruption_named(path):
        labels = class_labels(np.load(path), "the array", len(_CLASSES))
        # The same photographs must follow each other five times, because severities share labels.
        repeated = labels[: len(labels) // len(_SEVERITIES)]
        if not len(labels) or not np.array_equal(np.tile(repeated, len(_SEVERITIES)), labels):
            raise ValueError("it does not repeat its labels for five severities")
    return repeated
