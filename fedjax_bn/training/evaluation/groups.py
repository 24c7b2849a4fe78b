"""Records values of clients: by name for few clients, else by quantiles and domains."""

from collections.abc import Sequence

import numpy as np

QUANTILES = {"min": 0, "q10": 0.1, "q25": 0.25, "median": 0.5, "q75": 0.75, "q90": 0.9, "max": 1}
_MOST_GROUPS = 20  # domains


def by_client(
    names: Sequence[str], values: Sequence[float], limit: int, mean: bool = True
) -> dict[str, float | None]:
    """Returns client -> its value (None if it is not finite), or a summary of many clients.

    The summary of more than `limit` clients is {"mean", "min", "q10", ..., "max"} over those with
    a value, and "DOMAIN/*" -> mean for each domain with several clients, unless these are more than
    20 domains.

    Args:
      names: of the clients, "DOMAIN/NUMBER" if a domain has several.
      values: f[K].
      limit: the configuration's `clients_named`.
      mean: whether few clients have an entry "mean" too, their plain mean.
    """
    values = np.asarray(values, float)
    if len(names) <= limit:
        named = {
            name: x if np.isfinite(x) else None
            for name, x in zip(names, values.tolist(), strict=True)
        }
        return named | ({"mean": float(values.mean())} if mean else {})

    def mean_of(rows: np.ndarray) -> float | None:
        finite = values[rows & np.isfinite(values)]
        return float(finite.mean()) if len(finite) else None

    finite = values[np.isfinite(values)]
    points = np.quantile(finite, [*QUANTILES.values()]).tolist() if len(finite) else [None] * 7
    summary = {"mean": mean_of(np.ones(len(names), bool))} | dict(
        zip(QUANTILES, points, strict=True)
    )
    domains = np.array([name.rpartition("/")[0] for name in names])
    several = list(dict.fromkeys(filter(None, domains.tolist())))
    if len(several) <= _MOST_GROUPS:
        summary |= {f"{domain}/*": mean_of(domains == domain) for domain in several}
    return summary


def some_of(count: int, limit: int) -> np.ndarray:
    """Returns at most `limit` of the numbers 0..count-1, evenly spaced, both ends included."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int))
