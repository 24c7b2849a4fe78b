"""Training, validation and test samples of every domain of a source.

    official    the authors' own lists; a part that they do not have is a share of their training
                samples, stratified
    holdout     random shares (DomainBed)
    stratified  random shares in which every class has its part

Samples with the same name are never separated, in whatever domains they are: windows of one
recording, or all corruptions of one photograph, are all training, all validation, or all test.
Shares count such groups, by the label of their first sample; where all names differ, they count
samples.

Reference: Gulrajani & Lopez-Paz, "In search of lost domain generalization", ICLR 2021.
"""

import numpy as np

from fedjax_bn.data.division.by_class import (
    DIVIDING,
    first_samples,
    number_groups,
    samples_of,
    share_size,
    stratified_split,
)
from fedjax_bn.data.domain import Domain, Split, select
from fedjax_bn.data.label_trees import strata, take
from fedjax_bn.data.rows import Rows
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Pool, Source

_SPLITS = ("official", "holdout", "stratified")


def choose_parts(
    source: Source, split: str, validation: float, test: float, seed: int
) -> list[np.ndarray]:
    """Returns whether each sample trains, validates or tests.

    A domain's parts do not depend on which other domain is left out.

    Args:
      source: domains, left out or not.
      split: "official", "holdout" or "stratified"; a domain without official lists is all training
        under "official".
      validation: share of a domain's samples in [0, 1), 0.2 in DomainBed; floor(share * N), and
        one at least.
      test: likewise, together below 1; N - floor((1 - share) * N), as in FedBN's 80 to 20.
      seed: at least 0.

    Returns:
      For each pool i8[N], TRAIN, VALIDATION or TEST.

    Raises:
      ValueError: the split is unknown or a share out of range.
    """
    _check_shares(split, validation, test)
    official = [
        np.asarray(pool.parts, np.int8)
        if split == "official" and pool.parts is not None
        else np.full(len(pool.images), TRAIN, np.int8)
        for pool in source.pools
    ]
    names = np.concatenate([np.asarray(pool.names, np.str_) for pool in source.pools])
    borders = np.cumsum([len(parts) for parts in official])[:-1]
    groups = np.split(number_groups(names, len(names)), borders)
    count = max(group.max() for group in groups) + 1
    labels, found_in = np.zeros(count, np.int32), np.zeros((count, len(groups)), bool)
    for position, (pool, parts, group) in enumerate(
        zip(source.pools, official, groups, strict=True)
    ):
        found_in[group[parts == TRAIN], position] = True
        if split != "holdout":
            labels[group[::-1]] = strata(pool.labels)[::-1]  # the first sample of a group wins
    # Groups found in the same domains are drawn together: so every domain has its shares, and
    # domains of the same samples have the same parts.
    drawn = np.full(count, TRAIN, np.int8)
    kinds, kind = np.unique(found_in, axis=0, return_inverse=True)
    for number, where in enumerate(kinds):
        members, listed = np.flatnonzero(kind == number), official[where.argmax()]
        sizes = _part_sizes(
            len(members),
            0.0 if (listed == VALIDATION).any() else validation,
            0.0 if (listed == TEST).any() else test,
        )
        rng = generator(seed, 0, number, DIVIDING)
        for part, index in enumerate(stratified_split(labels[members], sizes, rng)):
            drawn[members[index]] = part
    return [
        np.where(parts == TRAIN, drawn[group], parts)
        for parts, group in zip(official, groups, strict=True)
    ]


def _part_sizes(count: int, validation: float, test: float) -> list[int]:
    """Returns how many of `count` train, validate and test; all train if none else would."""
    validating = max(1, share_size(count, validation)) if validation else 0
    testing = count - share_size(count, 1 - test)
    training = count - validating - testing
    return [training, validating, testing] if training > 0 else [count, 0, 0]


def hold_out(domain: Domain, validation: float, rng: np.random.Generator) -> Domain:
    """Holds out a share of a domain's training samples for validation, if it has none.

    Stratified; samples with the same name stay together, and shares count such groups.

    Raises:
      ValueError: the share is out of range.
    """
    _check_shares("official", validation, 0.0)
    if domain.train is None or domain.validation is not None or not validation:
        return domain
    train = domain.train
    group = number_groups(train.names, len(train.images))
    sizes = _part_sizes(int(group.max()) + 1, validation, 0.0)[:2]
    parts = stratified_split(strata(train.labels)[first_samples(group)], sizes, rng)
    kept, held = (select(train, samples_of(part, group)) for part in parts)
    return domain._replace(train=kept, validation=held if sizes[1] else None)


def _check_shares(split: str, validation: float, test: float) -> None:
    if split not in _SPLITS:
        raise ValueError(f"data.split is {split!r}; it must be one of {', '.join(_SPLITS)}")
    if not (0 <= validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise ValueError(
            f"data.validation is {validation} and data.test is {test}; they are shares of a "
            "domain's samples, at least 0 and together below 1"
        )


def internal_domain(
    source: Source, pool: Pool, parts: np.ndarray, rng: np.random.Generator
) -> Domain:
    """Returns a domain that trains, its samples in random order.

    Where no sample is kept for testing, the validation samples serve as test split too (the same
    object): FedIG and DomainBed test on the unseen domain and keep a validation set only.

    Raises:
      ValueError: no sample trains, or none validates or tests.
    """
    train, validation, test = (
        _split(pool, rng.permutation(np.flatnonzero(parts == part)))
        for part in (TRAIN, VALIDATION, TEST)
    )
    place = f"{source.name}, {pool.name!r} ({len(pool.images)} samples)"
    if train is None:
        raise ValueError(
            f"{place} has no training samples in its official split; choose another data.split "
            "('holdout' or 'stratified'), or make it a target"
        )
    if test is None and validation is None:
        raise ValueError(
            f"{place} has nothing to validate or test on; set data.validation or data.test above "
            "0, such as 0.1, and give every domain enough samples to divide"
        )
    return Domain(pool.name, train, validation, test or validation)


def unseen_domain(pool: Pool, rng: np.random.Generator) -> Domain:
    """Returns a domain that no client trains on, tested whole.

    Its samples come in random order: published class after class, they would make batches of one
    class, which an adaptation to the stream (TsmoBN, batch statistics) would take for the domain.
    """
    return Domain(pool.name, None, None, _split(pool, rng.permutation(len(pool.images))))


def _split(pool: Pool, index: np.ndarray) -> Split | None:
    if not len(index):
        return None
    return Split(Rows(pool.images, index), take(pool.labels, index), pool.names[index])
