"""FedBN's digits benchmark: MNIST, SVHN, USPS, SynthDigits, MNIST-M, one domain each.

The originals lie in one folder (names of folders in any case, with or without - and _):

    MNIST/        train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... (each optionally .gz)
    SVHN/         train_32x32.mat, test_32x32.mat
    USPS/         usps.h5, or usps.bz2 and usps.t.bz2
    SynthDigits/  synth_train_32x32.mat, synth_test_32x32.mat
    MNIST-M/      mnist_m_train/*.png, mnist_m_train_labels.txt, and the same for test

In place of a folder, a `.npz` with prepared images may be given, see `from_npz`.

Reference: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021, section 5.1 and appendix D.2.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.division.by_class import fraction_size, stratified_sample, stratified_split
from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset, select
from fedjax_bn.data.hashes import hash_of
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels import decode
from fedjax_bn.data.pixels.cache import array_of_blocks
from fedjax_bn.data.pools import as_source, numbered_names, parts_of
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets.digits_npz import from_npz
from fedjax_bn.data.sets.files import SIZE, Original, to_digits
from fedjax_bn.data.sets.folders import match_folders, subfolders
from fedjax_bn.data.sets.idx import mnist
from fedjax_bn.data.sets.mat import svhn, synth_digits
from fedjax_bn.data.sets.mnist_m import mnist_m
from fedjax_bn.data.sets.usps import usps
from fedjax_bn.data.source import Pool, Source

# in the order of the authors' code; each with its folder and its reader
_ORIGINALS = {
    "mnist": ("MNIST", mnist),
    "svhn": ("SVHN", svhn),
    "usps": ("USPS", usps),
    "synth_digits": ("SynthDigits", synth_digits),
    "mnist_m": ("MNIST-M", mnist_m),
}


def load(
    path: str | Path | None,
    *,
    seed: int = 0,
    fraction: float | None = None,
    truncate: bool | None = None,
    resplit: bool = True,
    whole: Sequence[str] = (),
    published: Sequence[str] = (),
) -> Dataset:
    """The digits benchmark as u8[N, 28, 28, 3], 10 classes, normalized by (0.5, 0.5).

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
        originals only.

    Returns:
      Dataset "digits" without validation splits, as in the paper (`make_clients` holds some out of
      the training splits where `split` is "official"); test splits are whole.

    Raises:
      FileNotFoundError: a file is missing; the sentence says what belongs there.
      ValueError: a file is corrupt or an argument out of range.

    Differs from the paper: the random sample of the training set is stratified by class. As in the
    paper, MNIST-M shows digits of MNIST: a digit that trains in one of the two may test in the
    other.
    """
    path = _check_path(path)
    fraction_size(1, 1.0 if fraction is None else fraction)  # out of range is an error before I/O
    if path.is_dir():
        return _from_folder(path, seed, fraction, truncate, resplit, whole, published)
    return _reduce(from_npz(path), seed, fraction, bool(truncate), whole)


def load_source(
    path: str | Path | None, *, cache: Path | None = None, progress: bool = True
) -> Source:
    """All samples of the digits benchmark as u8[N, 28, 28, 3], with their published parts.

    For divisions of one's own: `make_clients(load_source(path), target="svhn", split="stratified",
    partition="dirichlet", ...)`. The program takes `load`, the paper's division.

    Args:
      path: the folder of the originals, or a `.npz`.
      cache: folder for the images of the originals, 1.8 GB, most of it SynthDigits; without one
        they are held in memory.
      progress: show how far reading is.

    Returns:
      Source "digits"; samples are named DOMAIN/PART/NUMBER, such as "mnist/train/00017".

    Raises:
      FileNotFoundError: a file is missing; the sentence says what belongs there.
      ValueError: a file is corrupt.
    """
    path = _check_path(path)
    if not path.is_dir():
        return as_source(from_npz(path))
    pools = []
    for name, (folder, reader) in _ORIGINALS.items():
        place = _folder(path, folder)
        pools.append(_whole_pool(name, place, *reader(place), cache, progress))
    classes = tuple(str(digit) for digit in range(10))
    key = hash_of("digits", *(pool.labels for pool in pools))
    return Source("digits", classes, tuple(pools), (0.5,) * 3, (0.5,) * 3, key=key)


def _whole_pool(
    name: str, folder: Path, train: Original, test: Original, cache: Path | None, progress: bool
) -> Pool:
    sizes = {"train": len(train.labels), "test": len(test.labels)}
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    shape = (sum(sizes.values()), SIZE, SIZE, 3)

    def blocks() -> Iterator[np.ndarray]:
        with progress_bar(shape[0], f"reading {name}", progress) as shown:
            for part in (train, test):
                for index in np.array_split(
                    np.arange(len(part.labels)), len(part.labels) // 1000 + 1
                ):
                    yield to_digits(part.read(index))
                    shown.update(len(index))

    images = array_of_blocks(
        cache, f"{name}-{SIZE}-{decode.hash_of_files(files, folder, SIZE)}", shape, blocks
    )
    labels = np.concatenate([train.labels, test.labels])
    return Pool(name, images, labels, numbered_names(name, sizes), parts_of(sizes))


def _check_path(path: str | Path | None) -> Path:
    if path is None:
        raise ValueError(f"digits needs data.path: {_choices()}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data.path {path} does not exist; give {_choices()}")
    if not path.is_dir() and path.suffix != ".npz":
        raise ValueError(f"data.path {path} is neither a folder nor a .npz; give {_choices()}")
    return path


def _choices() -> str:
    folders = ", ".join(folder for folder, _ in _ORIGINALS.values())
    return (
        f"a folder with {folders} (the originals, laid out as fedjax_bn/data/sets/digits.py says) "
        "or a .npz with DOMAIN__train_images, DOMAIN__train_labels and the same for test"
    )


def _reduce(
    dataset: Dataset, seed: int, fraction: float | None, truncate: bool, whole: Sequence[str]
) -> Dataset:
    counts = {domain.name: len(domain.train.labels) for domain in dataset.domains}
    sizes = _training_sizes(counts, 1.0 if fraction is None else fraction, truncate, whole)
    domains = [
        domain._replace(train=stratified_sample(domain.train, size, generator(seed, k)))
        for k, (domain, size) in enumerate(zip(dataset.domains, sizes, strict=True))
    ]
    return dataset._replace(domains=tuple(domains))


def _training_sizes(
    counts: dict[str, int], fraction: float, truncate: bool, whole: Sequence[str] = ()
) -> list[int]:
    """Training samples of each domain: floor(fraction * count), of the smallest if `truncate`.

    Domains in `whole` keep all of theirs, and are not looked at for the smallest.
    """
    smallest = min((count for name, count in counts.items() if name not in whole), default=0)
    return [
        count if name in whole else fraction_size(smallest if truncate else count, fraction)
        for name, count in counts.items()
    ]


def _from_folder(
    path: Path,
    seed: int,
    fraction: float | None,
    truncate: bool | None,
    resplit: bool,
    whole: Sequence[str],
    published: Sequence[str],
) -> Dataset:
    pools = [_pool(*reader(_folder(path, name)), resplit) for name, reader in _ORIGINALS.values()]
    counts = {name: len(train.labels) for name, (train, _) in zip(_ORIGINALS, pools, strict=True)}
    for name, count in counts.items():
        if not count:
            raise ValueError(f"{path}: {name} has no training samples; fetch its files again")
    sizes = _training_sizes(
        counts, 0.1 if fraction is None else fraction, truncate is None or truncate, whole
    )
    domains = []
    for k, (name, (train, test), size) in enumerate(zip(_ORIGINALS, pools, sizes, strict=True)):
        every = Split(np.arange(len(train.labels)), train.labels)
        owned = stratified_sample(every, size, generator(seed, k))
        if name in published:
            owned = _of_published(owned, every, train.published, generator(seed, k))
        tested = _read(test, np.arange(len(test.labels)))
        domains.append(Domain(name, _read(train, owned.images), None, tested))
    return check_dataset(Dataset("digits", 10, tuple(domains), mean=(0.5,) * 3, std=(0.5,) * 3))


def _read(split: Original, index: np.ndarray) -> Split:
    return Split(to_digits(split.read(index)), split.labels[index])


def _folder(path: Path, name: str) -> Path:
    """The folder of that name, in whatever case and with or without - and _."""
    found = match_folders(subfolders(path), {name: ()})
    if name not in found:
        raise FileNotFoundError(f"{path / name} is missing; data.path must be {_choices()}")
    return found[name]


def _of_published(owned: Split, every: Split, count: int | None, rng: np.random.Generator) -> Split:
    """Returns as many samples of each class, of the first `count` alone; fewer where there are.

    Args:
      owned: a sample of `every`.
      every: training samples by number.
      count: of the published training part, which come first; None for all.
      rng: draws the samples.
    """
    known = every.labels[:count]
    drawn = [
        rng.permutation(np.flatnonzero(known == label))[:wanted]
        for label, wanted in enumerate(np.bincount(owned.labels))
    ]
    return select(every, rng.permutation(np.concatenate(drawn)))


def _pool(train: Original, test: Original, resplit: bool) -> tuple[Original, Original]:
    """The two splits, or the two parts of an 80 to 20 split of all samples, see `load`."""
    if not resplit:
        return train, test
    labels = np.concatenate([train.labels, test.labels])
    size = 4 * len(labels) // 5
    # a fixed seed: test samples are the same for every experiment, as in the paper
    parts = stratified_split(labels, [size, len(labels) - size], generator(0))
    first, second = (_part_of(train, test, np.sort(part)) for part in parts)
    return first, second


def _part_of(train: Original, test: Original, part: np.ndarray) -> Original:
    """The samples `part` of both splits, counted through from the first."""
    border = len(train.labels)

    def read(index: np.ndarray) -> np.ndarray:
        chosen = part[index]
        of_test = chosen >= border
        if of_test.all() or not of_test.any():
            return test.read(chosen - border) if of_test.all() else train.read(chosen)
        blocks = train.read(chosen[~of_test]), test.read(chosen[of_test] - border)
        images = np.concatenate(blocks)
        return images[np.argsort(np.argsort(of_test, kind="stable"), kind="stable")]

    labels = np.concatenate([train.labels, test.labels])[part]
    return Original(labels, read, int((part < border).sum()))
