"""Centralized training: one client that has everybody's training samples."""

import numpy as np

from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.label_trees import join


def pool_clients(dataset: Dataset) -> tuple[Dataset, tuple[Domain, ...]]:
    """One client "pooled" with the samples of all clients, and each of them as a domain to test on.

    FedBN, E.3 and Table 12. The one model is tested on each domain's own test split, as an unseen
    domain's, and on all of them together, as the client's.

    Args:
      dataset: K clients.

    Returns:
      Dataset of one client, and K domains that train nobody.
    """
    domains = dataset.domains
    validations = [domain.validation for domain in domains]
    client = Domain(
        "pooled",
        train=_join([domain.train for domain in domains]),
        validation=None if None in validations else _join(validations),
        test=_join([domain.test for domain in domains]),
    )
    unseen = tuple(Domain(domain.name, None, None, domain.test) for domain in domains)
    return dataset._replace(domains=(client,)), unseen


def _join(splits: list[Split]) -> Split:
    named = all(split.names is not None for split in splits)
    return Split(
        np.concatenate([np.asarray(split.images) for split in splits]),
        join([split.labels for split in splits]),
        np.concatenate([split.names for split in splits]) if named else None,
    )
