"""Samples drawn class by class: splits, fractions, and the clients of one domain.

Everything here is a pure function of labels, names and a generator. Shares are worked out in
integers, so that the same seed gives the same samples on any machine.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_bn.data.division.forms import drawn_samples, with_smallest
from fedjax_bn.data.division.groups import first_samples, number_groups, samples_of
from fedjax_bn.data.division.integer_shares import apportion, at_least_one, fraction_size
from fedjax_bn.data.division.label_and_size_skew import REMEDY, dirichlet_counts
from fedjax_bn.data.domain import Split, select
from fedjax_bn.data.label_trees import has_boxes, strata, take
from fedjax_bn.data.rows import Rows


def _pools(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The indices of each class, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def stratified_split(
    labels: np.ndarray, sizes: Sequence[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Disjoint parts of the given sizes, each with the classes in the proportions of the whole.

    Args:
      labels: i32[N].
      sizes: samples of each part; together at most N. What is over belongs to no part.
      rng: draws who goes where, and the order within a part.

    Returns:
      One i64[size] of indices for each part, in random order.

    Raises:
      ValueError: a size is negative, or the sizes sum to more than N.
    """
    if min(sizes, default=0) < 0 or sum(sizes) > len(labels):
        raise ValueError(
            f"cannot split {len(labels)} samples into parts of {list(sizes)}; "
            f"sizes must be at least 0 and sum to at most {len(labels)}"
        )
    pools = _pools(labels, rng)
    parts = []
    for size in sizes:
        shares = apportion(np.array([len(pool) for pool in pools], np.int64), size)
        taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
        pools = [pool[share:] for pool, share in zip(pools, shares, strict=True)]
        parts.append(rng.permutation(np.concatenate([np.empty(0, np.int64), *taken])))
    return parts


def stratified_sample(split: Split, size: int, rng: np.random.Generator) -> Split:
    """A random sample of `size` samples, stratified; the split itself if it has no more than that.

    Every class that the split has stays, with one sample at least, if `size` allows it.

    Raises:
      ValueError: size is less than 1.
    """
    if size < 1:
        raise ValueError(f"cannot truncate to {size} samples; keep at least 1")
    if size >= len(split.images):
        return split
    pools = _pools(strata(split.labels), rng)
    shares = at_least_one(np.array([len(pool) for pool in pools], np.int64), size)
    taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
    return select(split, rng.permutation(np.concatenate(taken)))


def take_fraction(split: Split, fraction: float, rng: np.random.Generator) -> Split:
    """A stratified random fraction of a split, see `stratified_sample`.

    Args:
      split: N samples.
      fraction: in (0, 1]; floor(fraction * N) samples are kept, and one at least.
      rng: draws the sample; it is not used where fraction is 1.

    Raises:
      ValueError: fraction is outside (0, 1].
    """
    return stratified_sample(split, fraction_size(len(split.images), fraction), rng)


def split_clients(
    split: Split,
    n: int,
    rng: np.random.Generator,
    *,
    partition: str = "iid",
    alpha: float = 0.5,
    sizes: np.ndarray | None = None,
) -> list[Split]:
    """n clients of a split, disjoint but for "drawn"; samples with the same name have one owner.

    iid: the same label distribution for all. The groups (see `groups`) are dealt out class after
      class like cards, so the clients' numbers of groups differ by at most one, and so do those of
      any class. FedBN, Table 7, has 1 to 10 clients a domain. With `sizes`, clients get that many
      groups, stratified, and what is over belongs to nobody.
    dirichlet: every class is shared out by a draw from Dirichlet(alpha), see `dirichlet_counts`;
      "dirichlet:smallest=N" says how many samples the smallest client has at least.
    drawn:N: each client draws N samples at random with replacement, so that there may be far more
      clients than samples; what one has others may have too.

    Raises:
      ValueError: n is less than 1, more than the groups of some class (iid) or than all groups
        (dirichlet), or alpha is not above 0.
    """
    if n < 1:
        raise ValueError(f"data.clients_per_domain is {n}; it must be at least 1")
    if count := drawn_samples(partition):
        return [_drawn(split, index) for index in rng.integers(len(split.images), size=(n, count))]
    if n == 1 and sizes is None:
        return [split]
    group = number_groups(split.names, len(split.images))
    labels = strata(split.labels)[first_samples(group)]
    if sizes is not None:
        parts = stratified_split(labels, sizes.tolist(), rng)
    elif (drawn := with_smallest(partition))[0] == "dirichlet":
        parts = _deal_dirichlet(labels, n, alpha, rng, drawn[1])
    else:
        kind = "samples" if len(labels) == len(group) else "groups (by name)"
        if not has_boxes(split.labels):  # an image's boxes have many classes, some of them rare
            _check_enough(labels, n, kind)
        parts = _deal_alike(labels, n, rng)
    return [select(split, rng.permutation(samples_of(part, group))) for part in parts]


def _drawn(split: Split, index: np.ndarray) -> Split:
    """Samples of a split, which stay where they are."""
    names = None if split.names is None else split.names[index]
    return Split(Rows(split.images, index), take(split.labels, index), names)


def _check_enough(labels: np.ndarray, n: int, kind: str) -> None:
    """Raises ValueError where a class has fewer samples than there are clients."""
    values, counts = np.unique(labels, return_counts=True)
    rarest = int(np.argmin(counts))
    if counts[rarest] < n:
        raise ValueError(
            f"cannot share out {counts[rarest]} training {kind} of class {values[rarest]} among "
            f"{n} clients; {REMEDY}"
        )


def _deal_alike(labels: np.ndarray, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    dealt = np.concatenate(_pools(labels, rng))
    return [dealt[client::n] for client in range(n)]


def _deal_dirichlet(
    labels: np.ndarray, n: int, alpha: float, rng: np.random.Generator, smallest: int
) -> list[np.ndarray]:
    counts = dirichlet_counts(np.unique(labels, return_counts=True)[1], n, alpha, rng, smallest)
    cuts = np.cumsum(counts, axis=1)[:, :-1]
    dealt = [np.split(pool, cut) for pool, cut in zip(_pools(labels, rng), cuts, strict=True)]
    return [np.concatenate(parts) for parts in zip(*dealt, strict=True)]
