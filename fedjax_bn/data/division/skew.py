"""Clients that differ in labels (Dirichlet) or in size (log-normal, Dirichlet, or as listed).

Reference for label skew: Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution
for federated visual classification", 2019; used by FedIG, appendix A.6.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from fedjax_bn.arguments.ranges import ALPHA, refusal
from fedjax_bn.arguments.text import brief
from fedjax_bn.data.division.by_class import apportion, quantize
from fedjax_bn.data.division.forms import SMALLEST, read_sizes

REMEDY = "lower data.clients_per_domain (or data.num_clients) or raise data.fraction"


def dirichlet_counts(
    counts: np.ndarray, n: int, alpha: float, rng: np.random.Generator, smallest: int = SMALLEST
) -> np.ndarray:
    """Draws how many samples of each class each of n clients gets; nothing is left over.

    For every class, shares p ~ Dirichlet(alpha, ..., alpha) over the clients are drawn, and its
    samples are shared out by largest remainder. Then clients below min(smallest, samples // n) are
    raised to it: they take from the largest client.

    Args:
      counts: i64[C], samples of each class; together at least n.
      n: clients, at least 1.
      alpha: concentration, above 0: near 0 a class has one owner, at 100 all have nearly the same.
      rng: draws the shares.
      smallest: samples of the smallest client, at least 1. It is ours: the reference has none.

    Returns:
      i64[C, n].

    Raises:
      ValueError: alpha is not above 0, or there are fewer samples than clients.
    """
    if why := refusal(alpha, ALPHA):
        raise ValueError(f"data.alpha is {alpha}; it {why}")
    if counts.sum() < n:
        raise ValueError(f"{counts.sum()} samples are too few for {n} clients, one each; {REMEDY}")
    draws = [rng.dirichlet(np.full(n, alpha, np.float64)) for _ in counts]
    shared = [
        apportion(quantize(draw), count) for draw, count in zip(draws, counts.tolist(), strict=True)
    ]
    return _raise_smallest(np.array(shared), min(smallest, int(counts.sum()) // n))


def _raise_smallest(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Moves samples i64[C, n] of class and client until each client has `minimum`.

    One sample at a time goes from the largest to the smallest client, of the class of which the
    largest has most; of equals, the first.
    """
    counts = counts.copy()
    sizes = counts.sum(0)
    while sizes.min() < minimum:
        poor, rich = sizes.argmin(), sizes.argmax()
        label = counts[:, rich].argmax()
        counts[label, [poor, rich]] += [1, -1]
        sizes[[poor, rich]] += [1, -1]
    return counts


def client_sizes(
    sizes: str | Sequence[int],
    available: Mapping[str, int],
    clients: Sequence[int],
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Returns the number of training samples of each client, domain after domain.

    Args:
      sizes: whole numbers, one a client or one for all; or "lognormal:sigma=S" or
        "dirichlet:alpha=A". Drawn sizes are proportional to K draws of exp(S * normal) or to one
        draw of Dirichlet(A, ..., A), and as large as every domain's samples allow; but none is
        below min(N, its domain's samples // its domain's clients), with N of a further
        ":smallest=N", or 10.
      available: name of each domain -> its samples.
      clients: number of clients of each domain.
      rng: draws the sizes.

    Returns:
      For each domain, i64[its clients], together at most its samples.

    Raises:
      ValueError: the sizes are of no such form, too many or too few, or ask for more than there is;
        or a domain has fewer samples than clients.
    """
    for (name, limit), n in zip(available.items(), clients, strict=True):
        if limit < n:
            raise ValueError(
                f"{limit} training samples of {name!r} are too few for {n} clients, one each; "
                f"{REMEDY}"
            )
    total, borders = sum(clients), np.cumsum(clients)[:-1]
    wanted = read_sizes(sizes) if isinstance(sizes, str) else list(sizes)
    if isinstance(wanted, tuple):
        kind, number, smallest = wanted
        if kind == "dirichlet":
            draws = rng.dirichlet(np.full(total, number, np.float64))
        else:
            logs = number * rng.standard_normal(total)
            draws = np.exp(logs - logs.max())  # at most 1, whatever sigma is
        weights = np.maximum(quantize(draws / draws.max()), 1)
        return _largest_that_fit(np.split(weights, borders), list(available.values()), smallest)
    listed = np.array([int(entry) for entry in wanted], np.int64)
    if len(listed) not in (1, total) or listed.min(initial=1) < 1:
        raise ValueError(
            f"data.sizes is {brief(sizes)}; it must have one number of at least 1 for all clients, "
            f"or one for each of the {total}"
        )
    parts = np.split(np.broadcast_to(listed, total), borders)
    for (name, limit), size in zip(available.items(), parts, strict=True):
        if size.sum() > limit:
            raise ValueError(
                f"data.sizes asks for {size.sum()} training samples of {name!r}, which has {limit};"
                " lower it or raise data.fraction"
            )
    return parts


def _largest_that_fit(
    weights: list[np.ndarray], available: Sequence[int], smallest: int
) -> list[np.ndarray]:
    """Returns sizes proportional to weights over all domains, so large that one is used up."""
    totals = [int(weight.sum()) for weight in weights]
    scale = min(Fraction(count, total) for count, total in zip(available, totals, strict=True))
    sizes = []
    for weight, total, limit in zip(weights, totals, available, strict=True):
        least = min(smallest, limit // len(weight))
        size = apportion(weight, max(int(scale * total), least * len(weight)))
        sizes.append(_raise_smallest(size[None], least)[0])
    return sizes
