"""Divides samples among clients, evenly or skewed by label or size, and hashes the result.

Reference for label skew: Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution
for federated visual classification", 2019; used by FedIG, appendix A.6.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fedjax_bn.data.division.by_class import (
    TRUNCATING,
    apportion,
    first_samples,
    fraction_size,
    number_groups,
    samples_of,
    shuffled_classes,
    stratified_sample,
    stratified_split,
)
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
from fedjax_bn.data.label_trees import leaves_of, strata
from fedjax_bn.data.seeds import generator


def share_out_domains(
    dataset: Dataset,
    clients_per_domain: int = 1,
    fraction: float = 1.0,
    seed: int = 0,
    *,
    partition: str = "iid",
    num_clients: int = 0,
    sizes: str | Sequence[int] = "",
    truncate: bool = False,
) -> Dataset:
    """Returns a dataset whose domains are the clients: "mnist", or "mnist/0", "mnist/1", ...

    Only training samples are divided: every client validates and tests on the whole validation and
    test split of its domain. Clients of one domain follow each other. Except for "drawn", they are
    disjoint, and samples with one name have one owner, because groups are divided, see `by_class`.
    The partition decides how the clients of a domain differ:

    iid: the same label distribution for all. Groups are dealt out class after class like cards, so
      clients differ by at most one group, in total and in each class. FedBN, Table 7, has 1 to 10
      clients per domain. With `sizes`, clients get that many groups, stratified, and no client gets
      the rest.
    dirichlet:alpha=A:smallest=N: every class is divided by largest remainder, in proportion to a
      draw from Dirichlet(A, ..., A) over the clients: near 0 a class has one owner, at 100 all
      clients have nearly the same share; FedIG, A.6, has 0.5, the default, and 0.1. Then clients
      below min(N, samples // clients) are raised to it with samples of the largest client. N is 10
      by default. This minimum is our addition.
    drawn:samples=N: each client draws N samples at random with replacement, so that there may be
      far more clients than samples, and several may have the same sample.

    Args:
      dataset: domains that take part in training.
      clients_per_domain: at least 1.
      fraction: of each domain's training samples, in (0, 1], taken before they are divided: max(1,
        floor(fraction * N)) samples, stratified. Leave it at 1 if the source has already taken a
        fraction.
      seed: at least 0.
      partition: see above.
      num_clients: total number of clients, instead of `clients_per_domain`: split evenly over the
        domains; any remainder goes to the largest, one each. 0 to use `clients_per_domain`.
      sizes: of the clients' training sets, iid only: whole numbers, or a text of them, one for
        each client or one for all; "" for the partition's.
      truncate: cut training and validation splits to the smallest domain's size before they are
        divided (FedBN, section 5.1; TsmoBN, section 4.1). Test splits stay whole, unless they are
        the validation splits.

    Raises:
      ValueError: an argument is out of range, two exclude each other, there are too few samples
        (iid: of some class) for the clients, or two clients would have one name.
    """
    if truncate:
        dataset = _truncated(dataset, seed)
    kind, *_ = read_partition(partition)
    counts = _clients_by_domain(dataset, clients_per_domain, num_clients)
    sizes = sizes if isinstance(sizes, str) else ",".join(map(str, sizes))
    numbers = [int(size) for size in sizes.split(",")] if sizes and SIZES.holds(sizes) else []
    all_sizes = numbers * sum(counts) if len(numbers) == 1 else numbers
    unsuited = kind == "pooled" or (kind == "dirichlet" and max(counts) == 1)
    if unsuited or (sizes and (kind != "iid" or len(all_sizes) != sum(counts))):
        raise ValueError(
            f"data.partition={partition} and data.sizes={sizes} do not suit {sum(counts)} clients: "
            "sizes go with iid, and are one number above 0 for all or for each client; dirichlet "
            "needs several in a domain, by data.num_clients"
        )
    clients: list[Domain] = []
    for position, (domain, n) in enumerate(zip(dataset.domains, counts, strict=True)):
        # Streams differ by domain, so that one domain's size does not change another's clients.
        rng = generator(seed, position)
        size = fraction_size(len(domain.train.images), fraction)
        train = stratified_sample(domain.train, size, rng)
        domain_sizes = all_sizes[len(clients) : len(clients) + n]
        try:
            parts = _split_clients(train, n, rng, partition, domain_sizes)
        except ValueError as error:
            raise ValueError(
                f"{dataset.name}, {domain.name!r}: {error}; change data.clients_per_domain, "
                "data.num_clients, data.sizes or data.fraction"
            ) from error
        for i, part in enumerate(parts):
            name = domain.name if n == 1 else f"{domain.name}/{i}"
            clients.append(domain._replace(name=name, train=part))
    check_names_differ([client.name for client in clients], dataset.name)
    return dataset._replace(domains=tuple(clients))


def _clients_by_domain(dataset: Dataset, per_domain: int, num_clients: int) -> list[int]:
    """Returns the number of clients of each domain."""
    domains = len(dataset.domains)
    if per_domain < 1 or (num_clients and (per_domain > 1 or num_clients < domains)):
        raise ValueError(
            f"data.clients_per_domain={per_domain} and data.num_clients={num_clients}: give one of "
            f"them, at least 1 a domain or {domains} in all, one for each domain of "
            f"{dataset.name} that trains"
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
    validations = [domain.validation for domain in dataset.domains if domain.validation is not None]
    validating = min((len(split.images) for split in validations), default=0)
    domains = []
    for position, domain in enumerate(dataset.domains):
        rng = generator(seed, 0, position, TRUNCATING)
        train, validation, test = domain[1:]
        if validation is not None:
            validation = stratified_sample(validation, validating, rng)
            test = validation if domain.test is domain.validation else test
        train = stratified_sample(train, training, rng)
        domains.append(Domain(domain.name, train, validation, test))
    return dataset._replace(domains=tuple(domains))


def _split_clients(
    split: Split, n: int, rng: np.random.Generator, partition: str, sizes: Sequence[int]
) -> list[Split]:
    """Returns n clients of a split, see `share_out_domains`."""
    kind, alpha, number = read_partition(partition)
    if kind == "drawn":
        drawn = rng.integers(len(split.images), size=(n, number))
        rows = Rows(split.images, np.arange(len(split.images)))  # images are not copied
        return [select(split._replace(images=rows), index) for index in drawn]
    if n == 1 and not sizes:
        return [split]  # in its order, which the hash of the data depends on
    group = number_groups(split.names, len(split.images))
    labels = strata(split.labels)[first_samples(group)]
    values, counts = np.unique(labels, return_counts=True)
    # Images with boxes or masks are exempt: they have many classes, some of them rare.
    deals_classes = kind == "iid" and not isinstance(split.labels, dict)
    if not sizes and (counts.min() if deals_classes else counts.sum()) < n:
        raise ValueError(
            f"{counts.sum()} training samples (or groups with one name), {counts.min()} of class "
            f"{values[counts.argmin()]}, are too few for {n} clients"
        )
    if sizes:
        parts = stratified_split(labels, sizes, rng)
    elif kind == "dirichlet":
        shares = _dirichlet_counts(counts, n, alpha, rng, number)
        cuts, pools = np.cumsum(shares, axis=1)[:, :-1], shuffled_classes(labels, rng)
        dealt = [np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)]
        parts = [np.concatenate(classes) for classes in zip(*dealt, strict=True)]
    else:
        # Dealt class after class, so that clients differ by at most one in each class.
        cards = np.concatenate(shuffled_classes(labels, rng))
        parts = [cards[client::n] for client in range(n)]
    return [select(split, rng.permutation(samples_of(part, group))) for part in parts]


def _dirichlet_counts(
    counts: np.ndarray, n: int, alpha: float, rng: np.random.Generator, smallest: int
) -> np.ndarray:
    """Returns i64[C, n]: how many of each class's samples i64[C] each of n clients gets."""
    draws = [rng.dirichlet(np.full(n, alpha, np.float64)) for _ in counts]
    # In whole numbers of 2**-32, because the last bits of a draw may differ between machines, whose
    # libraries differ in log and exp. Then at most about one count in 10**10 differs.
    weights = [np.rint(draw * 2**32).astype(np.int64) for draw in draws]
    shared = np.array(
        [apportion(weight, count) for weight, count in zip(weights, counts.tolist(), strict=True)]
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

    Samples with names enter by name, label and form, and `Dataset.key` enters for their content.
    Their pixels are not read, so the hash takes seconds for a memory map of any size, and does not
    depend on how a machine decodes or rounds. Samples without names enter with every byte, in
    little-endian order.
    """
    digest = hashlib.sha256(repr((dataset.name, dataset.num_classes)).encode())
    constants = [[float(x) for x in values] for values in (dataset.mean, dataset.std)]
    digest.update(repr(constants).encode())

    def add(place: tuple[str, ...], array: np.ndarray | Rows) -> None:
        little = array.dtype.newbyteorder("<")
        digest.update(repr((*place, little.str, array.shape)).encode())
        for block in blocks(array):
            digest.update(np.ascontiguousarray(block).astype(little).tobytes())

    if dataset.key:
        digest.update(repr(("key", dataset.key)).encode())
    for domain in dataset.domains:
        for name, split in splits(domain):
            place = (domain.name, name)
            if split.names is None:
                add(place, split.images)
            else:
                form = (str(split.images.dtype), split.images.shape)
                digest.update(repr((*place, form, len(split.names))).encode())
                # Names of files need not be text; Python reads such bytes as lone surrogates.
                names = "\0".join(split.names.tolist())
                digest.update(names.encode("utf-8", "surrogatepass"))
            for leaf, array in leaves_of(split.labels):
                add((*place, leaf) if leaf else place, array)
    return digest.hexdigest()
