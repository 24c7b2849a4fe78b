"""FedBN's digits benchmark: MNIST, SVHN, USPS, SynthDigits, MNIST-M, one domain each.

`python launch/convert/digits.py FOLDER digits.npz` makes its file of the originals, with all
samples of each divided 80 to 20 by class, as in FedBN's code: arrays as in `data.sets.npz`, images
u8[N, 28, 28, 3]. The paper cuts every training set to the smallest, USPS' 7438, and takes a tenth,
743: `data.truncate=True` and `data.fraction=0.1`. With `--morpho` the file has Morpho-MNIST too
(Table 17), as two domains of test samples alone, which show digits of MNIST's published test part;
no MNIST and MNIST-M of that part trains then.

References: Li et al., "FedBN", ICLR 2021, section 5.1, appendices D.2 and G; Castro et al.,
"Morpho-MNIST", JMLR 20(178), 2019.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.division.partition import fraction_size, stratified_sample
from fedjax_bn.data.domain import Dataset, Domain, check_dataset
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets.npz import read_archive

_SHAPE = (28, 28, 3)
_HALF = (0.5,) * 3  # mean and standard deviation


def load_digits(
    path: str | Path | None,
    *,
    seed: int = 0,
    fraction: float | None = None,
    truncate: bool | None = None,
    target: Sequence[str] = (),
) -> Dataset:
    """Returns "digits", or "digits_morpho" if it is there: u8[N, 28, 28, 3] in 10 classes.

    There are no validation splits; `make_clients` holds some out where `split` is "official". As in
    the paper, MNIST-M shows digits of MNIST, so a digit may train in one and test in the other.

    Args:
      seed: at least 0; draws the training samples, stratified by class, unlike in the paper.
      fraction: of the training samples, in (0, 1]; None for all.
      truncate: cut every training set to the size of the smallest before taking the fraction.
      target: names of unseen domains, which are whole; domains with test samples alone must be
        among them.
    """
    digits, _ = read_archive(path)
    for name, parts in digits.items():
        shapes = {(split.images.dtype, split.images.shape[1:]) for split in parts.values()}
        has_parts = set(parts) == {"train", "test"} or (name in target and set(parts) == {"test"})
        if shapes != {(np.dtype(np.uint8), _SHAPE)} or not has_parts:
            raise ValueError(
                f"{path}: {name!r} has {list(parts)} of {shapes}; digits have train and test, or "
                "test alone as a target, of uint8 [N, 28, 28, 3]: read other forms as data.name=npz"
            )
    counts = {n: len(parts["train"].labels) for n, parts in digits.items() if "train" in parts}
    smallest = min((count for name, count in counts.items() if name not in target), default=0)
    domains = []
    for k, (name, parts) in enumerate(digits.items()):
        train = parts.get("train")
        if train is not None and name not in target:
            size = fraction_size(smallest if truncate else counts[name], fraction or 1.0)
            train = stratified_sample(train, size, generator(seed, k))
        domains.append(Domain(name, train, None, parts["test"]))
    name = "digits_morpho" if {"morpho_global", "morpho_local"} & set(digits) else "digits"
    try:
        return check_dataset(Dataset(name, 10, tuple(domains), _HALF, _HALF))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
