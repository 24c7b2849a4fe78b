"""Who owns which samples: stratified splits, fractions, clients of a domain, the unseen domain.

Everything here is a pure function of labels and a generator. Shares are worked out in integers, so
that the same seed gives the same samples on any machine.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split, select, splits


def generator(seed: int, *path: int) -> np.random.Generator:
    """A PCG64 generator for one use of a seed: other paths give independent streams.

    Raises:
      ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be an integer of at least 0")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *path])))


def apportion(counts: np.ndarray, total: int) -> np.ndarray:
    """Shares of `total` proportional to `counts`, by largest remainder (Hamilton's method).

    Args:
      counts: i64[C], what each class has.
      total: at most sum(counts).

    Returns:
      i64[C], summing to total; each at most its count and within one of total * count / sum.
    """
    counts = np.asarray(counts, np.int64)
    whole = max(int(counts.sum()), 1)
    shares = counts * total // whole
    left = int(total - shares.sum())
    largest = np.argsort(-(counts * total % whole), kind="stable")[:left]
    shares[largest] += 1
    return shares


def _at_least_one(counts: np.ndarray, total: int) -> np.ndarray:
    """As `apportion`, but one sample of every class that has any, where the total allows it."""
    present = (counts > 0).astype(np.int64)
    if total < present.sum():
        return apportion(counts, total)
    return present + apportion(counts - present, total - int(present.sum()))


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


def truncate(split: Split, size: int, rng: np.random.Generator) -> Split:
    """A random sample of `size` samples, stratified; the split itself if it has no more than that.

    Every class that the split has stays, with one sample at least, if `size` allows it.

    Raises:
      ValueError: size is less than 1.
    """
    if size < 1:
        raise ValueError(f"cannot truncate to {size} samples; keep at least 1")
    if size >= len(split.labels):
        return split
    pools = _pools(split.labels, rng)
    shares = _at_least_one(np.array([len(pool) for pool in pools], np.int64), size)
    taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
    return select(split, rng.permutation(np.concatenate(taken)))


def take_fraction(split: Split, fraction: float, rng: np.random.Generator) -> Split:
    """A stratified random fraction of a split, see `truncate`.

    Args:
      split: N samples.
      fraction: in (0, 1]; floor(fraction * N) samples are kept, and one at least.
      rng: draws the sample; it is not used where fraction is 1.

    Raises:
      ValueError: fraction is outside (0, 1].
    """
    return truncate(split, fraction_size(len(split.labels), fraction), rng)


def fraction_size(count: int, fraction: float) -> int:
    """floor(fraction * count), at least 1: FedBN's 10 % of 7438 samples are 743.

    Raises:
      ValueError: fraction is outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"data.fraction is {fraction}; it must be above 0 and at most 1")
    return max(1, int(fraction * count + 1e-9))  # 0.29 * 100 is 28.999..., and 29 is meant


def split_clients(split: Split, n: int, rng: np.random.Generator) -> list[Split]:
    """n clients with the same label distribution, disjoint, together the whole split.

    The samples are dealt out class after class like cards, so the clients' sizes differ by at most
    one, and so do their counts of any class. FedBN, Table 7, has 1 to 10 clients a domain.

    Raises:
      ValueError: n is less than 1, or more than the samples of some class.
    """
    if n < 1:
        raise ValueError(f"data.clients_per_domain is {n}; it must be at least 1")
    if n == 1:
        return [split]
    values, counts = np.unique(split.labels, return_counts=True)
    rarest = int(np.argmin(counts))
    if counts[rarest] < n:
        raise ValueError(
            f"cannot share out {counts[rarest]} training samples of class {values[rarest]} among "
            f"{n} clients; lower data.clients_per_domain or raise data.fraction"
        )
    dealt = np.concatenate(_pools(split.labels, rng))
    return [select(split, rng.permutation(dealt[client::n])) for client in range(n)]


def clients_of(
    dataset: Dataset, clients_per_domain: int = 1, fraction: float = 1.0, seed: int = 0
) -> Dataset:
    """The dataset whose domains are the clients: "mnist", or "mnist/0", "mnist/1" for several.

    Only training samples are shared out: every client validates and tests on the whole validation
    and test split of its domain. Clients of one domain follow each other.

    Args:
      dataset: domains that take part in training.
      clients_per_domain: at least 1.
      fraction: of each domain's training samples, in (0, 1], taken before they are shared out.
        A source that has taken its own fraction already needs none here.
      seed: at least 0.

    Raises:
      ValueError: an argument is out of range, see `take_fraction` and `split_clients`.
    """
    clients: list[Domain] = []
    for position, domain in enumerate(dataset.domains):
        rng = generator(seed, position)
        try:
            train = take_fraction(domain.train, fraction, rng)
            parts = split_clients(train, clients_per_domain, rng)
        except ValueError as error:
            raise ValueError(f"{dataset.name}, {domain.name!r}: {error}") from error
        names = (
            [domain.name] if len(parts) == 1 else [f"{domain.name}/{k}" for k in range(len(parts))]
        )
        clients += [
            domain._replace(name=name, train=part) for name, part in zip(names, parts, strict=True)
        ]
    return dataset._replace(domains=tuple(clients))


def leave_out(dataset: Dataset, target: str | None) -> tuple[Dataset, Domain | None]:
    """The dataset without the unseen domain, and that domain (None where target is None).

    Raises:
      ValueError: no domain has that name, or none would be left to train on.
    """
    if target is None:
        return dataset, None
    names = [domain.name for domain in dataset.domains]
    if target not in names:
        raise ValueError(f"target {target!r} is no domain of {dataset.name}; choose from {names}")
    if len(names) == 1:
        raise ValueError(
            f"target {target!r} is the only domain of {dataset.name}; none would train"
        )
    internal = tuple(domain for domain in dataset.domains if domain.name != target)
    return dataset._replace(domains=internal), dataset.domains[names.index(target)]


def fingerprint(dataset: Dataset) -> str:
    """SHA-256 in hex over names, forms, images and labels of all splits in order.

    Equal data has an equal fingerprint on any machine: bytes are taken in little-endian order.
    """
    digest = hashlib.sha256(repr((dataset.name, dataset.num_classes)).encode())
    digest.update(
        repr([[float(x) for x in dataset.mean], [float(x) for x in dataset.std]]).encode()
    )
    for domain in dataset.domains:
        for name, split in splits(domain):
            for array in split:
                little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
                head = (domain.name, name, little.dtype.str, little.shape)
                digest.update(repr(head).encode())
                digest.update(little.tobytes())
    return digest.hexdigest()
