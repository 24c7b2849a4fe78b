"""What is told of clients: each by name where they are few, else quantiles and means by domain."""

from collections.abc import Sequence

import numpy as np

QUANTILES = {
    "min": 0.0,
    "q10": 0.1,
    "q25": 0.25,
    "median": 0.5,
    "q75": 0.75,
    "q90": 0.9,
    "max": 1.0,
}
_MOST_GROUPS = 20  # of more domains only quantiles are told


def by_client(
    names: Sequence[str], values: Sequence[float], limit: int, mean: bool = True
) -> dict[str, float | None]:
    """Client -> its value, None where that is not finite; of more than `limit` clients a summary.

    A summary is {"mean", "min", "q10", ..., "max"} over the clients with a value, and for each
    domain with several clients, where there are at most 20, "DOMAIN/*" -> their mean.

    Args:
      names: of the clients, "DOMAIN/NUMBER" where a domain has several.
      values: f[K].
      limit: the configuration's `clients_named`.
      mean: whether "mean" is told of few clients too; it is their plain mean.
    """
    values = np.asarray(values, float)
    if len(names) <= limit:
        named = dict(zip(names, map(_finite, values.tolist()), strict=True))
        return named | ({"mean": float(values.mean())} if mean else {})
    known = values[np.isfinite(values)]
    points = np.quantile(known, list(QUANTILES.values())) if len(known) else [np.nan] * 7
    told = dict(zip(QUANTILES, points, strict=True))
    return (
        {"mean": _mean(values)}
        | {n: _finite(float(x)) for n, x in told.items()}
        | {f"{domain}/*": _mean(values[rows]) for domain, rows in groups(names).items()}
    )


def groups(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Domain -> numbers of its clients; {} where each has one client, or there are more than 20."""
    domains = [name.rpartition("/")[0] for name in names]
    found = list(dict.fromkeys(filter(None, domains)))
    if len(found) > _MOST_GROUPS:
        return {}
    of_each = np.array(domains)
    return {domain: np.flatnonzero(of_each == domain) for domain in found}


def some_of(count: int, most: int) -> np.ndarray:
    """Numbers of at most so many of `count` things, evenly spaced, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
