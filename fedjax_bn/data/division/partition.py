"""Draws samples by class and group in whole numbers, and divides them among clients.

A group is all samples with one name, such as windows of one recording. Divisions keep groups whole,
so that no model is tested on a recording that it was trained on.

The draws depend only on labels, names and a generator, and shares are computed in integers, so that
the same seed gives the same samples on any machine.

Reference for label skew: Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution
for federated visual classification", 2019; used by FedIG, appendix A.6.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.division.choices import SIZES, read_partition
from fedjax_bn.data.domain import (
    Dataset,
    Domain,
    Rows,
    Split,
    blocks,
    check_names_differ,
    select,
    splits,
)
from fedjax_bn.data.labels import leaves_of, strata
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.source import part_in

_TRUNCATING = 3  # last entry of a generator's path (0, position, USE); `clients` has 1 and 2
# The eyes, breasts or lungs of one person: the letters of a side between digits and signs.
_SIDE = re.compile(r"(?<![a-z])(?:l|r|left|right|od|os)(?![a-z])", re.IGNORECASE)


def fraction_size(count: int, fraction: float, least: int = 1) -> int:
    """Returns floor(fraction * count), at least 1: FedBN's 10 % of 7438 samples are 743."""
    return max(least, int(fraction * count + 1e-9))  # 0.29 * 100 is 28.999... in floating point


def _apportion(counts: np.ndarray, total: int) -> np.ndarray:
    """Returns i64[C] proportional to `counts`, summing to `total`, by largest remainder."""
    counts = np.asarray(counts, np.int64)
    count = max(int(counts.sum()), 1)
    # In integers, because floats may round differently on another machine.
    shares = counts * total // count
    remainder = int(total - shares.sum())
    # Stable, so that of equal remainders the same one is taken on every machine.
    largest = np.argsort(-(counts * total % count), kind="stable")[:remainder]
    shares[largest] += 1
    return shares


def _shuffled_classes(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the indices of each class, shuffled."""
    # `np.unique` sorts the classes, so the order of draws is the same on any machine.
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def stratified_split(
    labels: np.ndarray, sizes: Sequence[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns disjoint parts of labels i32[N], i64[size] each, with the classes in proportion.

    Indices are in random order. Sizes sum to at most N.
    """
    pools = _shuffled_classes(labels, rng)
    parts = []
    for size in sizes:
        shares = _apportion(np.array([len(pool) for pool in pools], np.int64), size)
        taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
        pools = [pool[share:] for pool, share in zip(pools, shares, strict=True)]
        parts.append(rng.permutation(np.concatenate([np.empty(0, np.int64), *taken])))
    return parts


def stratified_sample(split: Split, size: int, rng: np.random.Generator) -> Split:
    """Returns `size` samples, at least 1, of every class if possible; or all if there are fewer."""
    if size >= len(split.images):
        return split
    pools = _shuffled_classes(strata(split.labels), rng)
    counts = np.array([len(pool) for pool in pools], np.int64)
    minimum = 1 if size >= len(pools) else 0
    shares = minimum + _apportion(counts - minimum, size - minimum * len(pools))
    taken = [pool[:share] for pool, share in zip(pools, shares, strict=True)]
    return select(split, rng.permutation(np.concatenate(taken)))


def number_groups(names: np.ndarray | None, count: int) -> np.ndarray:
    """Returns the number of each sample's group, i64[count], by first appearance from 0.

    Samples of one name, str[count], are a group; each is one if `names` is None.
    """
    if names is None:
        return np.arange(count)
    _, appearance, inverse = np.unique(
        np.asarray(names, np.str_), return_index=True, return_inverse=True
    )
    rank = np.empty_like(appearance)
    rank[np.argsort(appearance)] = np.arange(len(appearance))
    return rank[inverse]


def _groups_in(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Returns the group of each sample, i64[N], and the label of each group's first, i32[G]."""
    group = number_groups(split.names, len(split.images))
    return group, strata(split.labels)[np.unique(group, return_index=True)[1]]


def _samples_of(chosen: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns the samples of the chosen groups i64[g], one group after the other."""
    # Without a loop over groups, of which there may be as many as samples.
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group))
    sizes = np.bincount(group)[chosen]
    steps = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.repeat(ends[chosen] - sizes, sizes) + steps]


def hold_out(split: Split, share: float, rng: np.random.Generator) -> tuple[Split, Split | None]:
    """Returns the samples that stay, and a stratified share of the groups, None if all would go."""
    group, labels = _groups_in(split)
    size = fraction_size(len(labels), share)
    size = size if size < len(labels) else 0
    parts = stratified_split(labels, [len(labels) - size, size], rng)
    staying, held_out = (select(split, _samples_of(part, group)) for part in parts)
    return staying, held_out if size else None


def groups_of(
    domain: str, folder: Path, images: Sequence[Path], pattern: str = ""
) -> tuple[list[str], str]:
    """Returns the names of a domain's images, equal for images of one group, and a note on them.

    The `pattern` is a regular expression that is searched in an image's path in the domain's
    folder, else ValueError; the group is what its parentheses match, or the whole match. With "",
    images that differ only in a side (L and R, left and right, OD and OS) are one group, in any
    part (train, val, test), and each other image is alone.
    """
    names = [image.relative_to(folder).as_posix() for image in images]
    if pattern:
        groups = []
        for image, name in zip(images, names, strict=True):
            if not (match := re.search(pattern, name)):
                raise ValueError(f"{image}: data.groups={pattern} does not fit {name!r}")
            groups.append("/".join(map(str, match.groups())) or match[0])
    else:
        sideless = {name: _sideless(name) for name in names}
        sizes = Counter(sideless.values())
        groups = [sideless[name] if sizes[sideless[name]] > 1 else name for name in names]
    note = f"{domain}: {len(set(groups))} groups of {len(names)} images"
    return [f"{domain}/{group}" for group in groups], note + " by data.groups" * bool(pattern)


def _sideless(name: str) -> str:
    """Returns the name of an image with * for sides, without parts and suffix; or as it is."""
    if not _SIDE.search(name):
        return name
    folders = [part for part in Path(name).with_suffix("").parts if part_in([part]) is None]
    return _SIDE.sub("*", "/".join(folders))


def share_out_domains(
    dataset: Dataset,
    clients_per_domain: int = 1,
    fraction: float = 1.0,
    seed: int = 0,
    *,
    partition: str = "iid",
    num_clients: int = 0,
    sizes: str = "",
    truncate: bool = False,
) -> Dataset:
    """Returns a dataset whose domains are the clients: "mnist", or "mnist/0", "mnist/1", ...

    Only training samples are divided: every client validates and tests on the whole validation and
    test split of its domain. Except for "drawn", clients are disjoint, and a group has one owner.

    Args:
      clients_per_domain: at least 1; 1 to 10 in FedBN, Table 7.
      fraction: of each domain's training samples, in (0, 1], at least one, before the division.
      partition: how the clients of a domain differ.
        iid: by at most one group, in total and in each class.
        dirichlet:alpha=A:smallest=N: every class is divided by largest remainder, in proportion to
        a draw from Dirichlet(A, ..., A) over the clients; FedIG, A.6, has A 0.5, the default, and
        0.1. Clients below min(N, samples // clients) are then raised to it with samples of the
        largest client, which is our addition; N is 10 by default.
        drawn:samples=N: each client draws N samples at random with replacement.
      num_clients: of all domains, instead of `clients_per_domain`: as many of each domain, and any
        remainder of the largest, one each. 0 to use `clients_per_domain`.
      sizes: of the clients' training sets, iid only, in groups, stratified: a number for all
        clients, such as "743", or one for each, "743,7943"; "" for the partition's.
      truncate: first cut training and validation splits to the smallest domain's size (FedBN,
        section 5.1; TsmoBN, section 4.1). Test splits that do not validate stay whole.

    Raises:
      ValueError: an argument is out of range, two exclude each other, or there are too few samples
        (iid: of some class) for the clients.
    """
    if truncate:
        dataset = _truncated(dataset, seed)
    chosen = kind, *_ = read_partition(partition)
    counts = _clients_by_domain(dataset, clients_per_domain, num_clients)
    all_sizes = [int(size) for size in sizes.split(",")] if sizes and SIZES.holds(sizes) else []
    all_sizes *= sum(counts) if len(all_sizes) == 1 else 1
    unsuited = kind == "pooled" or (kind == "dirichlet" and max(counts) == 1)
    if unsuited or (sizes and (kind != "iid" or len(all_sizes) != sum(counts))):
        raise ValueError(
            f"data.partition={partition}, data.sizes={sizes} do not suit {sum(counts)} clients: "
            "sizes: iid only, above 0, one for all or each; dirichlet: needs more data.num_clients"
        )
    clients: list[Domain] = []
    for position, (domain, n) in enumerate(zip(dataset.domains, counts, strict=True)):
        # Streams differ by domain, so that one domain's size does not change another's clients.
        rng = generator(seed, position)
        size = fraction_size(len(domain.train.images), fraction)
        train = stratified_sample(domain.train, size, rng)
        domain_sizes = all_sizes[len(clients) : len(clients) + n]
        place = f"{dataset.name}, {domain.name!r}"
        for i, part in enumerate(_split_clients(train, n, rng, chosen, domain_sizes, place)):
            name = domain.name if n == 1 else f"{domain.name}/{i}"
            clients.append(domain._replace(name=name, train=part))
    check_names_differ([client.name for client in clients], dataset.name)
    return dataset._replace(domains=tuple(clients))


def _clients_by_domain(dataset: Dataset, per_domain: int, num_clients: int) -> list[int]:
    """Returns the number of clients of each domain."""
    domains = len(dataset.domains)
    if per_domain < 1 or (num_clients and (per_domain > 1 or num_clients < domains)):
        raise ValueError(
            f"data.num_clients={num_clients} and data.clients_per_domain={per_domain}: give the "
            f"first of at least {domains}, or the second of at least 1"
        )
    if not num_clients:
        return [per_domain] * domains
    per_domain, remainder = divmod(num_clients, domains)
    counts = np.full(domains, per_domain)
    largest = np.argsort([-len(d.train.images) for d in dataset.domains], kind="stable")
    counts[largest[:remainder]] += 1
    return counts.tolist()


def _truncated(dataset: Dataset, seed: int) -> Dataset:
    """Returns training and validation splits cut to the smallest size, classes in proportion."""
    training = min(len(domain.train.images) for domain in dataset.domains)
    validations = [domain.validation for domain in dataset.domains if domain.validation]
    validating = min((len(split.images) for split in validations), default=0)
    domains = []
    for position, domain in enumerate(dataset.domains):
        rng = generator(seed, 0, position, _TRUNCATING)
        train, validation, test = domain[1:]
        if validation is not None:
            validation = stratified_sample(validation, validating, rng)
            test = validation if domain.test is domain.validation else test
        train = stratified_sample(train, training, rng)
        domains.append(Domain(domain.name, train, validation, test))
    return dataset._replace(domains=tuple(domains))


def _split_clients(
    split: Split,
    n: int,
    rng: np.random.Generator,
    partition: tuple[str, float, int],
    sizes: Sequence[int],
    place: str,
) -> list[Split]:
    """Returns n clients of a split, see `share_out_domains`."""
    kind, alpha, number = partition
    if kind == "drawn":
        drawn = rng.integers(len(split.images), size=(n, number))
        rows = Rows(split.images, np.arange(len(split.images)))  # images are not copied
        return [select(split._replace(images=rows), index) for index in drawn]
    if n == 1 and not sizes:
        return [split]  # in its order, which the hash of the data depends on
    group, labels = _groups_in(split)
    values, counts = np.unique(labels, return_counts=True)
    # Images with boxes or masks are exempt: they have many classes, some of them rare.
    deals_classes = kind == "iid" and not isinstance(split.labels, dict)
    available = counts.min() if deals_classes else counts.sum()
    if sum(sizes) > counts.sum() or (not sizes and available < n):
        raise ValueError(
            f"{place}: {counts.sum()} training samples or groups, {counts.min()} of class "
            f"{values[counts.argmin()]}, are too few for {n} clients: change data.num_clients, "
            "data.clients_per_domain, data.sizes or data.fraction"
        )
    if sizes:
        parts = stratified_split(labels, sizes, rng)
    elif kind == "dirichlet":
        shares = _dirichlet_counts(counts, n, alpha, rng, number)
        cuts, pools = np.cumsum(shares, axis=1)[:, :-1], _shuffled_classes(labels, rng)
        dealt = [np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)]
        parts = [np.concatenate(classes) for classes in zip(*dealt, strict=True)]
    else:
        # Dealt class after class, so that clients differ by at most one in each class.
        cards = np.concatenate(_shuffled_classes(labels, rng))
        parts = [cards[client::n] for client in range(n)]
    return [select(split, rng.permutation(_samples_of(part, group))) for part in parts]


def _dirichlet_counts(
    counts: np.ndarray, n: int, alpha: float, rng: np.random.Generator, smallest: int
) -> np.ndarray:
    """Returns i64[C, n]: how many of each class's samples i64[C] each of n clients gets."""
    draws = [rng.dirichlet(np.full(n, alpha, np.float64)) for _ in counts]
    # In whole numbers of 2**-32, because the last bits of a draw may differ between machines, whose
    # libraries differ in log and exp. Then at most about one count in 10**10 differs.
    weights = [np.rint(draw * 2**32).astype(np.int64) for draw in draws]
    shared = np.array(
        [_apportion(weight, count) for weight, count in zip(weights, counts.tolist(), strict=True)]
    )
    sizes, minimum = shared.sum(0), min(smallest, int(counts.sum()) // n)
    # One sample at a time, from the largest client's most frequent class; ties go to the first.
    while sizes.min() < minimum:
        poor, rich = sizes.argmin(), sizes.argmax()
        label = shared[:, rich].argmax()
        shared[label, [poor, rich]] += [1, -1]
        sizes[[poor, rich]] += [1, -1]
    return shared


def fingerprint(dataset: Dataset) -> str:
    """Returns SHA-256, in hex, of every client's samples in order; the same on any machine.

    Samples with names enter by name, label and form, and `Dataset.key` for their pixels, which are
    not read and may be decoded or rounded otherwise elsewhere. Others enter with every byte.
    """
    digest = hashlib.sha256()

    def add(value: object) -> None:
        digest.update(repr(value).encode())

    def add_array(place: tuple[str, ...], array: np.ndarray | Rows) -> None:
        little = array.dtype.newbyteorder("<")
        add((*place, little.str, array.shape))
        for block in blocks(array):
            digest.update(np.ascontiguousarray(block).astype(little).tobytes())

    add((dataset.name, dataset.num_classes))
    add([[float(x) for x in values] for values in (dataset.mean, dataset.std)])
    if dataset.key:
        add(("key", dataset.key))
    for domain in dataset.domains:
        for name, split in splits(domain):
            place = (domain.name, name)
            if split.names is None:
                add_array(place, split.images)
            else:
                add((*place, (str(split.images.dtype), split.images.shape), len(split.names)))
                # Names of files need not be text; Python reads such bytes as lone surrogates.
                names = "\0".join(split.names.tolist())
                digest.update(names.encode("utf-8", "surrogatepass"))
            for leaf, array in leaves_of(split.labels):
                add_array((*place, leaf) if leaf else place, array)
    return digest.hexdigest()
