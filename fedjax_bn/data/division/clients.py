"""Turns a dataset into a federation: leaves domains out, and divides the others into splits.

    official    the authors' own lists; a missing part is a stratified share of training samples
    holdout     random shares (DomainBed)
    stratified  random shares, the same proportions of classes in each

Samples with the same name are never separated, even across domains, such as corruptions of one
photograph. Shares count such groups, stratified by the label of their first sample.

Reference: Gulrajani & Lopez-Paz, "In search of lost domain generalization", ICLR 2021.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.division import partition
from fedjax_bn.data.domain import (
    Dataset,
    Domain,
    Rows,
    Split,
    blocks,
    check_dataset,
    join_splits,
    select,
    whole,
)
from fedjax_bn.data.labels import strata
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION, Pool, Source, check_source

_DIVIDING, _ORDERING = 1, 2  # last entries of a generator's path (0, position, USE)


def make_clients(
    data: Source | Dataset,
    *,
    target: str | Sequence[str] = (),
    split: str = "",
    validation: float = 0.1,
    test: float = 0.0,
    seed: int = 0,
    **shares: Any,
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the clients of a federation, and the unseen domains in the source's order, whole.

    Args:
      data: a source; or a dataset that has its own splits, where `split` "official" holds out
        `validation` of the training samples of each domain without validation samples.
      target: the unseen domains: one name, several (or "a,b"), or a group of the source, such as
        "noise" of CIFAR-10-C; empty for none.
      split: "official", "holdout" or "stratified", see above; "" for official if every training
        domain has official lists, else stratified.
      validation: share of a domain's samples that validate, in [0, 1), 0.2 in DomainBed; above 0,
        max(1, floor(share * N)) samples.
      test: share of samples that test, below 1 with `validation`; N - floor((1 - share) * N)
        samples, as in FedBN's 80 to 20. Without any, the validation samples test.
      seed: at least 0; the same seed gives the same clients on any machine.
      **shares: arguments of `partition.share_out_domains`: truncate, fraction, partition,
        num_clients, clients_per_domain and sizes.

    Raises:
      ValueError: naming the configuration key, or the sample, that is wrong.
    """
    is_divided = isinstance(data, Dataset)
    data = data if is_divided else check_source(data)
    undivided, unseen = _undivided(data, target, seed)
    target_names = {domain.name for domain in unseen}
    pools = () if is_divided else [pool for pool in data.pools if pool.name not in target_names]
    has_lists = all(pool.parts is not None for pool in pools)
    splits = ("", *("official",) * has_lists, *("holdout", "stratified") * (not is_divided))
    shares_fit = min(validation, test) >= 0 and validation + test < 1
    problems = {
        f"data.split={split!r} must be one of {splits} for {data.name}": split not in splits,
        f"data.validation={validation} and data.test={test} must be at least 0, together below 1": (
            not shares_fit
        ),
        f"{target=} must leave domains that train": len(unseen) == len(undivided.domains),
    }
    if problem := next((text for text, occurs in problems.items() if occurs), ""):
        raise ValueError(problem)
    if is_divided:
        internal = _with_validation(data, target_names, validation if split else 0.0, seed)
    else:
        split = split or ("official" if has_lists else "stratified")
        all_parts = _choose_parts(data, split, validation, test, seed)
        domains = _divide_domains(data, target_names, all_parts, seed)
        internal = undivided._replace(domains=domains)
        check_dataset(internal._replace(domains=(*domains, *unseen)))
    return partition.share_out_domains(internal, seed=seed, **shares), unseen


def unseen_only(
    data: Source | Dataset, *, target: str | Sequence[str] = (), seed: int = 0
) -> Dataset:
    """Returns the unseen domains of `make_clients`, with all samples; all domains by default."""
    data = data if isinstance(data, Dataset) else check_source(data)
    undivided, unseen = _undivided(data, target, seed)
    return check_dataset(undivided._replace(domains=unseen or undivided.domains))


def pool_clients(dataset: Dataset) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns one client "pooled" with all clients' samples, and each client as a test domain.

    This is centralized training (FedBN, E.3 and Table 12), tested on all test splits together, as
    the client, and on each, as an unseen domain.
    """
    domains = dataset.domains
    parts = [
        None if None in of_all else join_splits(of_all)
        for of_all in zip(*(domain[1:] for domain in domains), strict=True)
    ]
    client = Domain("pooled", *parts)
    # One object for both parts means that the validation samples are tested.
    if all(domain.test is domain.validation for domain in domains):
        client = client._replace(test=client.validation)
    unseen = tuple(
        Domain(d.name, None, d.validation if d.test is d.validation else None, d.test)
        for d in domains
    )
    return dataset._replace(domains=(client,)), unseen


def _with_validation(
    data: Dataset, target_names: Collection[str], share: float, seed: int
) -> Dataset:
    """Returns the training domains of a dataset; those that do not validate hold a share out."""
    internal = []
    for position, domain in enumerate(data.domains):
        if domain.name in target_names:
            continue
        if share and domain.train is not None and domain.validation is None:
            rng = generator(seed, 0, position, _DIVIDING)
            train, validation = partition.hold_out(domain.train, share, rng)
            domain = domain._replace(train=train, validation=validation)
        internal.append(domain)
    return data._replace(domains=tuple(internal))


def _divide_domains(
    data: Source, target_names: Collection[str], all_parts: Sequence[np.ndarray], seed: int
) -> tuple[Domain, ...]:
    """Returns the training domains with their splits, samples in random order."""
    internal = []
    for position, (pool, parts) in enumerate(zip(data.pools, all_parts, strict=True)):
        if pool.name in target_names:
            continue
        rng, splits = generator(seed, 0, position, _ORDERING), []
        for part in (TRAIN, VALIDATION, TEST):
            index = rng.permutation(np.flatnonzero(parts == part))
            splits.append(select(_all_of(pool), index) if len(index) else None)
        training, validating, testing = splits
        if training is None or (testing is None and validating is None):
            raise ValueError(
                f"{data.name}, {pool.name!r} has nothing to train on, or nothing to validate or "
                "test on: change data.validation, data.test or data.split, or make it a target"
            )
        # FedIG and DomainBed test on the unseen domain and keep a validation set only.
        internal.append(Domain(pool.name, training, validating, testing or validating))
    return tuple(internal)


def _choose_parts(
    source: Source, split: str, validation: float, test: float, seed: int
) -> list[np.ndarray]:
    """Returns i8[N] for each pool: the parts of its samples, whichever domains are left out."""
    official = [
        np.asarray(pool.parts, np.int8)
        if split == "official" and pool.parts is not None
        else np.full(len(pool.images), TRAIN, np.int8)
        for pool in source.pools
    ]
    names = np.concatenate([np.asarray(pool.names, np.str_) for pool in source.pools])
    borders = np.cumsum([len(parts) for parts in official])[:-1]
    groups = np.split(partition.number_groups(names, len(names)), borders)
    count = max(group.max() for group in groups) + 1
    labels, found_in = np.zeros(count, np.int32), np.zeros((count, len(groups)), bool)
    for position, (pool, parts, group) in enumerate(
        zip(source.pools, official, groups, strict=True)
    ):
        found_in[group[parts == TRAIN], position] = True
        if split != "holdout":
            labels[group[::-1]] = strata(pool.labels)[::-1]  # reversed: the first of a group wins
    # Groups found in the same domains are drawn together, so that every domain gets its shares, and
    # domains with the same samples get the same parts.
    drawn = np.full(count, TRAIN, np.int8)
    kinds, kind = np.unique(found_in, axis=0, return_inverse=True)
    for number, in_domains in enumerate(kinds):
        members, listed = np.flatnonzero(kind == number), official[in_domains.argmax()]
        # A part that the authors list is theirs; only a missing one is taken from training.
        size = len(members)
        lacks_validation = validation and VALIDATION not in listed
        validating = partition.fraction_size(size, validation) if lacks_validation else 0
        testing = 0 if TEST in listed else size - partition.fraction_size(size, 1 - test, least=0)
        training = size - validating - testing
        sizes = [training, validating, testing] if training > 0 else [size, 0, 0]
        rng = generator(seed, 0, number, _DIVIDING)
        for part, index in enumerate(partition.stratified_split(labels[members], sizes, rng)):
            drawn[members[index]] = part
    return [
        np.where(parts == TRAIN, drawn[group], parts)
        for parts, group in zip(official, groups, strict=True)
    ]


def _undivided(
    data: Source | Dataset, target: str | Sequence[str], seed: int
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the data, where the domains of a source only test, and the unseen domains."""
    groups: Mapping[str, Sequence[str]] = {}
    if isinstance(data, Source):
        domains = []
        for position, pool in enumerate(data.pools):
            # Shuffled, because published samples often come class by class, and a method that
            # adapts to the stream (TsmoBN) would take a batch of one class for the whole domain.
            order = generator(seed, 0, position, _ORDERING).permutation(len(pool.images))
            domains.append(Domain(pool.name, None, None, select(_all_of(pool), order)))
        form = len(data.classes), tuple(domains), data.mean, data.std, tuple(data.classes)
        groups, data = data.groups, Dataset(data.name, *form, data.key)
    names = [domain.name for domain in data.domains]
    meant = {group: {*members} & {*names} for group, members in groups.items()}
    meant = {group: members for group, members in meant.items() if members}
    meant |= {name: {name} for name in names}
    if isinstance(target, str):
        parts = [part.strip() for part in target.split(",") if part.strip()]
        target = [target] if target in meant else parts
    if unknown := [entry for entry in target if entry not in meant]:
        allowed = ", ".join(meant)
        raise ValueError(f"target {unknown[0]!r} is not a domain of {data.name}; give {allowed}")
    target_names = {name for entry in target for name in meant[entry]}
    return data, tuple(domain for domain in data.domains if domain.name in target_names)


def _all_of(pool: Pool) -> Split:
    """Returns the samples of a pool without copying its images."""
    return Split(Rows(pool.images, np.arange(len(pool.images))), pool.labels, pool.names)


def duplicate_notes(dataset: Dataset, unseen: Sequence[Domain] = ()) -> tuple[str, ...]:
    """Returns a note on how many tested samples are byte for byte training samples, if any are."""
    # Every image is looked at in its middle row; only those that agree there are read whole.
    trained = {client.name: _codes(_middle_rows(client.train)) for client in dataset.domains}
    middles = {code for codes in trained.values() for code in codes}
    # Clients that share their test samples are one place.
    tests = {id(domain.test): (domain.name, domain.test) for domain in dataset.domains}
    suspects, alike = [], set()
    for name, split in [*tests.values(), *((domain.name, whole(domain)) for domain in unseen)]:
        codes = _codes(_middle_rows(split))
        rows = [row for row, code in enumerate(codes) if code in middles]
        suspects.append((f"{len(split.images)} of {name}", _whole_codes(split, rows)))
        alike |= {codes[row] for row in rows}
    owners: dict[int, str] = {}  # hash of a whole image -> the client that trains on it
    for client in dataset.domains:
        rows = [row for row, code in enumerate(trained[client.name]) if code in alike]
        for code in _whole_codes(client.train, rows):
            owners.setdefault(code, client.name)
    counts = []
    for place, codes in suspects:
        copies = Counter(owners[code] for code in codes if code in owners)
        for client, _ in copies.most_common(1):
            counts.append(f"{copies.total()} of the {place} (most in {client})")
    note = (
        "tested samples that are byte for byte training samples too, so that their scores are not "
        f"those of new samples: {first_few(counts)}; remove the copies"
    )
    return (note,) if counts else ()


def _middle_rows(split: Split) -> Iterator[np.ndarray]:
    """Yields the middle of every image u8[N, H, W, C], [n, W, C]; or of features f[N, F], [n]."""
    images = Rows(split.images, np.arange(len(split.images)))
    for rows in blocks(images.index):
        # Indexed at once, so that of a memory map only these bytes are read.
        yield images.array[rows, images.shape[1] // 2]


def _whole_codes(split: Split, rows: Sequence[int]) -> list[int]:
    return _codes(blocks(select(split, np.array(rows, np.int64)).images))


def _codes(parts: Iterator[np.ndarray]) -> list[int]:
    """Returns Python's hash, of 64 bits, of the bytes of each row of the arrays [n, ...]."""
    return [hash(row.tobytes()) for part in parts for row in part]
