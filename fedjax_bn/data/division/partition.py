"""Who owns which samples: the clients of a federation, and the hash of it all."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from fedjax_bn.arguments.ranges import ALPHA, refusal
from fedjax_bn.data.division.by_class import (
    SIZING,
    TRUNCATING,
    first_samples,
    fraction_size,
    number_groups,
    samples_of,
    shuffled_classes,
    stratified_sample,
    stratified_split,
)
from fedjax_bn.data.division.forms import read_partition
from fedjax_bn.data.division.skew import REMEDY, client_sizes, dirichlet_counts
from fedjax_bn.data.domain import Dataset, Domain, Split, check_names_differ, select, splits
from fedjax_bn.data.label_trees import has_boxes, leaves_of, strata, take
from fedjax_bn.data.rows import Rows, blocks
from fedjax_bn.data.seeds import generator


def share_out_domains(
    dataset: Dataset,
    clients_per_domain: int = 1,
    fraction: float = 1.0,
    seed: int = 0,
    *,
    partition: str = "iid",
    num_clients: int = 0,
    alpha: float = 0.5,
    sizes: str | Sequence[int] = "",
) -> Dataset:
    """Returns the dataset whose domains are the clients: "mnist", or "mnist/0", "mnist/1", ...

    Only training samples are shared out: every client validates and tests on the whole validation
    and test split of its domain. Clients of one domain follow each other.

    Args:
      dataset: domains that take part in training.
      clients_per_domain: at least 1.
      fraction: of each domain's training samples, in (0, 1], taken before they are shared out;
        stratified, floor(fraction * N) samples, and one at least. A source that has taken its own
        fraction already needs none here.
      seed: at least 0.
      partition: "iid", "dirichlet", "dirichlet:smallest=N" or "drawn:samples=N", how the clients
        of a domain differ, see `split_clients`.
      num_clients: of all domains together, instead of `clients_per_domain`; the domains have
        equally many, the larger ones one more where that does not go out even. 0 for none.
      alpha: concentration of "dirichlet", above 0. FedIG, A.6, has 0.5 and 0.1.
      sizes: of the clients' training sets, iid only, see `client_sizes`; "" for what the
        partition gives. Where samples share names, sizes count the names.

    Raises:
      ValueError: an argument is out of range, two exclude each other, or two clients would have one
        name; see also `split_clients` and `client_sizes`.
    """
    kind, _ = read_partition(partition)
    if kind == "pooled":
        raise ValueError("data.partition='pooled' shares nothing out: use pool_clients for it")
    if kind != "iid" and len(sizes):
        raise ValueError(
            f"data.sizes={sizes!r} and data.partition={partition!r} exclude each other: leave "
            "sizes empty or choose 'iid'"
        )
    if why := refusal(alpha, ALPHA):
        raise ValueError(f"data.alpha is {alpha}; it {why}")
    counts = _clients_by_domain(dataset, clients_per_domain, num_clients)
    if kind == "dirichlet" and max(counts) == 1:
        raise ValueError(
            "data.partition 'dirichlet' shares out each domain among several clients; set "
            "data.num_clients or data.clients_per_domain"
        )
    # One generator a domain, for its fraction and then its clients: hashes of data depend on that.
    rngs = [generator(seed, position) for position in range(len(counts))]
    trains = {}
    for domain, rng in zip(dataset.domains, rngs, strict=True):
        size = fraction_size(len(domain.train.images), fraction)
        trains[domain.name] = stratified_sample(domain.train, size, rng)
    wanted: Sequence[np.ndarray | None] = [None] * len(counts)
    if len(sizes):
        available = {
            name: int(number_groups(split.names, len(split.images)).max()) + 1
            for name, split in trains.items()
        }
        wanted = client_sizes(sizes, available, counts, generator(seed, 0, 0, SIZING))
    clients: list[Domain] = []
    for k, (domain, n) in enumerate(zip(dataset.domains, counts, strict=True)):
        options = {"partition": partition, "alpha": alpha, "sizes": wanted[k]}
        try:
            parts = split_clients(trains[domain.name], n, rngs[k], **options)
        except ValueError as error:
            raise ValueError(f"{dataset.name}, {domain.name!r}: {error}") from error
        for i, part in enumerate(parts):
            name = domain.name if n == 1 else f"{domain.name}/{i}"
            clients.append(domain._replace(name=name, train=part))
    check_names_differ([client.name for client in clients], dataset.name)
    return dataset._replace(domains=tuple(clients))


def _clients_by_domain(dataset: Dataset, per_domain: int, num_clients: int) -> list[int]:
    """Returns the number of clients of each domain."""
    domains = len(dataset.domains)
    if per_domain < 1:
        raise ValueError(f"data.clients_per_domain is {per_domain}; it must be at least 1")
    if not num_clients:
        return [per_domain] * domains
    if per_domain > 1:
        raise ValueError(
            f"data.num_clients={num_clients} and data.clients_per_domain={per_domain} exclude each "
            "other: leave num_clients at 0 or clients_per_domain at 1"
        )
    if num_clients < domains:
        raise ValueError(
            f"data.num_clients is {num_clients}; it must be 0, or at least {domains}, one for each "
            f"domain of {dataset.name} that trains"
        )
    each, over = divmod(num_clients, domains)
    counts = np.full(domains, each)
    largest = np.argsort([-len(d.train.images) for d in dataset.domains], kind="stable")
    counts[largest[:over]] += 1
    return counts.tolist()


def split_clients(
    split: Split,
    n: int,
    rng: np.random.Generator,
    *,
    partition: str = "iid",
    alpha: float = 0.5,
    sizes: np.ndarray | None = None,
) -> list[Split]:
    """Returns n clients of a split, disjoint but for "drawn"; samples of a name have one owner.

    iid: the same label distribution for all. The groups (see `by_class`) are dealt out class after
      class like cards, so the clients' numbers of groups differ by at most one, and so do those of
      any class. FedBN, Table 7, has 1 to 10 clients a domain. With `sizes`, clients get that many
      groups, stratified, and what is over belongs to no client.
    dirichlet: every class is shared out by a draw from Dirichlet(alpha), see `dirichlet_counts`;
      "dirichlet:smallest=N" says how many samples the smallest client has at least.
    drawn: with "drawn:samples=N" each client draws N samples at random with replacement, so that
      there may be far more clients than samples, and several may have the same sample.

    Raises:
      ValueError: n is less than 1, more than the groups of some class (iid) or than all groups
        (dirichlet), or alpha is not above 0.
    """
    if n < 1:
        raise ValueError(f"data.clients_per_domain is {n}; it must be at least 1")
    kind, number = read_partition(partition)
    if kind == "drawn":
        drawn = rng.integers(len(split.images), size=(n, number))
        names = split.names
        return [  # the images stay where they are
            Split(
                Rows(split.images, index),
                take(split.labels, index),
                None if names is None else names[index],
            )
            for index in drawn
        ]
    if n == 1 and sizes is None:
        return [split]
    group = number_groups(split.names, len(split.images))
    labels = strata(split.labels)[first_samples(group)]
    values, counts = np.unique(labels, return_counts=True)
    if sizes is not None:
        parts = stratified_split(labels, sizes.tolist(), rng)
    elif kind == "dirichlet":
        shares = dirichlet_counts(counts, n, alpha, rng, number)
        cuts, pools = np.cumsum(shares, axis=1)[:, :-1], shuffled_classes(labels, rng)
        dealt = [np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)]
        parts = [np.concatenate(own) for own in zip(*dealt, strict=True)]
    else:
        rarest = int(np.argmin(counts))
        # An image's boxes have many classes, some of them rare.
        if not has_boxes(split.labels) and counts[rarest] < n:
            what = "samples" if len(labels) == len(group) else "groups (by name)"
            raise ValueError(
                f"cannot share out {counts[rarest]} training {what} of class {values[rarest]} "
                f"among {n} clients; {REMEDY}"
            )
        cards = np.concatenate(shuffled_classes(labels, rng))
        parts = [cards[client::n] for client in range(n)]
    return [select(split, rng.permutation(samples_of(part, group))) for part in parts]


def truncate_all(dataset: Dataset, seed: int) -> Dataset:
    """Cuts training and validation splits to the smallest domain's, classes kept in proportion.

    What serves as test split too stays so; other test splits stay whole.
    """
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


def fingerprint(dataset: Dataset) -> str:
    """Returns SHA-256 in hex of who owns which samples, in order; equal on any machine.

    Samples with names enter by name, label and form: their pixels are not read, so that it takes
    seconds for a memory map of any size, and does not depend on how a machine decodes or rounds;
    `Dataset.key` enters for their content. Samples without names enter with every byte, in
    little-endian order.
    """
    digest = hashlib.sha256(repr((dataset.name, dataset.num_classes)).encode())
    digest.update(
        repr([[float(x) for x in dataset.mean], [float(x) for x in dataset.std]]).encode()
    )
    if dataset.key:
        digest.update(repr(("key", dataset.key)).encode())
    for domain in dataset.domains:
        for name, split in splits(domain):
            place = (domain.name, name)
            if split.names is None:
                _hash_array(digest.update, place, split.images)
            else:
                form = (str(split.images.dtype), split.images.shape)
                digest.update(repr((*place, form, len(split.names))).encode())
                # Names of files need not be text; Python reads such bytes as lone surrogates.
                names = "\0".join(split.names.tolist())
                digest.update(names.encode("utf-8", "surrogatepass"))
            for leaf, array in leaves_of(split.labels):
                _hash_array(digest.update, (*place, leaf) if leaf else place, array)
    return digest.hexdigest()


def _hash_array(
    update: Callable[[bytes], None], place: tuple[str, ...], array: np.ndarray | Rows
) -> None:
    little = array.dtype.newbyteorder("<")
    update(repr((*place, little.str, array.shape)).encode())
    for block in blocks(array):
        update(np.ascontiguousarray(block).astype(little).tobytes())
