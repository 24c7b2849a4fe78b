"""FedBN's digits benchmark: MNIST, SVHN, USPS, SynthDigits, MNIST-M, one domain each.

A folder holds the originals (names of folders in any case, with or without - and _):

    MNIST/        train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... (each optionally .gz)
    SVHN/         train_32x32.mat, test_32x32.mat
    USPS/         usps.h5, or usps.bz2 and usps.t.bz2
    SynthDigits/  synth_train_32x32.mat, synth_test_32x32.mat
    MNIST-M/      mnist_m_train/*.png, mnist_m_train_labels.txt, and the same for test

A `.npz` with prepared images may replace the folder: for each domain `DOMAIN__train_images` and
`DOMAIN__test_images`, u8[N, 28, 28, 3], `DOMAIN__train_labels` and `DOMAIN__test_labels`, integers
[N] in 0..9.

Appendix G and Table 17 test its models on Morpho-MNIST as two unseen clients: MNIST with strokes
thinned or thickened (`global`, a third each, beside plain digits), swollen or fractured (`local`).
Its files are in the same folder:

    Morpho-MNIST/global/  Morpho-MNIST/local/    train-images-idx3-ubyte.gz, ... as in MNIST/

References: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, section 5.1, appendices D.2 and G; Castro et al., "Morpho-MNIST:
Quantitative Assessment and Diagnostics for Representation Learning", JMLR 20(178), 2019.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.division.by_class import fraction_size, stratified_sample, stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset, select
from fedjax_bn.data.pixels.raster import UPRIGHT
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets.digit_files import ORIGINALS, SIZE, Original, mnist, to_digits
from fedjax_bn.data.sets.folders import match_folders, subfolders
from fedjax_bn.data.sets.npz import read_archive
from fedjax_bn.data.source import TEST, Pool, Source, check_source, numbered_names, parts_of
from fedjax_bn.engine.inputs import class_labels

_HALF = (0.5,) * 3  # mean and standard deviation
_CHOICES = (
    f"a folder with {', '.join(folder for folder, _ in ORIGINALS.values())} (the originals, laid "
    "out as fedjax_bn/data/sets/digits.py describes) or a .npz with DOMAIN__train_images, "
    "DOMAIN__train_labels and the same for test"
)
_MORPHO_FOLDERS, _MORPHO_COUNTS = ("global", "local"), (60_000, 10_000)
_UNSEEN = ("morpho_global", "morpho_local")
_SAME = ("mnist", "mnist_m")  # which show the digits of Morpho-MNIST
_MORPHO = (
    "Morpho-MNIST needs the folders global and local, each with (train|t10k)-images-idx3-ubyte.gz "
    "and (train|t10k)-labels-idx1-ubyte.gz (the unpacked zip files listed in the README of "
    "github.com/dccastro/Morpho-MNIST)"
)


def load(
    path: str | Path | None,
    *,
    seed: int = 0,
    fraction: float | None = None,
    truncate: bool | None = None,
    whole: Sequence[str] = (),
    published: Sequence[str] = (),
    orientation: str = UPRIGHT,
) -> Dataset:
    """Returns the digits benchmark as u8[N, 28, 28, 3], 10 classes, normalized by (0.5, 0.5).

    As in FedBN's code, the training and test samples of an original dataset are pooled and split 80
    to 20 by class, the same way for every seed. The paper's 7438 (0.8 of USPS' 9298) and 743
    samples result from this split.

    Args:
      path: the folder of the originals, or a `.npz`.
      seed: at least 0; draws the training samples. Test samples do not depend on it.
      fraction: of the training samples, in (0, 1]; None for the default: 0.1 for the originals, as
        in the paper, 1 for a `.npz`.
      truncate: cut every training set to the size of the smallest before taking the fraction; None
        for the default: True for the originals, as in the paper, False for a `.npz`.
      whole: names of domains to which `fraction` and `truncate` do not apply: unseen ones.
      published: names of original datasets that train only on samples of their published training
        part.
      orientation: for MNIST-M's image files, see `pixels.decode.decode`.

    Returns:
      Dataset "digits" without validation splits, as in the paper (`make_clients` holds some out of
      the training splits where `split` is "official"); test splits are whole.

    Differs from the paper: the random sample of the training set is stratified by class. As in the
    paper, MNIST-M shows digits of MNIST, so a digit may train in one of the two and test in the
    other.
    """
    if path is None:
        raise ValueError(f"digits needs data.path: {_CHOICES}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data.path {path} does not exist; give {_CHOICES}")
    originals = path.is_dir()
    if not originals and path.suffix != ".npz":
        raise ValueError(f"data.path {path} is neither a folder nor a .npz; give {_CHOICES}")
    fraction = (0.1 if originals else 1.0) if fraction is None else fraction
    fraction_size(1, fraction)  # raises if out of range, before any file is read
    if originals:
        divided = {}
        for name, (folder, reader) in ORIGINALS.items():
            found = match_folders(subfolders(path), {folder: ()})
            if folder not in found:
                raise FileNotFoundError(f"{path / folder} is missing; data.path must be {_CHOICES}")
            # only MNIST-M has image files
            how = {"orientation": orientation} if name == "mnist_m" else {}
            divided[name] = _divide(*reader(found[folder], **how))
    else:
        divided = _read_npz(path)
    counts = {name: len(train.labels) for name, (train, _) in divided.items()}
    if empty := [name for name, count in counts.items() if not count]:
        raise ValueError(f"{path}: {empty[0]} has no training samples; fetch its files again")
    truncate = originals if truncate is None else truncate
    smallest = min((count for name, count in counts.items() if name not in whole), default=0)
    domains = []
    for k, (name, (train, test)) in enumerate(divided.items()):
        size = counts[name]
        if name not in whole:
            size = fraction_size(smallest if truncate else size, fraction)
        every = Split(np.arange(len(train.labels)), train.labels)
        owned = stratified_sample(every, size, generator(seed, k))
        if name in published and train.published is not None:
            owned = _of_published(owned, every, train.published, generator(seed, k))
        tested = np.arange(len(test.labels))
        trains = Split(to_digits(train.read(owned.images)), owned.labels)
        tests = Split(to_digits(test.read(tested)), test.labels)
        domains.append(Domain(name, trains, None, tests))
    return check_dataset(Dataset("digits", 10, tuple(domains), _HALF, _HALF))


def _read_npz(path: Path) -> dict[str, tuple[Original, Original]]:
    """Returns the training and test samples of the domains of a `.npz`, in the file's order."""
    divided = {}
    for name, parts in read_archive(path)[0].items():
        if set(parts) != {"train", "test"}:
            raise ValueError(
                f"{path} has the parts {', '.join(filter(None, parts)) or 'none'} of {name!r}; "
                "digits have train and test: leave others out, or read the file as data.name=npz"
            )
        for part, (images, labels) in parts.items():
            if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE, 3):
                raise ValueError(
                    f"{path}: {name}__{part}_images is {images.dtype} {images.shape}; "
                    "it must be uint8 [N, 28, 28, 3]"
                )
            class_labels(labels, f"{path}: {name}__{part}_labels", 10)
        train, test = (
            Original(parts[part].labels, parts[part].images.__getitem__)
            for part in ("train", "test")
        )
        divided[name] = train, test
    return divided


def _of_published(owned: Split, every: Split, count: int, rng: np.random.Generator) -> Split:
    """Returns as many of the first `count` samples per class as `owned` has, or all if fewer."""
    known = every.labels[:count]
    drawn = [
        rng.permutation(np.flatnonzero(known == label))[:wanted]
        for label, wanted in enumerate(np.bincount(owned.labels))
    ]
    return select(every, rng.permutation(np.concatenate(drawn)))


def _divide(train: Original, test: Original) -> tuple[Original, Original]:
    """Returns the two parts of an 80 to 20 split of all samples."""
    labels = np.concatenate([train.labels, test.labels])
    border, size = len(train.labels), 4 * len(labels) // 5
    # fixed seed: the test samples are the same in every experiment, as in the paper
    parts = stratified_split(labels, [size, len(labels) - size], generator(0))

    def part_of(part: np.ndarray) -> Original:
        def read(index: np.ndarray) -> np.ndarray:
            chosen = part[index]
            of_test = chosen >= border
            both = train.read(chosen[~of_test]), test.read(chosen[of_test] - border)
            # the samples of `train`, then those of `test`, back in the order of `index`
            return np.concatenate(both)[np.argsort(np.argsort(of_test, kind="stable"))]

        return Original(labels[part], read, int((part < border).sum()))

    first, second = (part_of(np.sort(part)) for part in parts)
    return first, second


def load_morpho_mnist(path: str | Path) -> Source:
    """Returns Morpho-MNIST as u8[N, 28, 28, 3], one domain a folder, with its published parts.

    Args:
      path: the folder that holds `global` and `local`.

    Returns:
      Source "morpho_mnist" with the domains "morpho_global" and "morpho_local", normalized by
      (0.5, 0.5). In both domains, samples are named by their digit of MNIST, such as "train/00017",
      because the forms of one digit belong together.
    """
    path = Path(path)
    if missing := [name for name in _MORPHO_FOLDERS if not (path / name).is_dir()]:
        raise FileNotFoundError(f"{path} lacks the folders {', '.join(missing)}; {_MORPHO}")
    pools, notes = [], []
    for name, folder in zip(_UNSEEN, _MORPHO_FOLDERS, strict=True):
        both = mnist(path / folder, _MORPHO)
        counts = tuple(len(split.labels) for split in both)
        if counts != _MORPHO_COUNTS:
            notes.append(
                f"{path / folder} has {counts[0]} training and {counts[1]} test images, "
                f"Morpho-MNIST has {_MORPHO_COUNTS[0]} and {_MORPHO_COUNTS[1]}: a reduced copy"
            )
        sizes = dict(zip(("train", "test"), counts, strict=True))
        images = [to_digits(split.read(np.arange(len(split.labels)))) for split in both]
        labels = np.concatenate([split.labels for split in both])
        names = np.concatenate([numbered_names(part, {"": n}) for part, n in sizes.items()])
        pools.append(Pool(name, np.concatenate(images), labels, names, parts_of(sizes)))
    classes = tuple(map(str, range(10)))
    return check_source(Source("morpho_mnist", classes, tuple(pools), _HALF, _HALF, tuple(notes)))


def load_with_morpho_mnist(path: str | Path, *, target: Sequence[str], **how: Any) -> Dataset:
    """Returns the digits benchmark, followed by morpho_global and morpho_local, which only test.

    Args:
      path: the folder.
      target: the unseen domains; both of Morpho-MNIST's must be among them.
      **how: `seed`, `fraction`, `truncate` and `orientation` of `load`.

    Returns:
      Dataset "digits_morpho". Morpho-MNIST's domains have its published test part, 10,000 images
      each, made from the digits of MNIST's published test part. MNIST and MNIST-M show these digits
      too, so they train only on their published training parts, and no digit of Morpho-MNIST's
      tests trains.
    """
    if missing := [name for name in _UNSEEN if name not in target]:
        raise ValueError(
            f"digits_morpho has only test samples of {' and '.join(missing)}: set "
            f"config.target={','.join(_UNSEEN)}"
        )
    known = load(path, **how, whole=target, published=_SAME)
    unseen = []
    for pool in load_morpho_mnist(Path(path) / "Morpho-MNIST").pools:
        tests = pool.parts == TEST
        split = Split(pool.images[tests], pool.labels[tests], pool.names[tests])
        unseen.append(Domain(pool.name, None, None, split))
    return check_dataset(known._replace(name="digits_morpho", domains=(*known.domains, *unseen)))
