"""Draws samples by class and group, in whole numbers.

A group is all samples with one name, such as windows of one recording or corruptions of one
photograph. Divisions keep groups whole, so that a model is never tested on a recording that it was
trained on. If all names differ, each sample is a group.

The functions depend only on labels, names and a generator. They compute shares in integers, so that
the same seed gives the same samples on any machine.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.domain import Split, select
from fedjax_bn.data.label_trees import strata
from fedjax_bn.data.source import part_in

# Last entries of the path (0, position, USE) of a generator, see `seeds.generator`
DIVIDING, ORDERING, TRUNCATING = 1, 2, 3
# The eyes, breasts or lungs of one person: the letters of a side between digits and signs.
_SIDE = re.compile(r"(?<![a-z])(?:l|r|left|right|od|os)(?![a-z])", re.IGNORECASE)


def share_size(count: int, share: float) -> int:
    """Returns floor(share * count) for `share` as a decimal number: 0.29 * 100 is 29."""
    return int(share * count + 1e-9)  # 0.29 * 100 is 28.999... in floating point


def fraction_size(count: int, fraction: float) -> int:
    """Returns floor(fraction * count), at least 1: FedBN's 10 % of 7438 samples are 743."""
    return max(1, share_size(count, fraction))


def apportion(counts: np.ndarray, total: int) -> np.ndarray:
    """Returns shares of `total` proportional to `counts`, by largest remainder (Hamilton's method).

    `counts` i64[C] are the classes' samples, or other weights; counts * total is below 2**63. The
    shares i64[C] sum to `total` and are within one of total * count / sum; each is at most its
    count if total <= sum(counts).
    """
    counts = np.asarray(counts, np.int64)
    count = max(int(counts.sum()), 1)
    # In integers, because floats may round differently on another machine.
    shares = counts * total // count
    remainder = int(total - shares.sum())
    # Stable, so that of equal remainders the same one is taken on every machine.
    largest = np.argsort(-(counts * total % count), kind="stable")[:remainder]
    shares[largest] += 1
    return shares


def shuffled_classes(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the indices of each class, shuffled."""
    # `np.unique` sorts the classes, so the order of draws is the same on any machine.
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def stratified_split(
    labels: np.ndarray, sizes: Sequence[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws disjoint parts of labels i32[N], each with the classes in proportion.

    Returns:
      i64[size] for each part: indices in random order. The other samples belong to no part.

    Raises:
      ValueError: a size is negative, or the sizes sum to more than N.
    """
    if min(sizes, default=0) < 0 or sum(sizes) > len(labels):
        raise ValueError(
            f"cannot split {len(labels)} samples into parts of {list(sizes)}; "
            f"sizes must be at least 0 and sum to at most {len(labels)}"
        )
    pools = shuffled_classes(labels, rng)
    parts = []
    for size in sizes:
        shares = apportion(np.array([len(pool) for pool in pools], np.int64), size)
        taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
        pools = [pool[share:] for pool, share in zip(pools, shares, strict=True)]
        parts.append(rng.permutation(np.concatenate([np.empty(0, np.int64), *taken])))
    return parts


def stratified_sample(split: Split, size: int, rng: np.random.Generator) -> Split:
    """Returns `size` samples, stratified, or the split itself if it has no more.

    Every class keeps at least one sample if `size`, at least 1, is not below the number of classes.
    """
    if size >= len(split.images):
        return split
    pools = shuffled_classes(strata(split.labels), rng)
    counts = np.array([len(pool) for pool in pools], np.int64)
    minimum = 1 if size >= len(pools) else 0
    shares = minimum + apportion(counts - minimum, size - minimum * len(pools))
    taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
    return select(split, rng.permutation(np.concatenate(taken)))


def number_groups(names: np.ndarray | None, count: int) -> np.ndarray:
    """Returns the number of each sample's group, i64[count], by first appearance from 0.

    `names` str[count] are the samples' names; None makes each sample its own group.
    """
    if names is None:
        return np.arange(count)
    _, appearance, inverse = np.unique(
        np.asarray(names, np.str_), return_index=True, return_inverse=True
    )
    rank = np.empty_like(appearance)
    rank[np.argsort(appearance)] = np.arange(len(appearance))
    return rank[inverse]


def first_samples(group: np.ndarray) -> np.ndarray:
    """Returns the first sample of each group, i64[G]; its label counts as the group's."""
    return np.unique(group, return_index=True)[1]


def samples_of(chosen: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns the samples of the chosen groups, one group after the other.

    `chosen` i64[g] are group numbers; `group` i64[N] is the group of each sample.
    """
    # Without a loop over groups, of which there may be as many as samples.
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group))
    sizes = np.bincount(group)[chosen]
    steps = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.repeat(ends[chosen] - sizes, sizes) + steps]


def groups_of(
    domain: str, folder: Path, images: Sequence[Path], pattern: str = ""
) -> tuple[list[str], str]:
    """Returns the names of a domain's images, equal for images of one group, and a note on them.

    Args:
      domain: its name.
      folder: of the domain.
      images: N files in it.
      pattern: a regular expression that is searched in the path of an image in the folder; the
        group is what its parentheses match, or the whole match. With "", images that differ only
        in a side (L and R, left and right, OD and OS) are one group, in any part (train, val,
        test), and each other image is alone.

    Raises:
      ValueError: the pattern does not fit an image.
    """
    names = [image.relative_to(folder).as_posix() for image in images]
    if pattern:
        matches = [re.search(pattern, name) for name in names]
        if None in matches:
            raise ValueError(
                f"{images[matches.index(None)]} does not fit the regular expression "
                f"data.groups={pattern}, searched in {names[matches.index(None)]}: correct it"
            )
        groups = ["/".join(map(str, m.groups())) or m[0] for m in matches if m]
    else:
        sideless = [_sideless(name) for name in names]
        sizes = Counter(sideless)
        groups = [
            common if sizes[common] > 1 else name
            for common, name in zip(sideless, names, strict=True)
        ]
    note = f"{domain}: {len(set(groups))} groups of {len(names)} images"
    note += " by data.groups" * bool(pattern)
    return [f"{domain}/{group}" for group in groups], note


def _sideless(name: str) -> str:
    """Returns the name of an image with * for sides, without parts and suffix; or as it is."""
    if not _SIDE.search(name):
        return name
    folders = [part for part in Path(name).with_suffix("").parts if part_in([part]) is None]
    return _SIDE.sub("*", "/".join(folders))
