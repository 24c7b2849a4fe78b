"""FedBN's digits benchmark: MNIST, SVHN, USPS, SynthDigits, MNIST-M, one domain each.

A folder holds the originals (names of folders in any case, with or without - and _):

    MNIST/        train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... (each optionally .gz)
    SVHN/         train_32x32.mat, test_32x32.mat
    USPS/         usps.h5, or usps.bz2 and usps.t.bz2
    SynthDigits/  synth_train_32x32.mat, synth_test_32x32.mat
    MNIST-M/      mnist_m_train/*.png, mnist_m_train_labels.txt, and the same for test

Instead of a folder, a `.npz` with prepared images may be given: for each domain
`DOMAIN__train_images` and `DOMAIN__test_images`, u8[N, 28, 28, 3], `DOMAIN__train_labels` and
`DOMAIN__test_labels`, integers [N] in 0..9.

Reference: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021, section 5.1 and appendix D.2.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.division.by_class import fraction_size, stratified_sample, stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset, select
from fedjax_bn.data.pixels.raster import UPRIGHT
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets.digit_files import ORIGINALS, SIZE, Original, to_digits
from fedjax_bn.data.sets.folders import match_folders, subfolders
from fedjax_bn.data.sets.npz import read_archive
from fedjax_bn.engine.inputs import class_labels

_HALF = (0.5,) * 3  # mean and standard deviation
_CHOICES = (
    f"a folder with {', '.join(folder for folder, _ in ORIGINALS.values())} (the originals, laid "
    "out as fedjax_bn/data/sets/digits.py describes) or a .npz with DOMAIN__train_images, "
    "DOMAIN__train_labels and the same for test"
)


def load(
    path: str | Path | None,
    *,
    seed: int = 0,
    fraction: float | None = None,
    truncate: bool | None = None,
    resplit: bool = True,
    whole: Sequence[str] = (),
    published: Sequence[str] = (),
    orientation: str = UPRIGHT,
) -> Dataset:
    """Returns the digits benchmark as u8[N, 28, 28, 3], 10 classes, normalized by (0.5, 0.5).

    Args:
      path: the folder of the originals, or a `.npz`.
      seed: at least 0; draws the training samples. Test samples do not depend on it.
      fraction: of the training samples, in (0, 1]; None for the source's own: 0.1 for the
        originals, as in the paper, 1 for a `.npz`.
      truncate: cut every training set to the size of the smallest before taking the fraction; None
        for the source's own: True for the originals, as in the paper, False for a `.npz`.
      resplit: originals only. True: as FedBN's code does, training and test samples of a dataset
        are pooled and split 80 to 20 by class, the same way for every seed. This is where the
        paper's 7438 (0.8 of USPS' 9298) and 743 samples come from. False: the datasets' own
        splits, where USPS has 7291, and a tenth is 729.
      whole: names of domains that `fraction` and `truncate` leave alone: unseen ones.
      published: names of domains that train on samples of their published training part alone;
        resplit originals only.
      orientation: of MNIST-M's image files, see `pixels.decode.decode`.

    Returns:
      Dataset "digits" without validation splits, as in the paper (`make_clients` holds some out of
      the training splits where `split` is "official"); test splits are whole.

    Raises:
      FileNotFoundError: a file is missing; the message names what is needed.
      ValueError: a file is corrupt or an argument out of range.

    For divisions of one's own, `pools.as_source(load(path, fraction=1.0, truncate=False,
    resplit=False))` has all samples with their published parts.

    Differs from the paper: the random sample of the training set is stratified by class. As in the
    paper, MNIST-M shows digits of MNIST: a digit that trains in one of the two may test in the
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
    fraction_size(1, fraction)  # out of range is an error before any file is read
    if originals:
        divided = {}
        for name, (folder, reader) in ORIGINALS.items():
            found = match_folders(subfolders(path), {folder: ()})
            if folder not in found:
                raise FileNotFoundError(f"{path / folder} is missing; data.path must be {_CHOICES}")
            # the only ones that are image files
            how = {"orientation": orientation} if name == "mnist_m" else {}
            divided[name] = _divide(*reader(found[folder], **how), resplit)
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
    """Returns the training and test samples of the domains of a `.npz`, in the file's order.

    Raises:
      ValueError: the file is corrupt, an array is missing, unknown, or of a wrong form, or a label
        is out of range.
    """
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
        train, test = parts["train"], parts["test"]
        divided[name] = (
            Original(train.labels, train.images.__getitem__),
            Original(test.labels, test.images.__getitem__),
        )
    return divided


def _of_published(owned: Split, every: Split, count: int, rng: np.random.Generator) -> Split:
    """Returns as many samples of each class as `owned` has, or all, of the first `count` alone."""
    known = every.labels[:count]
    drawn = [
        rng.permutation(np.flatnonzero(known == label))[:wanted]
        for label, wanted in enumerate(np.bincount(owned.labels))
    ]
    return select(every, rng.permutation(np.concatenate(drawn)))


def _divide(train: Original, test: Original, resplit: bool) -> tuple[Original, Original]:
    """Returns the two splits, or the two parts of an 80 to 20 split of all samples, see `load`."""
    if not resplit:
        return train, test
    labels = np.concatenate([train.labels, test.labels])
    border, size = len(train.labels), 4 * len(labels) // 5
    # a fixed seed: test samples are the same for every experiment, as in the paper
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
