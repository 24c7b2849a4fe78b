"""From a dataset to a federation: who is left out, who trains on what."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_bn.data.division.by_class import DIVIDING, ORDERING
from fedjax_bn.data.division.partition import share_out_domains, truncate_all
from fedjax_bn.data.division.split import choose_parts, hold_out, internal_domain, unseen_domain
from fedjax_bn.data.domain import Dataset, Domain, check_dataset, join_splits
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.source import Source, check_source


def make_clients(
    data: Source | Dataset,
    *,
    target: str | Sequence[str] = (),
    split: str = "",
    validation: float = 0.1,
    test: float = 0.0,
    truncate: bool = False,
    seed: int = 0,
    **shares: Any,
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the clients of a federation and the unseen domains.

    Unseen domains are left out whole; every other domain is divided into training, validation and
    test samples; truncation and fraction reduce the training samples, and what remains is shared
    out among the domain's clients.

    Args:
      data: a source; or a dataset with splits of its own, of which `split` "official" holds out
        `validation` of the training samples where a domain has no validation samples.
      target: the unseen domains: one name, several (or "a,b"), or a group of the source's, such as
        "noise" of CIFAR-10-C; empty for none.
      split: "official", "holdout" or "stratified", see `split`; "" for official where every domain
        that trains has official lists, else stratified.
      validation, test: shares of a domain's samples, see `split.choose_parts`. Where no sample is
        kept for testing, internal clients are tested on their validation samples.
      truncate: cut training and validation splits to the size of the smallest domain's, before
        they are shared out (FedBN, section 5.1; TsmoBN, section 4.1). Test splits stay whole,
        unless they are the validation splits.
      seed: at least 0; the same seed gives the same clients on any machine.
      **shares: arguments of `partition.share_out_domains`: fraction, partition, num_clients, alpha,
        clients_per_domain and sizes.

    Returns:
      Dataset of K clients, and the unseen domains in the source's order.

    Raises:
      ValueError: naming the configuration key, or the sample, that is wrong.
    """
    if isinstance(data, Dataset):
        internal, unseen = _own_splits(data, target, split, validation, seed)
    else:
        internal, unseen = _divide_domains(data, target, split, validation, test, seed)
    if truncate:
        internal = truncate_all(internal, seed)
    return share_out_domains(internal, seed=seed, **shares), unseen


def _own_splits(
    data: Dataset, target: str | Sequence[str], split: str, validation: float, seed: int
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the domains of a dataset with splits of its own: those that train, the unseen."""
    if split not in ("", "official"):
        raise ValueError(
            f"data.split={split!r} is of no use, because {data.name} comes with splits of its own: "
            "leave it empty, or say 'official', which holds data.validation of the training "
            "samples out where there are no validation samples"
        )
    left = _left_out([d.name for d in data.domains], {}, target, data.name)
    unseen = tuple(d for d in data.domains if d.name in left)
    share = validation if split else 0.0
    internal = tuple(
        hold_out(d, share, generator(seed, 0, position, DIVIDING))
        for position, d in enumerate(data.domains)
        if d.name not in left
    )
    return data._replace(domains=internal), unseen


def _divide_domains(
    data: Source, target: str | Sequence[str], split: str, validation: float, test: float, seed: int
) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns the domains that train, each with its splits, and the unseen ones."""
    data = check_source(data)
    left = _left_out([pool.name for pool in data.pools], data.groups, target, data.name)
    without = [p.name for p in data.pools if p.parts is None and p.name not in left]
    if split == "official" and without:
        raise ValueError(
            f"data.split is 'official', but {data.name} has no official lists for "
            f"{', '.join(without[:10])}; choose 'holdout' or 'stratified'"
        )
    split = split or ("stratified" if without else "official")
    parts = choose_parts(data, split, validation, test, seed)
    internal, unseen = [], []
    for position, (pool, part) in enumerate(zip(data.pools, parts, strict=True)):
        rng = generator(seed, 0, position, ORDERING)
        if pool.name in left:
            unseen.append(unseen_domain(pool, rng))
        else:
            internal.append(internal_domain(data, pool, part, rng))
    check_dataset(_dataset_of(data, [*internal, *unseen]))
    return _dataset_of(data, internal), tuple(unseen)


def _left_out(
    names: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    target: str | Sequence[str],
    data: str,
) -> list[str]:
    """Returns the unseen domains, see `_named`, or raises ValueError if none would train."""
    left = _named(names, groups, target, data)
    if len(left) == len(names):
        raise ValueError(
            f"target {target if isinstance(target, str) else ','.join(target)} leaves out every "
            f"domain of {data}; none would train"
        )
    return left


def _named(
    names: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    target: str | Sequence[str],
    data: str,
) -> list[str]:
    """Returns the domains that a target of `make_clients` means, in the order of `names`.

    Args:
      names: of all domains.
      groups: names of several domains together; those without any of the domains do not count.
      target: names of domains or groups.
      data: the dataset's name, for error messages.
    """
    meant = {group: set(members) & set(names) for group, members in groups.items()}
    meant = {group: members for group, members in meant.items() if members}
    meant |= {name: {name} for name in names}
    if isinstance(target, str):
        parts = [part.strip() for part in target.split(",") if part.strip()]
        target = [target] if target in meant else parts
    for entry in target:
        if entry not in meant:
            choice = f"target {entry!r} is not a domain of {data}; choose from {', '.join(names)}"
            grouped = [group for group in meant if group not in names]
            raise ValueError(choice + (f", or a group: {', '.join(grouped)}" if grouped else ""))
    left = set().union(*(meant[entry] for entry in target))
    return [name for name in names if name in left]


def unseen_only(
    data: Source | Dataset, *, target: str | Sequence[str] = (), seed: int = 0
) -> Dataset:
    """Returns domains that are tested whole and train no client, as `make_clients` leaves them out.

    Args:
      data: a source, or a dataset with splits of its own.
      target: as in `make_clients`; empty for all domains.
      seed: at least 0.

    Raises:
      ValueError: naming the target, or the sample, that is wrong.
    """
    if isinstance(data, Dataset):
        names = [d.name for d in data.domains]
        chosen = _named(names, {}, target, data.name) or names
        domains = tuple(d for d in data.domains if d.name in chosen)
        return check_dataset(data._replace(domains=domains))
    data = check_source(data)
    names = [pool.name for pool in data.pools]
    chosen = _named(names, data.groups, target, data.name) or names
    domains = [
        unseen_domain(pool, generator(seed, 0, position, ORDERING))
        for position, pool in enumerate(data.pools)
        if pool.name in chosen
    ]
    return check_dataset(_dataset_of(data, domains))


def _dataset_of(data: Source, domains: Sequence[Domain]) -> Dataset:
    """Returns domains of a source as a dataset."""
    count, classes = len(data.classes), tuple(data.classes)
    return Dataset(data.name, count, tuple(domains), data.mean, data.std, classes, data.key)


def pool_clients(dataset: Dataset) -> tuple[Dataset, tuple[Domain, ...]]:
    """Returns one client "pooled" with the samples of all clients, and each as a domain to test on.

    This is centralized training (FedBN, E.3 and Table 12). The one model is tested on each domain's
    own test split, as an unseen domain's, and on all of them together, as the client's.

    Args:
      dataset: K clients.

    Returns:
      Dataset of one client, and K domains that train no client.
    """
    domains = dataset.domains
    validations = [domain.validation for domain in domains]
    client = Domain(
        "pooled",
        train=join_splits([domain.train for domain in domains]),
        validation=None if None in validations else join_splits(validations),
        test=join_splits([domain.test for domain in domains]),
    )
    unseen = tuple(Domain(domain.name, None, None, domain.test) for domain in domains)
    return dataset._replace(domains=(client,)), unseen
