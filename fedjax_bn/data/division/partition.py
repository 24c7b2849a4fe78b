"""Who owns which samples: the clients of a federation, and the hash of it all."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from fedjax_bn.arguments.ranges import ALPHA, refusal
from fedjax_bn.data.division.by_class import (
    split_clients,
    stratified_sample,
    take_fraction,
)
from fedjax_bn.data.division.forms import drawn_samples, with_smallest
from fedjax_bn.data.division.groups import number_groups
from fedjax_bn.data.division.integer_shares import SIZING, TRUNCATING
from fedjax_bn.data.division.label_and_size_skew import client_sizes
from fedjax_bn.data.domain import Dataset, Domain, Split, check_names_differ, splits
from fedjax_bn.data.label_trees import leaves_of
from fedjax_bn.data.rows import Rows, blocks
from fedjax_bn.data.seeds import generator

_PARTITIONS = ("iid", "dirichlet", "drawn:N")


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
    """The dataset whose domains are the clients: "mnist", or "mnist/0", "mnist/1" for several.

    Only training samples are shared out: every client validates and tests on the whole validation
    and test split of its domain. Clients of one domain follow each other.

    Args:
      dataset: domains that take part in training.
      clients_per_domain: at least 1.
      fraction: of each domain's training samples, in (0, 1], taken before they are shared out.
        A source that has taken its own fraction already needs none here.
      seed: at least 0.
      partition: "iid", "dirichlet", "dirichlet:smallest=N" or "drawn:N", how the clients of a
        domain differ, see `split_clients`.
      num_clients: of all domains together, in place of `clients_per_domain`; the domains have
        equally many, the larger ones one more where that does not go out even. 0 for none.
      alpha: concentration of "dirichlet", above 0. FedIG, A.6, has 0.5 and 0.1.
      sizes: of the clients' training sets, iid only, see `client_sizes`; "" for what the
        partition gives. Where samples share names, sizes count the names.

    Raises:
      ValueError: an argument is out of range, two exclude each other, or two clients would have one
        name; see also `take_fraction`, `split_clients` and `client_sizes`.
    """
    kind = _check_partition(partition, alpha, sizes)
    counts = _clients_by_domain(dataset, clients_per_domain, num_clients)
    if kind == "dirichlet" and max(counts) == 1:
        raise ValueError(
            "data.partition 'dirichlet' shares out each domain among several clients; set "
            "data.num_clients or data.clients_per_domain"
        )
    rngs = [generator(seed, position) for position in range(len(counts))]
    trains = [
        take_fraction(domain.train, fraction, rng)
        for domain, rng in zip(dataset.domains, rngs, strict=True)
    ]
    names = [domain.name for domain in dataset.domains]
    wanted = _wanted_sizes(dict(zip(names, trains, strict=True)), counts, sizes, seed)
    clients: list[Domain] = []
    for k, (domain, n) in enumerate(zip(dataset.domains, counts, strict=True)):
        options = {"partition": partition, "alpha": alpha, "sizes": wanted[k]}
        try:
            parts = split_clients(trains[k], n, rngs[k], **options)
        except ValueError as error:
            raise ValueError(f"{dataset.name}, {domain.name!r}: {error}") from error
        for i, part in enumerate(parts):
            name = domain.name if n == 1 else f"{domain.name}/{i}"
            clients.append(domain._replace(name=name, train=part))
    check_names_differ([client.name for client in clients], dataset.name)
    return dataset._replace(domains=tuple(clients))


def _check_partition(partition: str, alpha: float, sizes: str | Sequence[int]) -> str:
    kind = "drawn:N" if drawn_samples(partition) else with_smallest(partition)[0]
    if kind not in _PARTITIONS or (kind == "iid" and partition != kind):
        raise ValueError(
            f"data.partition is {partition!r}; it must be one of {', '.join(_PARTITIONS)}"
        )
    if kind != "iid" and len(sizes):
        raise ValueError(
            f"data.sizes={sizes!r} and data.partition={partition!r} exclude each other: leave "
            "sizes empty or choose 'iid'"
        )
    if why := refusal(alpha, ALPHA):
        raise ValueError(f"data.alpha is {alpha}; it {why}")
    return kind


def _clients_by_domain(dataset: Dataset, per_domain: int, num_clients: int) -> list[int]:
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


def truncate_all(dataset: Dataset, seed: int) -> Dataset:
    """Training and validation splits cut to the smallest domain's, classes kept in proportion.

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


def _wanted_sizes(
    trains: dict[str, Split], counts: Sequence[int], sizes: str | Sequence[int], seed: int
) -> Sequence[np.ndarray | None]:
    """Groups of each client, domain after domain, or None where the partition decides."""
    if not len(sizes):
        return [None] * len(trains)
    available = {
        name: int(number_groups(split.names, len(split.images)).max()) + 1
        for name, split in trains.items()
    }
    return client_sizes(sizes, available, counts, generator(seed, 0, 0, SIZING))


def fingerprint(dataset: Dataset) -> str:
    """SHA-256 in hex that depends on who owns which samples, in order; equal on any machine.

    Samples with names enter by name, label and form: their pixels are not read, so that it takes
    seconds for a memory map of any size, and does not depend on how a machine decodes or rounds.
    `Dataset.key` stands for their content. Samples without names enter with every byte, in
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
